/*
 * Limits of contexts and frames of kernels: one call per line of standard input, answered
 * `RESULT VALUE…`.
 *
 *   init | retain DEV | release DEV | reset DEV | ctx DEV -> handle | destroy HANDLE | current HANDLE
 *   limit WHICH VALUE | now WHICH -> value
 *   kernel BYTES -> function (a module's, with so much local memory for each thread)
 *   library BYTES -> function (a library's) | launch FUNCTION | sync
 *   alloc BYTES -> ptr | free PTR | info -> free total
 *
 * Written from the CUDA Driver API manual, "Context Management" and "Library Management".
 */
#include "conversation.h"

#include <string.h>

typedef void *CUlibrary, *CUkernel;

#define MORE(X)                                                                                    \
    X(cuCtxSetLimit, (int limit, size_t value))                                                    \
    X(cuCtxGetLimit, (size_t *value, int limit))                                                   \
    X(cuLibraryLoadData, (CUlibrary * library, const void *code, int *jit, void **jit_values,      \
                          unsigned jit_count, int *options, void **values, unsigned count))        \
    X(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name))                \
    X(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))
MORE(DECLARE_MORE)

static const char *image(unsigned long long bytes) {
    static char ptx[512];
    snprintf(ptx, sizeof ptx,
             ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry framed()\n{\n"
             "\t.local .align 8 .b8 __local_depot0[%llu];\n\tret;\n}\n",
             bytes);
    return ptx;
}

static CUresult of_module(CUfunction *function, unsigned long long bytes) {
    CUmodule module = NULL;
    CUresult result = cuModuleLoadData(&module, image(bytes));
    return result ? result : cuModuleGetFunction(function, module, "framed");
}

static CUresult of_library(CUfunction *function, unsigned long long bytes) {
    CUlibrary library = NULL;
    CUkernel kernel = NULL;
    CUresult result = more_cuLibraryLoadData(&library, image(bytes), NULL, NULL, 0, NULL, NULL, 0);
    if (result == 0) result = more_cuLibraryGetKernel(&kernel, library, "framed");
    return result ? result : more_cuKernelGetFunction(function, kernel);
}

static void call(const char *line) {
    char command[32] = "";
    unsigned long long a = 0, b = 0;
    sscanf(line, "%31s %llu %llu", command, &a, &b);
    CUresult result = -1;
    void *handle = (void *)(uintptr_t)a;
#define IS(name) if (strcmp(command, name) == 0)
    IS("init") ANSWER(cuInit(0));
    IS("retain") {
        CUcontext context = NULL;
        result = cuDevicePrimaryCtxRetain(&context, (CUdevice)a);
        if (result == 0) result = cuCtxSetCurrent(context);
        ANSWER_WITH((uintptr_t)context, result);
    }
    IS("release") ANSWER(cuDevicePrimaryCtxRelease_v2((CUdevice)a));
    IS("reset") ANSWER(cuDevicePrimaryCtxReset_v2((CUdevice)a));
    IS("ctx") {
        CUcontext context = NULL;
        ANSWER_WITH((uintptr_t)context, cuCtxCreate_v2(&context, 0, (CUdevice)a));
    }
    IS("destroy") ANSWER(cuCtxDestroy_v2(handle));
    IS("current") ANSWER(cuCtxSetCurrent(handle));
    IS("limit") ANSWER(more_cuCtxSetLimit((int)a, b));
    IS("now") {
        size_t value = 0;
        ANSWER_WITH(value, more_cuCtxGetLimit(&value, (int)a));
    }
    IS("kernel") {
        CUfunction function = NULL;
        ANSWER_WITH((uintptr_t)function, of_module(&function, a));
    }
    IS("library") {
        CUfunction function = NULL;
        ANSWER_WITH((uintptr_t)function, of_library(&function, a));
    }
    IS("launch") ANSWER(cuLaunchKernel(handle, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    IS("sync") ANSWER(cuCtxSynchronize());
    IS("alloc") {
        CUdeviceptr ptr = 0;
        ANSWER_WITH(ptr, cuMemAlloc_v2(&ptr, a));
    }
    IS("free") ANSWER(cuMemFree_v2(a));
    IS("info") {
        size_t avail = 0, total = 0;
        result = cuMemGetInfo_v2(&avail, &total);
        printf("%d %zu %zu\n", result, avail, total);
        return;
    }
    printf("-1\n");
}

CONVERSATION
