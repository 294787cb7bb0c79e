/*
 * Programs whose work in flight waits for work that is not launched yet, as collectives, waits for
 * memory, host functions and captures have it:
 *
 *   tied SHAPE MILLISECONDS [KERNEL_US] -> "steps N" when the time is over and all is complete
 *
 *   none       kernels in one stream, a synchronisation every eight: for comparison
 *   gpus       one thread, two GPUs: each writes its word, waits for the other's, and computes
 *   ahead      the same, synchronised every sixteenth step only
 *   threads    the same with a thread for each GPU
 *   processes  a host function of one process waits for the other's result, which takes a kernel
 *   ranks      two processes, two GPUs: a wait in the stream for what the other's stream writes
 *   host       a host function waits for what its thread does after the next launch
 *   value      cuStreamWaitValue32 for a word that the host writes after the next launch
 *   tune       work in the default stream, then a relaxed capture of a blocking stream while kernels are
 *              timed in a non-blocking one
 *   own        kernels in a per-thread default stream beside an open capture
 *   others     one thread captures while another computes in its per-thread default stream
 *
 * Written from the CUDA Driver API manual. Kernel `spin` takes the nanoseconds of its parameter.
 */
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PER_THREAD ((CUstream)2)
#define MORE(X)                                                                                    \
    X(cuStreamWaitValue32_v2, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags))        \
    X(cuStreamWriteValue32_v2, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags))       \
    X(cuLaunchHostFunc, (CUstream s, void (*function)(void *), void *data))                        \
    X(cuStreamBeginCapture_v2, (CUstream s, int mode))                                             \
    X(cuStreamEndCapture, (CUstream s, void **graph))                                              \
    X(cuGraphDestroy, (void *graph))                                                               \
    X(cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))                              \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr * device, void *host, unsigned flags))
#define DECLARE_OWN(name, arguments) static CUresult(*name) arguments;
#define LOAD_OWN(name, arguments) *(void **)&name = dlsym(handle, #name);
MORE(DECLARE_OWN)

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

/* What processes share, on host memory. */
static struct shared {
    _Atomic uint32_t word[2], done[2], over;
} *shared;
static CUdeviceptr words[2];
static unsigned long long kernel_ns = 200000, end_us;
static struct gpu gpus[2];

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

static int is_over(void) {
    return now_us() >= end_us;
}

static void open_gpu(int device) {
    struct gpu *gpu = &gpus[device];
    CUdevice found;
    CUmodule module;
    /* Not before the process has forked: a child has no use of its parent's driver. */
    MUST(cuInit(0));
    MUST(cuDeviceGet(&found, device));
    MUST(cuDevicePrimaryCtxRetain(&gpu->context, found));
    MUST(cuCtxSetCurrent(gpu->context));
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

static void use(int device) {
    MUST(cuCtxSetCurrent(gpus[device].context));
}

static void launch(int device, CUstream into) {
    void *params[] = {&kernel_ns};
    MUST(cuLaunchKernel(gpus[device].spin, 1, 1, 1, 1, 1, 1, 0, into, params, NULL));
}

/* A part of a collective on one GPU: tells the other that it is there, waits for it, computes. */
static void collective(int device, uint32_t step) {
    CUstream stream = gpus[device].stream;
    use(device);
    launch(device, stream);
    MUST(cuStreamWriteValue32_v2(stream, words[device], step, 0));
    MUST(cuStreamWaitValue32_v2(stream, words[!device], step, 0));
    launch(device, stream);
}

static unsigned long long both(uint32_t every) {
    uint32_t step = 0;
    open_gpu(0);
    open_gpu(1);
    open_words();
    while (!is_over()) {
        step++;
        collective(0, step);
        collective(1, step);
        if (step % every && !is_over()) continue;
        for (int device = 0; device < 2; device++) {
            use(device);
            MUST(cuStreamSynchronize(gpus[device].stream));
        }
    }
    return step;
}

static void *one_gpu(void *argument) {
    int device = (int)(intptr_t)argument;
    uint32_t step = 0;
    /* As many steps as the other. */
    while (!shared->over || step < shared->over) {
        step++;
        collective(device, step);
        if (step % 8 == 0) MUST(cuStreamSynchronize(gpus[device].stream));
        /* The other may be some steps ahead, up to its next synchronisation. */
        if (!device && is_over() && !shared->over) shared->over = step + 16;
    }
    MUST(cuStreamSynchronize(gpus[device].stream));
    return NULL;
}

static unsigned long long threads(void) {
    pthread_t other;
    open_gpu(0);
    open_gpu(1);
    open_words();
    pthread_create(&other, NULL, one_gpu, (void *)1);
    one_gpu((void *)0);
    pthread_join(other, NULL);
    return shared->over;
}

static void await(void *step) {
    while (shared->done[1] < (uint32_t)(uintptr_t)step && !shared->over) usleep(20);
}

/* The first process's stream waits, in a host function, for the second's result. */
static unsigned long long processes(void) {
    uint32_t step = 0;
    pid_t child = fork();
    open_gpu(0);
    if (!child) {
        while (!shared->over) {
            if (shared->done[0] == step) {
                usleep(20);
                continue;
            }
            launch(0, gpus[0].stream);
            MUST(cuStreamSynchronize(gpus[0].stream));
            shared->done[1] = ++step;
        }
        _exit(0);
    }
    while (!is_over()) {
        step++;
        launch(0, gpus[0].stream);
        MUST(cuLaunchHostFunc(gpus[0].stream, await, (void *)(uintptr_t)step));
        launch(0, gpus[0].stream);
        shared->done[0] = step;
        MUST(cuStreamSynchronize(gpus[0].stream));
    }
    shared->over = 1;
    waitpid(child, NULL, 0);
    return step;
}

static unsigned long long ranks(void) {
    pid_t child = fork();
    int device = !child;
    open_gpu(device);
    open_words();
    one_gpu((void *)(intptr_t)device);
    if (!child) _exit(0);
    waitpid(child, NULL, 0);
    return shared->over;
}

static void await_host(void *step) {
    while (shared->done[0] < (uint32_t)(uintptr_t)step) usleep(20);
}

static unsigned long long by_host(int by_value) {
    uint32_t step = 0;
    open_gpu(0);
    open_words();
    while (!is_over()) {
        step++;
        launch(0, gpus[0].stream);
        if (by_value) {
            MUST(cuStreamWaitValue32_v2(gpus[0].stream, words[0], step, 0));
        } else {
            MUST(cuLaunchHostFunc(gpus[0].stream, await_host, (void *)(uintptr_t)step));
        }
        launch(0, gpus[0].stream);
        launch(0, gpus[0].other);
        shared->done[0] = step;
        shared->word[0] = step;
        if (step % 4 == 0) MUST(cuStreamSynchronize(gpus[0].other));
    }
    MUST(cuCtxSynchronize());
    return step;
}

static void end_capture(CUstream stream) {
    void *graph = NULL;
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphDestroy(graph));
}

