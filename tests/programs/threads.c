/*
 * Many threads at once, each of which allocates, launches and frees; then as many forks while other
 * threads are in the driver. Arguments: threads, forks.
 */
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext ctx;
static CUfunction kernel;
static pthread_barrier_t all_there;
static atomic_int failures, stop;

static int round_trip(void) {
    CUdeviceptr ptr = 0;
    return cuMemAlloc_v2(&ptr, 65536) ||
           cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) || cuMemFree_v2(ptr);
}

static void *worker(void *arg) {
    (void)arg;
    if (cuCtxSetCurrent(ctx) || round_trip()) failures++;
    /* All of them alive at the same moment, each with what the shim keeps per thread. */
    pthread_barrier_wait(&all_there);
    if (round_trip()) failures++;
    return NULL;
}

static void *churner(void *arg) {
    (void)arg;
    if (cuCtxSetCurrent(ctx)) failures++;
    while (!stop)
        if (round_trip()) failures++;
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const int threads = atoi(argv[1]), forks = atoi(argv[2]);
    static const char image[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
                                ".visible .entry nothing()\n{\n\tret;\n}\n";
    CUmodule module;
    load_driver();
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx) ||
        cuModuleLoadData(&module, image) || cuModuleGetFunction(&kernel, module, "nothing"))
        return 3;

    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    pthread_barrier_init(&all_there, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&ids[i], &small, worker, NULL)) return 4;
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    printf("failures %d\n", failures);

    pthread_t churners[4];
    for (int i = 0; i < 4; i++) pthread_create(&churners[i], NULL, churner, NULL);
    int lost = 0;
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        if (child == 0) {
            /* A lock that some thread held at the fork must not hang these. */
            size_t avail, total;
            CUdeviceptr ptr;
            cuMemGetInfo_v2(&avail, &total);
            cuMemAlloc_v2(&ptr, 4096);
            dlsym(RTLD_DEFAULT, "cuInit");
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        lost += status != 0;
    }
    stop = 1;
    for (int i = 0; i < 4; i++) pthread_join(churners[i], NULL);
    size_t avail, total;
    cuMemGetInfo_v2(&avail, &total);
    printf("forks lost %d\nfailures after %d\nin use %zu\n", lost, failures, total - avail);
    free(ids);
    return 0;
}
