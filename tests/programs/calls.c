/*
 * Makes one driver call per line of standard input and answers `RESULT VALUE…` on one line.
 *
 *   init | count | total DEV
 *   retain DEV (and make it current) | release DEV | reset DEV
 *   ctx DEV -> handle | destroy HANDLE | current HANDLE
 *   alloc BYTES -> ptr | pitch WIDTH HEIGHT ELEMENT -> ptr pitch | managed BYTES -> ptr
 *   async BYTES -> ptr | pool DEV BYTES -> ptr | free PTR | free_async PTR
 *   host BYTES -> ptr | host_free PTR (page-locked host memory)
 *   alloc1 BYTES -> ptr | info1 -> free total | total1 DEV (the 32-bit functions of CUDA 2)
 *   info -> free total | nvml DEV -> total free used | nvml2 DEV -> total reserved free used
 *   fill PTR BYTES VALUE (host to device) | memset PTR BYTES VALUE | copy DST SRC BYTES
 *   check PTR BYTES VALUE -> bytes that differ | sync
 *   launch -> (loads a module once, launches its kernel on the default stream)
 *   race COUNT BYTES -> granted refused (COUNT threads allocate at once and keep what they get)
 *   churn ROUNDS BYTES -> granted refused (allocate and free, one after another)
 *   forked COMMAND[; COMMAND…] (a forked child makes the calls and answers the last)
 *   forksleeper -> pid of a forked child that does nothing until it is killed
 *   closefrom FD | late (registers an exit handler that still calls the driver)
 *   exit CODE | _exit CODE | abort
 *
 * Unknown commands answer -1, functions that the driver lacks -2, a forked child that a signal killed
 * `-4 SIGNAL`, one that ended without an answer -5.
 */
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_VALUES 4
struct reply {
    long result;
    int count;
    unsigned long long values[MAX_VALUES];
};

static struct reply answer0(long result) {
    return (struct reply){.result = result};
}
static struct reply answer1(long result, unsigned long long a) {
    return (struct reply){.result = result, .count = 1, .values = {a}};
}
static struct reply answer2(long result, unsigned long long a, unsigned long long b) {
    return (struct reply){.result = result, .count = 2, .values = {a, b}};
}

#define HAVE(f)                                                                                    \
    do {                                                                                           \
        if (!has((void *)f)) return answer0(-2);                                                   \
    } while (0)
static int has(const void *function) {
    return function != NULL;
}

static struct reply retain(CUdevice dev) {
    CUcontext ctx = NULL;
    CUresult result = cuDevicePrimaryCtxRetain(&ctx, dev);
    if (result == 0) result = cuCtxSetCurrent(ctx);
    return answer1(result, (uintptr_t)ctx);
}

static struct reply transfer(const char *command, CUdeviceptr ptr, size_t bytes, int value) {
    unsigned char *host = malloc(bytes ? bytes : 1);
    struct reply reply;
    if (strcmp(command, "fill") == 0) {
        memset(host, value, bytes);
        reply = answer0(cuMemcpyHtoD_v2(ptr, host, bytes));
    } else {
        memset(host, ~value, bytes);
        CUresult result = cuMemcpyDtoH_v2(host, ptr, bytes);
        unsigned long long differing = 0;
        for (size_t i = 0; i < bytes; i++) differing += host[i] != (unsigned char)value;
        reply = answer1(result, differing);
    }
    free(host);
    return reply;
}

static struct reply nvml(unsigned dev, int version) {
    nvmlDevice_t device = NULL;
    int result = load_nvml();
    if (result == 0) result = nvmlInit_v2();
    if (result == 0) result = nvmlDeviceGetHandleByIndex_v2(dev, &device);
    struct reply reply = {.result = result};
    if (result != 0) return reply;
    if (version == 1) {
        nvmlMemory_t memory = {0};
        reply.result = nvmlDeviceGetMemoryInfo(device, &memory);
        reply.count = 3;
        reply.values[0] = memory.total;
        reply.values[1] = memory.free;
        reply.values[2] = memory.used;
    } else {
        nvmlMemory_v2_t memory = {.version = sizeof memory | 2u << 24};
        reply.result = nvmlDeviceGetMemoryInfo_v2(device, &memory);
        reply.count = 4;
        reply.values[0] = memory.total;
        reply.values[1] = memory.reserved;
        reply.values[2] = memory.free;
        reply.values[3] = memory.used;
    }
    return reply;
}

