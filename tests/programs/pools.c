/*
 * Memory pools: one call per line of standard input, answered `RESULT VALUE…`.
 *
 *   async BYTES STREAM -> ptr | from POOL BYTES STREAM -> ptr | free_async PTR STREAM
 *   default DEV -> pool | set DEV POOL
 *   create ALLOCATION_TYPE LOCATION_TYPE ID -> pool | destroy POOL
 *   of ALLOCATION_TYPE LOCATION_TYPE ID -> pool (the default one there, CUDA 13)
 *   trim POOL BYTES | threshold POOL BYTES | reserved POOL -> bytes
 *   stream_sync STREAM | event_sync STREAM (of an event recorded there) | query STREAM
 *   block STREAM (nothing put there afterwards happens) | unblock (all)
 *   capture STREAM | captured STREAM (ends the capture)
 *   race THREADS ROUNDS BYTES -> granted refused (each allocates and frees on a stream of its own)
 *   keep THREADS BYTES -> granted refused (each allocates until it is refused)
 *
 * Written from the CUDA Driver API manual, "Stream Ordered Memory Allocator". Functions that the driver lacks
 * answer -2.
 */
#include "conversation.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define MORE(X)                                                                                    \
    X(cuDeviceSetMemPool, (CUdevice dev, CUmemoryPool pool))                                       \
    X(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *props))                         \
    X(cuMemPoolDestroy, (CUmemoryPool pool))                                                       \
    X(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep))                                           \
    X(cuMemPoolSetAttribute, (CUmemoryPool pool, int attribute, void *value))                      \
    X(cuMemPoolGetAttribute, (CUmemoryPool pool, int attribute, void *value))                      \
    X(cuMemGetDefaultMemPool, (CUmemoryPool * pool, CUmemLocation *location, int type))            \
    X(cuStreamQuery, (CUstream stream))                                                            \
    X(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                        \
    X(cuStreamEndCapture, (CUstream stream, void **graph))                                         \
    X(cuEventCreate, (CUevent * event, unsigned flags))                                            \
    X(cuEventRecord, (CUevent event, CUstream stream))                                             \
    X(cuEventSynchronize, (CUevent event))                                                         \
    X(cuLaunchHostFunc, (CUstream stream, void (*function)(void *), void *data))
MORE(DECLARE_MORE)

static atomic_int blocked;

static void wait_until_unblocked(void *unused) {
    (void)unused;
    while (atomic_load(&blocked)) usleep(500);
}

struct racer {
    pthread_barrier_t *start;
    int rounds;
    size_t bytes;
    unsigned long long granted, refused;
    CUresult other;
};

/* rounds 0: until the first refusal, keeping what was granted. */
static void *racing(void *arg) {
    struct racer *racer = arg;
    CUstream own = NULL;
    racer->other = cuCtxSetCurrent(retained);
    if (racer->other == 0) racer->other = cuStreamCreate(&own, 1);
    pthread_barrier_wait(racer->start);
    for (int i = 0; racer->other == 0 && (racer->rounds == 0 || i < racer->rounds); i++) {
        CUdeviceptr ptr = 0;
        CUresult result = cuMemAllocAsync(&ptr, racer->bytes, own);
        if (result == 2) {
            racer->refused++;
            if (racer->rounds == 0) break;
        } else if (result != 0) {
            racer->other = result;
        } else {
            racer->granted++;
            if (racer->rounds == 0) continue;
            racer->other = cuMemFreeAsync(ptr, own);
            if (racer->other == 0 && i % 4 == 3) racer->other = cuStreamSynchronize(own);
        }
    }
    if (racer->other == 0) racer->other = cuStreamSynchronize(own);
    return NULL;
}

static void race(int count, int rounds, size_t bytes) {
    pthread_t threads[64];
    struct racer racers[64];
    pthread_barrier_t start;
    unsigned long long granted = 0, refused = 0;
    CUresult result = count < 1 || count > 64 ? -1 : 0;
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (int i = 0; i < count && result == 0; i++) {
        racers[i] = (struct racer){.start = &start, .rounds = rounds, .bytes = bytes};
        pthread_create(&threads[i], NULL, racing, &racers[i]);
    }
    for (int i = 0; i < count && result != -1; i++) {
        pthread_join(threads[i], NULL);
        granted += racers[i].granted;
        refused += racers[i].refused;
        if (racers[i].other != 0) result = racers[i].other;
    }
    printf("%d %llu %llu\n", result, granted, refused);
}

static void call(const char *line) {
    char command[32] = "";
    unsigned long long a = 0, b = 0, c = 0;
    sscanf(line, "%31s %llu %llu %llu", command, &a, &b, &c);
    CUmemoryPool pool = (CUmemoryPool)(uintptr_t)a;
    CUdeviceptr ptr = 0;
    CUresult result = -1;
    unsigned long long value = 0;
    IS("async") ANSWER_WITH(ptr, cuMemAllocAsync(&ptr, a, stream(b)));
    IS("from") ANSWER_WITH(ptr, cuMemAllocFromPoolAsync(&ptr, b, pool, stream(c)));
    IS("free_async") ANSWER(cuMemFreeAsync(a, stream(b)));
    IS("default") ANSWER_WITH((uintptr_t)pool, cuDeviceGetDefaultMemPool(&pool, (CUdevice)a));
    IS("set") ANSWER(more_cuDeviceSetMemPool((CUdevice)a, (CUmemoryPool)(uintptr_t)b));
    IS("create") {
        CUmemPoolProps props = {.allocType = (int)a, .location = {(int)b, (int)c}};
        ANSWER_WITH((uintptr_t)pool, more_cuMemPoolCreate(&pool, &props));
    }
    IS("of") {
        CUmemLocation location = {(int)b, (int)c};
        if (!more_cuMemGetDefaultMemPool) ANSWER(-2);
        ANSWER_WITH((uintptr_t)pool, more_cuMemGetDefaultMemPool(&pool, &location, (int)a));
    }
    IS("destroy") ANSWER(more_cuMemPoolDestroy(pool));
    IS("trim") ANSWER(more_cuMemPoolTrimTo(pool, b));
    IS("threshold") ANSWER(more_cuMemPoolSetAttribute(pool, 4, &b));
    IS("reserved") ANSWER_WITH(value, more_cuMemPoolGetAttribute(pool, 5, &value));
    IS("stream_sync") ANSWER(cuStreamSynchronize(stream(a)));
    IS("query") ANSWER(more_cuStreamQuery(stream(a)));
    IS("event_sync") {
        CUevent event = NULL;
        result = more_cuEventCreate(&event, 2 /* no timing */);
        if (result == 0) result = more_cuEventRecord(event, stream(a));
        ANSWER(result ? result : more_cuEventSynchronize(event));
    }
    IS("block") {
        atomic_store(&blocked, 1);
        ANSWER(more_cuLaunchHostFunc(stream(a), wait_until_unblocked, NULL));
    }
    IS("unblock") {
        atomic_store(&blocked, 0);
        ANSWER(0);
    }
    IS("capture") ANSWER(more_cuStreamBeginCapture_v2(stream(a), 0 /* global */));
    IS("captured") {
        void *graph = NULL;
        ANSWER_WITH((uintptr_t)graph, more_cuStreamEndCapture(stream(a), &graph));
    }
    IS("race") {
        race((int)a, (int)b, c);
        return;
    }
    IS("keep") {
        race((int)a, 0, b);
        return;
    }
    common(line);
}

CONVERSATION
