/*
 * Limits of contexts and frames of kernels: one call per line of standard input, answered
 * `RESULT VALUE…`.
 *
 *   limit WHICH VALUE | now WHICH -> value
 *   kernel BYTES -> function (a module's, with so much local memory for each thread)
 *   library BYTES -> function (a library's) | cukernel BYTES -> kernel (no function of it)
 *   launch FUNCTION [HOW] (HOW: `launched` below)
 *   capture FUNCTION -> graph (launched into a capturing stream) | make FUNCTION -> graph (a node)
 *   nest GRAPH -> graph (with that one in it) | instantiate GRAPH -> exec | run EXEC
 *   update EXEC GRAPH | set EXEC FUNCTION HOW (of the last node made)
 *
 * Written from the CUDA Driver API manual, "Context Management", "Library Management", "Execution Control"
 * and "Graph Management".
 */
#include "conversation.h"

typedef void *CUlibrary, *CUkernel, *CUgraph, *CUgraphNode, *CUgraphExec;
typedef struct {
    CUfunction func;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    CUkernel kern;
    CUcontext ctx;
} NodeParams;
/* CUgraphNodeParams. */
typedef struct {
    int type, reserved0[3];
    union {
        NodeParams kernel;
        CUgraph graph;
        char all[232];
    };
    long long reserved2;
} AnyParams;
typedef struct {
    unsigned grid[3], block[3], shared;
    CUstream stream;
    void *attrs;
    unsigned count;
} LaunchConfig;
typedef struct {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    CUstream stream;
    void **params;
} LaunchParams;
typedef struct {
    int result;
    CUgraphNode node, from;
} UpdateInfo;

#define MORE(X)                                                                                    \
    X(cuCtxSetLimit, (int limit, size_t value))                                                    \
    X(cuCtxGetLimit, (size_t *value, int limit))                                                   \
    X(cuLibraryLoadData, (CUlibrary * library, const void *code, int *jit, void **jit_values,      \
                          unsigned jit_count, int *options, void **values, unsigned count))        \
    X(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name))                \
    X(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                               \
    X(cuLaunchKernel_ptsz,                                                                         \
      (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
       unsigned shared, CUstream s, void **params, void **extra))                                  \
    X(cuLaunchKernelEx, (const LaunchConfig *config, CUfunction f, void **params, void **extra))   \
    X(cuLaunchCooperativeKernel,                                                                   \
      (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
       unsigned shared, CUstream s, void **params))                                                \
    X(cuLaunchCooperativeKernelMultiDevice,                                                        \
      (LaunchParams * launches, unsigned devices, unsigned flags))                                 \
    X(cuLaunch, (CUfunction f))                                                                    \
    X(cuLaunchGrid, (CUfunction f, int width, int height))                                         \
    X(cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream s))                        \
    X(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                        \
    X(cuStreamEndCapture, (CUstream stream, CUgraph *graph))                                       \
    X(cuGraphCreate, (CUgraph * graph, unsigned flags))                                            \
    X(cuGraphAddKernelNode_v2, (CUgraphNode * node, CUgraph graph, const CUgraphNode *after,       \
                                size_t count, const NodeParams *params))                           \
    X(cuGraphAddNode_v2, (CUgraphNode * node, CUgraph graph, const CUgraphNode *after,             \
                          const void *edges, size_t count, AnyParams *params))                     \
    X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))  \
    X(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                          \
    X(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, UpdateInfo * info))                  \
    X(cuGraphExecKernelNodeSetParams,                                                              \
      (CUgraphExec exec, CUgraphNode node, const NodeParams *params))                              \
    X(cuGraphExecKernelNodeSetParams_v2,                                                           \
      (CUgraphExec exec, CUgraphNode node, const NodeParams *params))                              \
    X(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, AnyParams *params))
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

static CUresult kernel_of(CUkernel *kernel, unsigned long long bytes) {
    CUlibrary library = NULL;
    CUresult result = more_cuLibraryLoadData(&library, image(bytes), NULL, NULL, 0, NULL, NULL, 0);
    return result ? result : more_cuLibraryGetKernel(kernel, library, "framed");
}

