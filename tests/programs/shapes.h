/*
 * What the programs of shapes have in common: a time to work, kernels of a given length, GPUs as a thread
 * uses them, and memory that processes share with each other and with the GPU.
 *
 * Written from the CUDA Driver API manual. Kernel `spin` takes the nanoseconds of its parameter.
 */
#ifndef TESSERA_TESTS_SHAPES_H
#define TESSERA_TESTS_SHAPES_H

#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define COMMON(X)                                                                                  \
    X(cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))                              \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr * device, void *host, unsigned flags))
#define DECLARE_OWN(name, arguments) static CUresult(*name) arguments;
#define LOAD_OWN(name, arguments) *(void **)&name = dlsym(handle, #name);
COMMON(DECLARE_OWN)

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry spin(.param .u64 ns) { ret; }\n";

#define MUST(call)                                                                                 \
    do {                                                                                           \
        CUresult result_ = (call);                                                                 \
        if (result_) {                                                                             \
            fprintf(stderr, "%s: %d\n", #call, result_);                                           \
            _exit(3);                                                                              \
        }                                                                                          \
    } while (0)

/* One GPU as a thread uses it. */
struct gpu {
    CUcontext context;
    CUfunction spin;
    CUstream stream, other, blocking;
};

/* What processes share, on host memory; and when the time is over. */
static struct shared {
    _Atomic uint32_t word[2], done[2], over;
    _Atomic uint64_t end_us;
} *shared;
static CUdeviceptr words[2];
static unsigned long long kernel_ns = 200000, work_us;
static struct gpu gpus[2];

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

/* The time begins with the first question, before the first step: a busy machine takes its time to start. */
static int is_over(void) {
    uint64_t now = now_us(), end = 0;
    if (atomic_compare_exchange_strong(&shared->end_us, &end, now + work_us)) return 0;
    return now >= end;
}

static void use(int device) {
    MUST(cuCtxSetCurrent(gpus[device].context));
}

static void open_gpu(int device) {
    struct gpu *gpu = &gpus[device];
    CUdevice found;
    CUmodule module;
    /* Not before the process has forked: a child has no use of its parent's driver. */
    MUST(cuInit(0));
    MUST(cuDeviceGet(&found, device));
    MUST(cuDevicePrimaryCtxRetain(&gpu->context, found));
    use(device);
    MUST(cuModuleLoadData(&module, PTX));
    MUST(cuModuleGetFunction(&gpu->spin, module, "spin"));
    MUST(cuStreamCreate(&gpu->stream, 1));
    MUST(cuStreamCreate(&gpu->other, 1));
    MUST(cuStreamCreate(&gpu->blocking, 0));
}

static void open_words(void) {
    CUdeviceptr at;
    MUST(cuMemHostRegister_v2(shared, 4096, 3));
    MUST(cuMemHostGetDevicePointer_v2(&at, shared, 0));
    words[0] = at + offsetof(struct shared, word);
    words[1] = words[0] + 4;
}

static void launch(int device, CUstream into) {
    void *params[] = {&kernel_ns};
    MUST(cuLaunchKernel(gpus[device].spin, 1, 1, 1, 1, 1, 1, 0, into, params, NULL));
}

/* A shape, by the name under which the command line asks for it. */
struct shape {
    const char *name;
    unsigned long long (*run)(void);
};

static void load_own(void *handle);

/* main of every such program: NAME SHAPE MILLISECONDS [KERNEL_US] -> "steps N" */
static int play(const struct shape *shapes, int count, char **arguments) {
    if (count < 3) return 2;
    while (shapes->name && strcmp(shapes->name, arguments[1])) shapes++;
    if (!shapes->name) return 2;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    work_us = strtoull(arguments[2], NULL, 10) * 1000;
    if (count > 3) kernel_ns = strtoull(arguments[3], NULL, 10) * 1000;
    load_driver();
    load_own(dlopen("libcuda.so.1", RTLD_NOW));
    printf("steps %llu\n", shapes->run());
    return 0;
}

#endif
