/*
 * Allocates from several threads until it dies in a way drawn by its argument, a seed. It may fork,
 * be a forked child that goes on, execute itself, or leave by any door while others are in the driver.
 */
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext ctx;

static unsigned next(unsigned *seed) {
    *seed = *seed * 1103515245u + 12345u;
    return *seed >> 16;
}

static void *churn(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg;
    struct {
        CUdeviceptr at;
        int ordered;
    } held[8];
    int count = 0;
    if (cuCtxSetCurrent(ctx)) return NULL;
    for (;;) {
        if (count == 8 || (count && next(&seed) % 2)) {
            count--;
            if (held[count].ordered)
                cuMemFreeAsync(held[count].at, NULL);
            else
                cuMemFree_v2(held[count].at);
            continue;
        }
        CUdeviceptr at = 0;
        size_t pitch, bytes = (size_t)(1 + next(&seed) % 24) << 20;
        int result, kind = (int)(next(&seed) % 4);
        if (kind == 0)
            result = cuMemAlloc_v2(&at, bytes);
        else if (kind == 1)
            result = cuMemAllocPitch_v2(&at, &pitch, bytes >> 10, 1000, 4);
        else if (kind == 2)
            result = cuMemAllocManaged(&at, bytes, 1);
        else
            result = cuMemAllocAsync(&at, bytes, NULL);
        if (result == 0) {
            held[count].at = at;
            held[count++].ordered = kind == 3;
        } else if (result != 2) {
            /* Out of memory is the neighbours' doing; anything else is wrong. */
            fprintf(stderr, "allocation of kind %d: %d\n", kind, result);
            _exit(9);
        }
    }
    return NULL;
}

static void *forker(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg;
    for (;;) {
        pid_t child = fork();
        if (child == 0) {
            size_t avail, total;
            CUdeviceptr at;
            cuMemGetInfo_v2(&avail, &total);
            cuMemAlloc_v2(&at, 4096);
            usleep(next(&seed) % 3000);
            _exit(0);
        }
        waitpid(child, NULL, 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    unsigned seed = (unsigned)strtoul(argv[1], NULL, 10);
    load_driver();
    if (next(&seed) % 8 == 0 && fork() != 0) {
        /* The child is the one that uses CUDA; the parent only waits. */
        wait(NULL);
        return 0;
    }
    /* All slots may be taken by those that are dying; that is reported, and no error here. */
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0)) return 0;
    for (unsigned i = 0; i < 3; i++) {
        pthread_t id;
        pthread_create(&id, NULL, i == 2 && next(&seed) % 2 ? forker : churn,
                       (void *)(uintptr_t)next(&seed));
    }
    usleep(next(&seed) % 60000);
    char again[16];
    switch (next(&seed) % 8) {
    case 0: exit(0);
    case 1: _exit(0);
    case 2: abort();
    case 3: /* A child outlives its parent, and with it what the driver holds. */
        if (fork() == 0) usleep(next(&seed) % 30000);
        _exit(0);
    case 4:
        snprintf(again, sizeof again, "%u", next(&seed));
        execl("/proc/self/exe", argv[0], again, (char *)NULL);
        _exit(8);
    case 5: cuDevicePrimaryCtxReset_v2(0); _exit(0);
    case 6: return 0;
    default: pause();
    }
    return 0;
}