/* The simulator runs any image; a real driver compiles this one. */
static const char PTX[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry tessera_test()\n{\n\tret;\n}\n";

static struct reply launch(void) {
    static CUfunction kernel;
    if (!kernel) {
        CUmodule module = NULL;
        CUresult result = cuModuleLoadData(&module, PTX);
        if (result == 0) result = cuModuleGetFunction(&kernel, module, "tessera_test");
        if (result != 0) return answer0(result);
    }
    return answer0(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
}

struct racer {
    pthread_barrier_t *start;
    CUcontext ctx;
    size_t bytes;
    CUresult result;
};

static CUcontext primary; /* what `race` makes current in its threads */

static void *racing(void *arg) {
    struct racer *racer = arg;
    CUdeviceptr ptr;
    CUresult current = cuCtxSetCurrent(racer->ctx);
    pthread_barrier_wait(racer->start);
    racer->result = current != 0 ? current : cuMemAlloc_v2(&ptr, racer->bytes);
    return NULL;
}

static struct reply race(int count, size_t bytes) {
    pthread_t threads[256];
    struct racer racers[256];
    pthread_barrier_t start;
    if (count < 1 || count > 256) return answer0(-1);
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (int i = 0; i < count; i++) {
        racers[i] = (struct racer){&start, primary, bytes, 0};
        pthread_create(&threads[i], NULL, racing, &racers[i]);
    }
    unsigned long long granted = 0, refused = 0;
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        granted += racers[i].result == 0;
        refused += racers[i].result == 2;
    }
    pthread_barrier_destroy(&start);
    return answer2(granted + refused == (unsigned)count ? 0 : -3, granted, refused);
}

static struct reply churn(int rounds, size_t bytes) {
    unsigned long long granted = 0, refused = 0;
    for (int i = 0; i < rounds; i++) {
        CUdeviceptr ptr = 0;
        CUresult result = cuMemAlloc_v2(&ptr, bytes);
        granted += result == 0;
        refused += result == 2;
        if (result == 0 && (result = cuMemFree_v2(ptr)) != 0) return answer0(result);
    }
    return answer2(0, granted, refused);
}

static struct reply call(char *line);

/* The child's answer comes once it is gone, so that what it leaves behind can be looked at. */
static struct reply forked(char *line) {
    int answer[2];
    if (pipe(answer) != 0) return answer0(-1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct reply reply = {.result = -1};
        char *rest = line;
        /* Kept whatever `closefrom` closes. */
        dup2(answer[1], STDOUT_FILENO);
        for (char *command; (command = strsep(&rest, ";"));) reply = call(command);
        if (write(STDOUT_FILENO, &reply, sizeof reply) < 0) abort();
        _exit(0);
    }
    close(answer[1]);
    struct reply reply = {.result = -5};
    int status = 0;
    ssize_t got = read(answer[0], &reply, sizeof reply);
    close(answer[0]);
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) return answer1(-4, (unsigned)WTERMSIG(status));
    return got == sizeof reply ? reply : answer0(-5);
}

static struct reply fork_sleeper(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        /* It must not hold the conversation open. */
        fclose(stdin);
        fclose(stdout);
        for (;;) pause();
    }
    return answer1(child > 0 ? 0 : -1, (unsigned)child);
}

/* What destructors of frameworks do after main has returned. */
static void late(void) {
    CUdeviceptr ptr = 0;
    CUresult result = cuMemAlloc_v2(&ptr, 4096);
    if (result == 0) result = cuMemFree_v2(ptr);
    /* A driver that has shut down already says CUDA_ERROR_DEINITIALIZED. */
    if (result != 0 && result != 4) _exit(9);
}

static struct reply call(char *line) {
    char command[32] = "";
    unsigned long long a = 0, b = 0, c = 0;
    sscanf(line, "%31s %llu %llu %llu", command, &a, &b, &c);
    CUdeviceptr ptr = 0;
    CUdevice dev = (CUdevice)a;
#define IS(name) if (strcmp(command, name) == 0)