static CUstream own_stream(void) {
    CUstream stream = NULL;
    cuStreamCreate(&stream, 1 /* non-blocking */);
    return stream;
}

static CUresult launched(CUfunction f, unsigned long long way) {
    LaunchConfig config = {{1, 1, 1}, {32, 1, 1}, 0, NULL, NULL, 0};
    LaunchParams several[1] = {{f, {1, 1, 1}, {32, 1, 1}, 0, NULL, NULL}};
    switch (way) {
    case 1: return more_cuLaunchKernelEx(&config, f, NULL, NULL);
    case 2: return more_cuLaunchCooperativeKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL);
    case 3: return more_cuLaunchCooperativeKernelMultiDevice(several, 1, 0);
    case 4: return more_cuLaunch(f);
    case 5: return more_cuLaunchGrid(f, 1, 1);
    case 6: return more_cuLaunchGridAsync(f, 1, 1, NULL);
    case 7: return more_cuLaunchKernel_ptsz(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    case 8: return cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, own_stream(), NULL, NULL);
    default: return cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    }
}

static CUresult captured(CUgraph *graph, CUfunction f) {
    CUstream stream = own_stream();
    CUresult result = more_cuStreamBeginCapture_v2(stream, 0 /* global */);
    if (result == 0) result = cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
    CUresult ended = more_cuStreamEndCapture(stream, graph);
    return result ? result : ended;
}

static void call(const char *line) {
    static CUgraphNode node;
    char command[32] = "";
    unsigned long long a = 0, b = 0, c = 0;
    sscanf(line, "%31s %llu %llu %llu", command, &a, &b, &c);
    CUresult result = -1;
    void *handle = (void *)(uintptr_t)a;
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
    IS("cukernel") {
        CUkernel kernel = NULL;
        ANSWER_WITH((uintptr_t)kernel, kernel_of(&kernel, a));
    }
    IS("launch") ANSWER(launched(handle, b));
    CUgraph graph = NULL;
    IS("capture") ANSWER_WITH((uintptr_t)graph, captured(&graph, handle));
    IS("make") {
        NodeParams params = {handle, {1, 1, 1}, {32, 1, 1}, 0, NULL, NULL, NULL, NULL};
        result = more_cuGraphCreate(&graph, 0);
        if (result == 0) result = more_cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &params);
        ANSWER_WITH((uintptr_t)graph, result);
    }
    IS("nest") {
        AnyParams params = {.type = 4 /* graph */, .graph = handle};
        result = more_cuGraphCreate(&graph, 0);
        CUgraphNode outer = NULL;
        if (result == 0) result = more_cuGraphAddNode_v2(&outer, graph, NULL, NULL, 0, &params);
        ANSWER_WITH((uintptr_t)graph, result);
    }
    IS("instantiate") {
        CUgraphExec exec = NULL;
        ANSWER_WITH((uintptr_t)exec, more_cuGraphInstantiateWithFlags(&exec, handle, 0));
    }
    IS("run") ANSWER(more_cuGraphLaunch(handle, NULL));
    IS("update") {
        UpdateInfo info = {0, NULL, NULL};
        ANSWER(more_cuGraphExecUpdate_v2(handle, (CUgraph)(uintptr_t)b, &info));
    }
    IS("set") {
        CUfunction f = (CUfunction)(uintptr_t)b;
        AnyParams any = {.kernel = {f, {1, 1, 1}, {32, 1, 1}, 0, NULL, NULL, NULL, NULL}};
        ANSWER(c == 0   ? more_cuGraphExecKernelNodeSetParams(handle, node, &any.kernel)
               : c == 1 ? more_cuGraphExecKernelNodeSetParams_v2(handle, node, &any.kernel)
                        : more_cuGraphExecNodeSetParams(handle, node, &any));
    }
    common(line);
}

CONVERSATION
