/*
 * Launches at a gate: one call per line of standard input, answered `RESULT VALUE…`.
 *
 *   retain DEV (and loads a module)
 *   launch COUNT NS STREAM -> microseconds that it took (kernels of NS, one after the other)
 *   sync STREAM | query STREAM | destroy STREAM
 *   fork COUNT NS -> wait status of a child that launches and ends with the result
 *   threads -> how many this process has
 *
 * Written from the CUDA Driver API manual. Kernel `spin` takes the nanoseconds that its parameter says.
 */
#include "conversation.h"

#include <dirent.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MORE(X)                                                                                    \
    X(cuStreamQuery, (CUstream stream))
MORE(DECLARE_MORE)

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry spin(.param .u64 ns) { ret; }\n";

static CUcontext context;
static CUfunction spin;

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

static CUresult launch(unsigned long long count, unsigned long long ns, CUstream into) {
    CUresult result = 0;
    void *params[] = {&ns};
    while (count-- && !result)
        result = cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, into, params, NULL);
    return result;
}

static CUresult retain(int device) {
    CUdevice found;
    CUmodule module;
    CUresult result = cuDeviceGet(&found, device);
    if (!result) result = cuDevicePrimaryCtxRetain(&context, found);
    if (!result) result = cuCtxSetCurrent(context);
    if (!result) result = cuModuleLoadData(&module, PTX);
    if (!result) result = cuModuleGetFunction(&spin, module, "spin");
    return result;
}

static int tasks(void) {
    DIR *directory = opendir("/proc/self/task");
    int count = 0;
    while (directory && readdir(directory)) count++;
    if (directory) closedir(directory);
    return count - 2;
}

static void call(const char *line) {
    char word[32] = "";
    unsigned long long a = 0, b = 0, c = 0;
    sscanf(line, "%31s %llu %llu %llu", word, &a, &b, &c);
    if (!strcmp(word, "retain")) {
        printf("%d\n", retain((int)a));
    } else if (!strcmp(word, "launch")) {
        unsigned long long begun = now_us();
        CUresult result = launch(a, b, stream(c));
        printf("%d %llu\n", result, now_us() - begun);
    } else if (!strcmp(word, "sync")) {
        printf("%d\n", cuStreamSynchronize(stream(a)));
    } else if (!strcmp(word, "query")) {
        printf("%d\n", more_cuStreamQuery(stream(a)));
    } else if (!strcmp(word, "destroy")) {
        printf("%d\n", cuStreamDestroy_v2(stream(a)));
    } else if (!strcmp(word, "fork")) {
        int status = -1;
        pid_t child = fork();
        if (!child) {
            /* After the parent's use of it the driver is of no use to the child, who tries. */
            if (cuInit(0) || retain(0)) _exit(launch(1, b, NULL));
            _exit(launch(a, b, stream(0)) || cuStreamSynchronize(stream(0)));
        }
        waitpid(child, &status, 0);
        printf("0 %d\n", status);
    } else if (!strcmp(word, "threads")) {
        printf("0 %d\n", tasks());
    } else {
        common(line);
    }
}

CONVERSATION
