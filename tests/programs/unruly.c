/*
 * A program with threads that allocate and free without end, while it does what programs do to each
 * other's threads and processes. Argument: what.
 *
 *   return | exit | _exit | quick_exit   ends the process while they allocate
 *   exec      replaces the program by itself (`probe`) while they allocate
 *   probe     allocates all of the quota (second argument) at once
 *   cancel    threads that are cancelled already are refused
 *   fork      forks in a thread; children exec, end, or use the driver
 *   spawn     starts programs by posix_spawn and vfork
 *   late      threads load the driver all at once, some unload it again
 *   close     closes every descriptor of the process while they allocate
 *   many      so many threads that live at once allocate, launch and free: 2,000 with a second argument, else 200
 */
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static CUcontext ctx;
static atomic_int stop, failures, refused, rounds;

static void *churner(void *arg) {
    (void)arg;
    if (cuCtxSetCurrent(ctx)) failures++;
    while (!stop) {
        CUdeviceptr ptr = 0;
        if (cuMemAlloc_v2(&ptr, 1 << 20) || cuMemFree_v2(ptr)) failures++;
        rounds++;
    }
    return NULL;
}

/* With its cancellation pending, is refused: no driver function is a cancellation point. */
static void *cancelled(void *arg) {
    CUdeviceptr ptr = 0;
    (void)arg;
    cuCtxSetCurrent(ctx);
    pthread_cancel(pthread_self());
    if (cuMemAlloc_v2(&ptr, (size_t)1 << 40) == 2) refused++;
    pthread_testcancel();
    failures++;
    return NULL;
}

static void *loader(void *arg) {
    for (int i = 0; i < 20; i++) {
        void *handle = dlopen("libcuda.so.1", RTLD_NOW);
        if (!handle) {
            failures++;
            return NULL;
        }
        CUresult (*init)(unsigned) = (CUresult(*)(unsigned))dlsym(handle, "cuInit");
        CUresult (*count)(int *) = (CUresult(*)(int *))dlsym(handle, "cuDeviceGetCount");
        int devices = 0;
        if (!init || !count || init(0) || count(&devices) || devices < 1) failures++;
        if (arg) dlclose(handle);
    }
    return NULL;
}

static void start(pthread_t *threads, int count, void *(*body)(void *)) {
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, body, (void *)(intptr_t)(i % 2))) exit(4);
}
static void join(pthread_t *threads, int count) {
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static int ended(pid_t child) {
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

/* One allocation that fits, in this process or a forked child. */
static int usable(void) {
    CUdeviceptr ptr = 0;
    CUresult result = cuMemAlloc_v2(&ptr, 1 << 20);
    return result == 0 && cuMemFree_v2(ptr) == 0;
}

static void *forker(void *arg) {
    char *self = arg;
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        if (child == 0) {
            CUdeviceptr ptr;
            switch (i % 3) {
            case 0: _exit(0);
            case 1: execl(self, self, "nothing", (char *)NULL); _exit(9);
            default:
                /* What the driver says to a forked child is its affair; that it says so is ours: a lock that
                   some thread held at the fork must not hang these. */
                cuMemAlloc_v2(&ptr, 1 << 20);
                dlsym(RTLD_DEFAULT, "cuInit");
                cuInit(0);
                free(malloc(100));
                _exit(0);
            }
        }
        if (ended(child)) failures++;
    }
    return NULL;
}

static pthread_barrier_t all_there;
static CUfunction kernel;

static void *one_of_many(void *arg) {
    CUdeviceptr ptr = 0;
    (void)arg;
    for (int round = 0; round < 2; round++) {
        if (cuCtxSetCurrent(ctx) || cuMemAlloc_v2(&ptr, 4096) ||
            cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) || cuMemFree_v2(ptr))
            failures++;
        /* All of them alive at the same moment, each with what the shim keeps per thread. */
        if (round == 0) pthread_barrier_wait(&all_there);
    }
    return NULL;
}

static void many(int count) {
    static const char image[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
                                ".visible .entry nothing()\n{\n\tret;\n}\n";
    static pthread_t threads[2000];
    CUmodule module;
    pthread_attr_t small;
    if (cuModuleLoadData(&module, image) || cuModuleGetFunction(&kernel, module, "nothing")) failures++;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    pthread_barrier_init(&all_there, NULL, (unsigned)count);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], &small, one_of_many, NULL)) exit(4);
    join(threads, count);
}

static int spawned(char *self) {
    char *args[] = {self, "nothing", NULL};
    pid_t child = -1;
    return posix_spawn(&child, self, NULL, NULL, args, environ) || ended(child);
}

static int vforked(char *self) {
    pid_t child = vfork();
    if (child == 0) {
        execl(self, self, "nothing", (char *)NULL);
        _exit(9);
    }
    return ended(child);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    const char *what = argv[1];
    if (strcmp(what, "nothing") == 0) return 0;
    pthread_t threads[8];
    if (strcmp(what, "late") == 0) {
        start(threads, 8, loader);
        join(threads, 8);
    }
    load_driver();
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx)) return 3;
    if (strcmp(what, "probe") == 0) {
        CUdeviceptr all = 0;
        size_t bytes = strtoull(argv[2], NULL, 0);
        printf("probe %d\n", cuMemAlloc_v2(&all, bytes));
        return 0;
    }
    if (strcmp(what, "cancel") == 0) {
        for (int i = 0; i < 20; i++) {
            start(threads, 8, cancelled);
            join(threads, 8);
        }
        printf("refused %d failures %d usable %d\n", refused, failures, usable());
        return 0;
    }
    start(threads, 4, churner);
    while (rounds < 100) sched_yield();
    if (strcmp(what, "return") == 0) return 0;
    if (strcmp(what, "exit") == 0) exit(0);
    if (strcmp(what, "_exit") == 0) _exit(0);
    if (strcmp(what, "quick_exit") == 0) quick_exit(0);
    if (strcmp(what, "exec") == 0) {
        execl(argv[0], argv[0], "probe", argv[2], (char *)NULL);
        return 5;
    }
    if (strcmp(what, "close") == 0) {
        for (int fd = 3; fd < 4096; fd++) close(fd);
    } else if (strcmp(what, "fork") == 0) {
        pthread_t forkers[2];
        for (int i = 0; i < 2; i++) pthread_create(&forkers[i], NULL, forker, argv[0]);
        join(forkers, 2);
    } else if (strcmp(what, "spawn") == 0) {
        for (int i = 0; i < 20; i++)
            if (i % 2 ? spawned(argv[0]) : vforked(argv[0])) failures++;
    } else if (strcmp(what, "many") == 0) {
        many(argc > 2 ? 2000 : 200);
    }
    stop = 1;
    join(threads, 4);
    printf("failures %d usable %d\n", failures, usable());
    return 0;
}
