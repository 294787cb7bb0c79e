/*
 * Puts work on the GPU from threads of its own, so that who waits at the gate can be watched.
 *
 *   init (a primary context, a module, buffers, a blocking and a non-blocking stream)
 *   start WORKER WORK STREAM MICROSECONDS   begins it in a thread of that number (0 to 63)
 *   state WORKER -> whether it is over
 *   join WORKER                             its result
 *   do WORK STREAM MICROSECONDS             the same in the conversation's own thread
 *   turns COUNT WORK STREAM STREAM MICROSECONDS -> microseconds (the same so often, into each stream in turn)
 *   unhold                                  lets go of what `hold`, a host function, holds up
 *   query STREAM | graph -> nodes of the last graph
 *   begin STREAM MODE | end STREAM -> nodes | capturing STREAM -> status
 *   stream -> NUMBER (a further one) | destroy NUMBER
 *   context (a further one, current) | leave (destroys it)
 *   churn THREADS ROUNDS -> failures (threads that launch once each and end)
 *   fork COUNT -> exit status of a child that makes its own and launches | spawned PROGRAM
 *   exit CODE | _exit CODE
 *
 * WORK is one of the names below; STREAM is legacy, own, or the number of a stream (0 blocks).
 */
#define MORE(X)                                                                                    \
    X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                 \
    X(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                                                \
    X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                          \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                         \
    X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                               \
    X(cuMemcpyPeerAsync, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream))       \
    X(cuMemcpy2DAsync_v2, (const struct copy2d *, CUstream))                                       \
    X(cuMemcpy3DAsync_v2, (const struct copy3d *, CUstream))                                       \
    X(cuMemcpyBatchAsync_v2, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *,    \
                              size_t, CUstream))                                                   \
    X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                             \
    X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))                                 \
    X(cuMemsetD2D16Async, (CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream))         \
    X(cuMemsetD8_v2_ptds, (CUdeviceptr, unsigned char, size_t))                                    \
    X(cuLaunchKernelEx, (const struct config *, CUfunction, void **, void **))                     \
    X(cuStreamQuery, (CUstream))                                                                   \
    X(cuStreamBeginCapture_v2, (CUstream, int))                                                    \
    X(cuStreamEndCapture, (CUstream, void **))                                                     \
    X(cuStreamIsCapturing, (CUstream, int *))                                                      \
    X(cuGraphGetNodes, (void *, void **, size_t *))                                                \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                          \
    X(cuGraphLaunch, (void *, CUstream))                                                           \
    X(cuLaunchHostFunc, (CUstream, void (*)(void *), void *))                                      \
    X(cuEventCreate, (CUevent *, unsigned))                                                        \
    X(cuEventRecord, (CUevent, CUstream))                                                          \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct copy2d;
struct copy3d;
struct config;
#include "conversation.h"
MORE(DECLARE_MORE)

struct copy2d {
    size_t srcX, srcY;
    unsigned srcType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch, dstX, dstY;
    unsigned dstType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch, width, height;
};
struct copy3d {
    size_t srcX, srcY, srcZ, srcLOD;
    unsigned srcType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight, dstX, dstY, dstZ, dstLOD;
    unsigned dstType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight, width, height, depth;
};
struct config {
    unsigned grid[3], block[3], shared;
    CUstream stream;
    void *attributes;
    unsigned count;
};

#define BYTES ((size_t)1 << 20)
#ifdef STATIC_TLS
/* On the stack of every thread, as large as its default allows. */
__thread volatile char large[STATIC_TLS];
#endif

static CUcontext context, further;
static CUfunction spin;
static CUdeviceptr a, b;
static unsigned char *host;
static CUstream streams[64];
static int stream_count;
static void *last_graph, *last_exec;

static atomic_int released;

static void hold(void *unused) {
    (void)unused;
    while (!released) usleep(100);
}

