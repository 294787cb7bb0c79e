/*
 * The frame of a program that is driven line by line.
 *
 *   #define MORE(X) X(name, arguments) …          the driver functions that driver.h lacks
 *   MORE(DECLARE_MORE)                            as more_NAME, NULL where the driver has none
 *   static void call(const char *line) { … }      makes the call and prints one line; others are for `common`
 *   CONVERSATION                                  main(): a call per line of standard input
 */
#ifndef TESSERA_TESTS_CONVERSATION_H
#define TESSERA_TESTS_CONVERSATION_H

#include "driver.h"

#include <string.h>

/* cuda.h's, of pools and of allocation nodes. */
typedef struct {
    int type, id;
} CUmemLocation;
typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *security;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

#define DECLARE_MORE(name, arguments) static CUresult(*more_##name) arguments;
#define LOAD_MORE(name, arguments) *(void **)&more_##name = dlsym(handle, #name);

/* Ends a call with what it answers, and with a value that is looked at afterwards. */
#define ANSWER(...) do { printf("%d\n", (__VA_ARGS__)); return; } while (0)
#define ANSWER_WITH(value, ...)                                                                    \
    do {                                                                                           \
        CUresult result_ = (__VA_ARGS__);                                                          \
        printf("%d %llu\n", result_, (unsigned long long)(value));                                 \
        return;                                                                                    \
    } while (0)

#define IS(name) if (strcmp(command, name) == 0)

/* The context of the last `retain`. */
static CUcontext retained;

/*
 * Calls of more than one program; unknown ones answer -1.
 *
 *   init | retain DEV -> handle (and makes it current) | release DEV | reset DEV
 *   ctx DEV -> handle | destroy HANDLE | current HANDLE
 *   alloc BYTES -> ptr | free PTR | info -> free total | sync
 */
static inline void common(const char *line) {
    char command[32] = "";
    unsigned long long a = 0;
    sscanf(line, "%31s %llu", command, &a);
    void *handle = (void *)(uintptr_t)a;
    IS("init") ANSWER(cuInit(0));
    IS("retain") {
        CUresult result = cuDevicePrimaryCtxRetain(&retained, (CUdevice)a);
        ANSWER_WITH((uintptr_t)retained, result ? result : cuCtxSetCurrent(retained));
    }
    IS("release") ANSWER(cuDevicePrimaryCtxRelease_v2((CUdevice)a));
    IS("reset") ANSWER(cuDevicePrimaryCtxReset_v2((CUdevice)a));
    IS("ctx") {
        CUcontext context = NULL;
        ANSWER_WITH((uintptr_t)context, cuCtxCreate_v2(&context, 0, (CUdevice)a));
    }
    IS("destroy") ANSWER(cuCtxDestroy_v2(handle));
    IS("current") ANSWER(cuCtxSetCurrent(handle));
    IS("alloc") {
        CUdeviceptr ptr = 0;
        ANSWER_WITH(ptr, cuMemAlloc_v2(&ptr, a));
    }
    IS("free") ANSWER(cuMemFree_v2(a));
    IS("info") {
        size_t avail = 0, total = 0;
        CUresult result = cuMemGetInfo_v2(&avail, &total);
        printf("%d %zu %zu\n", result, avail, total);
        return;
    }
    IS("sync") ANSWER(cuCtxSynchronize());
    ANSWER(-1);
}

/* Streams 0 to 7 are made at first use; others are the default stream. */
static inline CUstream stream(unsigned long long number) {
    static CUstream streams[8];
    if (number > 7) return NULL;
    if (!streams[number]) cuStreamCreate(&streams[number], 1 /* non-blocking */);
    return streams[number];
}

#define CONVERSATION                                                                               \
    int main(void) {                                                                               \
        char line[256];                                                                            \
        load_driver();                                                                             \
        void *handle = dlopen("libcuda.so.1", RTLD_NOW);                                           \
        MORE(LOAD_MORE)                                                                            \
        while (fgets(line, sizeof line, stdin)) {                                                  \
            call(line);                                                                            \
            fflush(stdout);                                                                        \
        }                                                                                          \
        return 0;                                                                                  \
    }

#endif