    IS("forked") { return forked(strstr(line, "forked") + strlen("forked")); }
    IS("init") { HAVE(cuInit); return answer0(cuInit((unsigned)a)); }
    IS("count") { int count = 0; CUresult r = cuDeviceGetCount(&count); return answer1(r, (unsigned)count); }
    IS("total") { size_t bytes = 0; CUresult r = cuDeviceTotalMem_v2(&bytes, dev); return answer1(r, bytes); }
    IS("retain") {
        struct reply reply = retain(dev);
        primary = (CUcontext)(uintptr_t)reply.values[0];
        return reply;
    }
    IS("release") { return answer0(cuDevicePrimaryCtxRelease_v2(dev)); }
    IS("reset") { return answer0(cuDevicePrimaryCtxReset_v2(dev)); }
    IS("ctx") { CUcontext ctx = NULL; CUresult r = cuCtxCreate_v2(&ctx, 0, dev); return answer1(r, (uintptr_t)ctx); }
    IS("destroy") { return answer0(cuCtxDestroy_v2((CUcontext)(uintptr_t)a)); }
    IS("current") { return answer0(cuCtxSetCurrent((CUcontext)(uintptr_t)a)); }
    IS("alloc") { CUresult r = cuMemAlloc_v2(&ptr, a); return answer1(r, ptr); }
    IS("pitch") {
        size_t pitch = 0;
        CUresult r = cuMemAllocPitch_v2(&ptr, &pitch, a, b, (unsigned)c);
        return answer2(r, ptr, pitch);
    }
    IS("managed") { HAVE(cuMemAllocManaged); CUresult r = cuMemAllocManaged(&ptr, a, 1); return answer1(r, ptr); }
    IS("async") { HAVE(cuMemAllocAsync); CUresult r = cuMemAllocAsync(&ptr, a, NULL); return answer1(r, ptr); }
    IS("pool") {
        HAVE(cuMemAllocFromPoolAsync);
        CUmemoryPool pool = NULL;
        CUresult r = cuDeviceGetDefaultMemPool(&pool, dev);
        if (r == 0) r = cuMemAllocFromPoolAsync(&ptr, b, pool, NULL);
        return answer1(r, ptr);
    }
    IS("free") { return answer0(cuMemFree_v2(a)); }
    IS("free_async") { HAVE(cuMemFreeAsync); return answer0(cuMemFreeAsync(a, NULL)); }
    IS("info") { size_t avail = 0, total = 0; CUresult r = cuMemGetInfo_v2(&avail, &total); return answer2(r, avail, total); }
    IS("host") { void *host = NULL; CUresult r = cuMemHostAlloc(&host, a, 0); return answer1(r, (uintptr_t)host); }
    IS("host_free") { return answer0(cuMemFreeHost((void *)(uintptr_t)a)); }
    IS("alloc1") { HAVE(cuMemAlloc); unsigned old = 0; CUresult r = cuMemAlloc(&old, (unsigned)a); return answer1(r, old); }
    IS("info1") { HAVE(cuMemGetInfo); unsigned avail = 0, total = 0; CUresult r = cuMemGetInfo(&avail, &total); return answer2(r, avail, total); }
    IS("total1") { HAVE(cuDeviceTotalMem); unsigned bytes = 0; CUresult r = cuDeviceTotalMem(&bytes, dev); return answer1(r, bytes); }
    IS("nvml") { return nvml((unsigned)a, 1); }
    IS("nvml2") { return nvml((unsigned)a, 2); }
    IS("fill") { return transfer(command, a, b, (int)c); }
    IS("check") { return transfer(command, a, b, (int)c); }
    IS("memset") { return answer0(cuMemsetD8_v2(a, (unsigned char)c, b)); }
    IS("copy") { return answer0(cuMemcpyDtoD_v2(a, b, c)); }
    IS("sync") { return answer0(cuCtxSynchronize()); }
    IS("launch") { return launch(); }
    IS("race") { return race((int)a, b); }
    IS("churn") { return churn((int)a, b); }
    IS("closefrom") { for (int fd = (int)a; fd < 4096; fd++) close(fd); return answer0(0); }
    IS("forksleeper") { return fork_sleeper(); }
    IS("late") { return answer0(atexit(late)); }
    IS("exit") { exit((int)a); }
    IS("_exit") { _exit((int)a); }
    IS("abort") { abort(); }
    return answer0(-1);
}

static void print(struct reply reply) {
    printf("%ld", reply.result);
    for (int i = 0; i < reply.count; i++) printf(" %llu", reply.values[i]);
    printf("\n");
    fflush(stdout);
}

int main(void) {
    char line[256];
    load_driver();
    /* Unbuffered, so that a forked child inherits no half-read commands. */
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        print(call(line));
    }
    return 0;
}