static int launch(CUstream stream, unsigned long long ns) {
    void *params[] = {&ns};
    return cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static int setup(void) {
    static const char image[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
                                ".visible .entry spin(.param .u64 ns)\n{\n\tret;\n}\n";
    CUmodule module;
    void *pinned = NULL;
    int result = cuInit(0);
    if (!result) result = cuDevicePrimaryCtxRetain(&context, 0);
    if (!result) result = cuCtxSetCurrent(context);
    if (!result) result = cuModuleLoadData(&module, image);
    if (!result) result = cuModuleGetFunction(&spin, module, "spin");
    if (!result) result = cuMemAlloc_v2(&a, BYTES);
    if (!result) result = cuMemAlloc_v2(&b, BYTES);
    if (!result) result = cuMemHostAlloc(&pinned, BYTES, 0);
    if (!result) result = cuStreamCreate(&streams[0], 0);
    if (!result) result = cuStreamCreate(&streams[1], 1);
    host = pinned;
    stream_count = 2;
    return result;
}

/* A graph of one kernel, made where no gate is asked. */
static int make_graph(unsigned long long ns) {
    CUstream stream;
    int result = cuStreamCreate(&stream, 1);
    if (!result) result = more_cuStreamBeginCapture_v2(stream, 2);
    if (!result) result = launch(stream, ns);
    if (!result) result = more_cuStreamEndCapture(stream, &last_graph);
    if (!result) result = more_cuGraphInstantiateWithFlags(&last_exec, last_graph, 0);
    if (!result) result = cuStreamDestroy_v2(stream);
    return result;
}

static void nothing(void *unused) {
    (void)unused;
}

static int work(const char *what, CUstream s, unsigned long long ns) {
    const CUdeviceptr pinned = (CUdeviceptr)(uintptr_t)host;
    int order[6] = {1};
    CUdeviceptr to[] = {pinned, a}, from[] = {a, b};
    size_t sizes[] = {64, 64}, first = 0;
    struct copy2d two = {.srcType = 2, .srcDevice = b, .srcPitch = 64, .dstType = 2,
                         .dstDevice = a, .dstPitch = 64, .width = 64, .height = 4};
    struct copy3d three = {.srcType = 2, .srcDevice = b, .srcPitch = 64, .srcHeight = 2,
                           .dstType = 2, .dstDevice = a, .dstPitch = 64, .dstHeight = 2,
                           .width = 64, .height = 2, .depth = 2};
    const struct config config = {{1, 1, 1}, {1, 1, 1}, 0, s, NULL, 0};
    /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and 1. */
    _Alignas(8) int serialization[18] = {6, 0, 1};
    const struct config chained = {{1, 1, 1}, {1, 1, 1}, 0, s, serialization, 1};
    void *params[] = {&ns};
#undef IS
#define IS(name) !strcmp(what, name)
    if (IS("kernel")) return launch(s, ns);
    if (IS("hold")) return more_cuLaunchHostFunc(s, hold, NULL);
    if (IS("kernel_ex")) return more_cuLaunchKernelEx(&config, spin, params, NULL);
    if (IS("chained")) return more_cuLaunchKernelEx(&chained, spin, params, NULL);
    if (IS("host")) return more_cuLaunchHostFunc(s, nothing, NULL);
    if (IS("graph")) return more_cuGraphLaunch(last_exec, s);
    if (IS("fill")) return more_cuMemsetD8Async(a, 1, BYTES, s);
    if (IS("fill32")) return more_cuMemsetD32Async(a, 1, BYTES / 4, s);
    if (IS("fill2d")) return more_cuMemsetD2D16Async(a, 64, 1, 16, 4, s);
    if (IS("fill_sync")) return cuMemsetD8_v2(a, 1, BYTES);
    if (IS("fill_own")) return more_cuMemsetD8_v2_ptds(a, 1, BYTES);
    if (IS("copy")) return more_cuMemcpyDtoDAsync_v2(a, b, BYTES, s);
    if (IS("copy_sync")) return cuMemcpyDtoD_v2(a, b, BYTES);
    if (IS("copy_any")) return more_cuMemcpyAsync(a, b, BYTES, s);
    if (IS("copy_any_sync")) return more_cuMemcpy(a, b, BYTES);
    if (IS("copy_peer")) return more_cuMemcpyPeerAsync(a, context, b, context, BYTES, s);
    if (IS("copy2d")) return more_cuMemcpy2DAsync_v2(&two, s);
    if (IS("copy3d")) return more_cuMemcpy3DAsync_v2(&three, s);
    if (IS("batch")) return more_cuMemcpyBatchAsync_v2(to, from, sizes, 2, order, &first, 1, s);
    /* To and from the host. */
    two.srcType = 1;
    two.srcHost = host;
    three.dstType = 4;
    three.dstDevice = pinned;
    if (IS("up")) return more_cuMemcpyHtoDAsync_v2(a, host, BYTES, s);
    if (IS("down")) return more_cuMemcpyDtoHAsync_v2(host, b, BYTES, s);
    if (IS("up_sync")) return cuMemcpyHtoD_v2(a, host, BYTES);
    if (IS("up_any")) return more_cuMemcpyAsync(a, pinned, BYTES, s);
    if (IS("down_any")) return more_cuMemcpyAsync(pinned, a, BYTES, s);
    if (IS("up_any_sync")) return more_cuMemcpy(a, pinned, BYTES);
    if (IS("up2d")) return more_cuMemcpy2DAsync_v2(&two, s);
    if (IS("down3d")) return more_cuMemcpy3DAsync_v2(&three, s);
    if (IS("up_batch")) return more_cuMemcpyBatchAsync_v2(to, from, sizes, 1, order, &first, 1, s);
    return -1;
}

static CUstream stream_named(const char *name) {
    if (!strcmp(name, "legacy")) return NULL;
    if (!strcmp(name, "own")) return (CUstream)2;
    return streams[atoi(name)];
}

static struct worker {
    pthread_t id;
    char what[32];
    CUstream stream;
    unsigned long long ns;
    int result;
    atomic_int over;
} workers[64];

static void *run_worker(void *argument) {
    struct worker *w = argument;
    w->result = cuCtxSetCurrent(context);
    if (!w->result) w->result = work(w->what, w->stream, w->ns);
    w->over = 1;
    return NULL;
}

static void *launch_once(void *argument) {
    (void)argument;
    return (void *)(intptr_t)(cuCtxSetCurrent(context) || launch(NULL, 1000));
}

static int churn(int threads, int rounds) {
    int failures = 0;
    for (int round = 0; round < rounds; round++) {
        pthread_t ids[64];
        for (int i = 0; i < threads; i++)
            if (pthread_create(&ids[i], NULL, launch_once, NULL)) return -1;
        for (int i = 0; i < threads; i++) {
            void *failed = NULL;
            pthread_join(ids[i], &failed);
            failures += failed != NULL;
        }
    }
    return failures;
}

static size_t nodes(void) {
    size_t count = 0;
    more_cuGraphGetNodes(last_graph, NULL, &count);
    return count;
}

static void turns(int count, const char *what, CUstream one, CUstream other, unsigned long long us) {
    struct timespec begun, ended;
    int result = 0;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int at = 0; at < count && !result; at++) result = work(what, at % 2 ? other : one, us * 1000);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    printf("%d %lld\n", result,
           (ended.tv_sec - begun.tv_sec) * 1000000ll + (ended.tv_nsec - begun.tv_nsec) / 1000);
}

static void call(const char *line) {
    char what[32] = "", word[32] = "", third[256] = "";
    int number = 0, value = 0;
    unsigned long long us = 0;
    if (sscanf(line, "start %d %31s %31s %llu", &number, what, word, &us) == 4) {
        struct worker *w = &workers[number];
        *w = (struct worker){.stream = stream_named(word), .ns = us * 1000};
        strcpy(w->what, what);
        printf("%d\n", pthread_create(&w->id, NULL, run_worker, w));
    } else if (sscanf(line, "state %d", &number) == 1) {
        printf("0 %d\n", workers[number].over);
    } else if (sscanf(line, "join %d", &number) == 1) {
        pthread_join(workers[number].id, NULL);
        printf("%d\n", workers[number].result);
    } else if (sscanf(line, "do %31s %31s %llu", what, word, &us) == 3) {
        printf("%d\n", work(what, stream_named(word), us * 1000));
    } else if (sscanf(line, "turns %d %31s %31s %31s %llu", &number, what, word, third, &us) == 5) {
        turns(number, what, stream_named(word), stream_named(third), us);
    } else if (!strncmp(line, "unhold", 6)) {
        released = 1;
        printf("0\n");
    } else if (sscanf(line, "graph %llu", &us) == 1) {
        printf("%d\n", make_graph(us * 1000));
    } else if (sscanf(line, "query %31s", word) == 1) {
        printf("%d\n", more_cuStreamQuery(stream_named(word)));
    } else if (sscanf(line, "begin %31s %d", word, &value) == 2) {
        printf("%d\n", more_cuStreamBeginCapture_v2(stream_named(word), value));
    } else if (sscanf(line, "end %31s", word) == 1) {
        const int result = more_cuStreamEndCapture(stream_named(word), &last_graph);
        printf("%d %zu\n", result, result ? 0 : nodes());
    } else if (sscanf(line, "capturing %31s", word) == 1) {
        int status = -1;
        const int result = more_cuStreamIsCapturing(stream_named(word), &status);
        printf("%d %d\n", result, status);
    } else if (sscanf(line, "fork_capture %31s %31s", word, what) == 2) {
        /* The second stream joins the first one's capture, works, and the first waits for it. */
        CUevent there, back;
        CUstream from = stream_named(word), into = stream_named(what);
        int result = more_cuEventCreate(&there, 2) || more_cuEventCreate(&back, 2) ||
                     more_cuEventRecord(there, from) || more_cuStreamWaitEvent(into, there, 0) ||
                     launch(into, 1000) || more_cuEventRecord(back, into) ||
                     more_cuStreamWaitEvent(from, back, 0);
        printf("%d\n", result);
    } else if (!strncmp(line, "stream", 6)) {
        const int result = cuStreamCreate(&streams[stream_count], 1);
        printf("%d %d\n", result, stream_count++);
    } else if (sscanf(line, "destroy %d", &number) == 1) {
        printf("%d\n", cuStreamDestroy_v2(streams[number]));
    } else if (!strncmp(line, "context", 7)) {
        const int result = cuCtxCreate_v2(&further, 0, 0);
        printf("%d\n", result);
    } else if (!strncmp(line, "leave", 5)) {
        const int result = cuCtxDestroy_v2(further);
        printf("%d\n", result ? result : cuCtxSetCurrent(context));
    } else if (sscanf(line, "churn %d %d", &number, &value) == 2) {
        printf("0 %d\n", churn(number, value));
    } else if (sscanf(line, "fork %d", &number) == 1) {
        const pid_t child = fork();
        int status = 0;
        if (child == 0) {
            /* After the parent's use of it the driver is of no use to the child, who tries. */
            if (setup()) _exit(launch(NULL, 1000));
            while (number-- && !status) status = launch(streams[1], 1000);
            _exit(status ? status : cuCtxSynchronize());
        }
        waitpid(child, &status, 0);
        printf("0 %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    } else if (sscanf(line, "spawned %255s", third) == 1) {
        const pid_t child = fork();
        int status = 0;
        if (child == 0) {
            execl(third, third, (char *)NULL);
            _exit(127);
        }
        waitpid(child, &status, 0);
        printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    } else if (!strncmp(line, "init", 4)) {
        printf("%d\n", setup());
    } else if (sscanf(line, "exit %d", &number) == 1) {
        exit(number);
    } else if (sscanf(line, "_exit %d", &number) == 1) {
        _exit(number);
    } else {
        common(line);
    }
}

CONVERSATION