static unsigned long long tune(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        launch(0, NULL);
        launch(0, NULL);
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2 /* relaxed */));
        for (int at = 0; at < 4; at++) {
            launch(0, gpus[0].blocking);
            launch(0, gpus[0].other);
            MUST(cuStreamSynchronize(gpus[0].other));
        }
        end_capture(gpus[0].blocking);
        steps++;
    }
    MUST(cuCtxSynchronize());
    return steps;
}

static unsigned long long own(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2));
        for (int at = 0; at < 6; at++) {
            launch(0, gpus[0].blocking);
            launch(0, PER_THREAD);
        }
        end_capture(gpus[0].blocking);
        MUST(cuStreamSynchronize(PER_THREAD));
        steps++;
    }
    return steps;
}

static void *computes(void *unused) {
    (void)unused;
    use(0);
    while (!shared->over) {
        for (int at = 0; at < 4; at++) launch(0, PER_THREAD);
        MUST(cuStreamSynchronize(PER_THREAD));
    }
    return NULL;
}

static unsigned long long others(void) {
    unsigned long long steps = 0;
    pthread_t thread;
    open_gpu(0);
    pthread_create(&thread, NULL, computes, NULL);
    while (!is_over()) {
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2));
        for (int at = 0; at < 4; at++) {
            launch(0, gpus[0].blocking);
            launch(0, gpus[0].other);
        }
        MUST(cuStreamSynchronize(gpus[0].other));
        end_capture(gpus[0].blocking);
        steps++;
    }
    shared->over = 1;
    pthread_join(thread, NULL);
    return steps;
}

static unsigned long long none(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        for (int at = 0; at < 8; at++) launch(0, gpus[0].stream);
        MUST(cuStreamSynchronize(gpus[0].stream));
        steps++;
    }
    return steps;
}

int main(int count, char **arguments) {
    const char *shape = count > 2 ? arguments[1] : "";
    unsigned long long steps;
    if (count < 3) return 2;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    end_us = now_us() + strtoull(arguments[2], NULL, 10) * 1000;
    if (count > 3) kernel_ns = strtoull(arguments[3], NULL, 10) * 1000;
    load_driver();
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    MORE(LOAD_OWN)
    if (!strcmp(shape, "gpus")) steps = both(1);
    else if (!strcmp(shape, "ahead")) steps = both(16);
    else if (!strcmp(shape, "threads")) steps = threads();
    else if (!strcmp(shape, "processes")) steps = processes();
    else if (!strcmp(shape, "ranks")) steps = ranks();
    else if (!strcmp(shape, "host")) steps = by_host(0);
    else if (!strcmp(shape, "value")) steps = by_host(1);
    else if (!strcmp(shape, "tune")) steps = tune();
    else if (!strcmp(shape, "own")) steps = own();
    else if (!strcmp(shape, "others")) steps = others();
    else if (!strcmp(shape, "none")) steps = none();
    else return 2;
    printf("steps %llu\n", steps);
    return 0;
}
