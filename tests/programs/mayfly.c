/*
 * Programs that take all that is shown free and die with it, over and over.
 *
 *   watch                            prints the most that the driver's GPU 0 had in use, at the end of
 *                                    standard input
 *   loop REPORT MODE ROUNDS MS       runs `live` ROUNDS times, one after the other
 *   live REPORT MODE MS [ROUNDS]     takes all that cuMemGetInfo shows free, holds it for MS milliseconds
 *                                    and ends: killed (MODE k), by an exec of itself ROUNDS times (e), or
 *                                    by returning from main (r)
 *   stay REPORT MS                   takes and gives back what is shown free for MS milliseconds
 *   decay                            prints for how many milliseconds less is shown free after memory that
 *                                    no call showed, half-empty pages, was freed
 *
 * Every request is a character in the file REPORT: G granted, R refused though it was shown free, X where
 * something else failed.
 */
#include "driver.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void report(const char *path, char what) {
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, &what, 1) != 1) abort();
    close(fd);
}

static void sleep_us(long us) {
    struct timespec span = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&span, NULL);
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

struct memory {
    unsigned long long total, free, used;
};

static int watch(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) return 2;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*handle)(unsigned, void **) =
        (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, struct memory *) =
        (int (*)(void *, struct memory *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    void *device;
    if (init() || handle(0, &device)) return 3;
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
    unsigned long long most = 0;
    char end;
    while (read(0, &end, 1) != 0) {
        struct memory now;
        if (info(device, &now)) return 4;
        if (now.used > most) most = now.used;
        sleep_us(500);
    }
    printf("most=%llu\n", most);
    return 0;
}

/* Takes all that is shown free; 0 if there is nothing. */
static CUdeviceptr take(const char *path) {
    size_t avail = 0, total = 0;
    CUdeviceptr ptr = 0;
    if (cuMemGetInfo_v2(&avail, &total)) {
        report(path, 'X');
        return 0;
    }
    avail = avail >> 21 << 21;
    if (avail == 0) return 0;
    int refused = cuMemAlloc_v2(&ptr, avail);
    report(path, refused ? 'R' : 'G');
    return refused ? 0 : ptr;
}

static int begin(const char *path) {
    CUcontext context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) {
        report(path, 'X');
        return 1;
    }
    return 0;
}

static size_t shown_free(void) {
    size_t avail = 0, total = 0;
    return cuMemGetInfo_v2(&avail, &total) ? 0 : avail;
}

/* Pages of which a quarter is in use: the driver has four times what was asked for. */
static int decay(void) {
    enum { COUNT = 1200, BYTES = 512 << 10 };
    static CUdeviceptr kept[COUNT];
    CUcontext context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    size_t before = shown_free(), least = before;
    for (int i = 0; i < COUNT; i++)
        if (cuMemAlloc_v2(&kept[i], BYTES)) return 1;
    for (int i = 0; i < COUNT; i++)
        if (i % 4 != 0 && cuMemFree_v2(kept[i])) return 1;
    /* Until somebody has seen it. */
    for (double end = now_ms() + 3000; now_ms() < end && least > before - COUNT / 2 * (size_t)BYTES;) {
        least = shown_free();
        sleep_us(1000);
    }
    for (int i = 0; i < COUNT; i += 4)
        if (cuMemFree_v2(kept[i])) return 1;
    double began = now_ms();
    while (shown_free() < before && now_ms() - began < 60000) sleep_us(500);
    printf("hidden=%zu decay=%.1f\n", before - least, now_ms() - began);
    return 0;
}

int main(int count, char **args) {
    if (count > 1 && !strcmp(args[1], "watch")) return watch();
    if (count > 1 && !strcmp(args[1], "decay")) {
        load_driver();
        return decay();
    }
    if (count < 4) return 2;
    const char *path = args[2];
    if (!strcmp(args[1], "loop")) {
        for (int round = atoi(args[4]); round > 0; round--) {
            pid_t child = fork();
            if (child == 0) {
                execl("/proc/self/exe", args[0], "live", path, args[3], args[5], (char *)NULL);
                _exit(9);
            }
            int status;
            waitpid(child, &status, 0);
        }
        return 0;
    }
    load_driver();
    if (begin(path)) return 1;
    if (!strcmp(args[1], "stay")) {
        for (double end = now_ms() + atof(args[3]); now_ms() < end;) {
            CUdeviceptr ptr = take(path);
            sleep_us(1000);
            if (ptr) cuMemFree_v2(ptr);
        }
        return 0;
    }
    take(path);
    sleep_us(atol(args[4]) * 1000);
    if (*args[3] == 'k') kill(getpid(), SIGKILL);
    int rounds = count > 5 ? atoi(args[5]) : 0;
    if (*args[3] == 'e' && rounds > 1) {
        char left[16];
        snprintf(left, sizeof left, "%d", rounds - 1);
        execl("/proc/self/exe", args[0], "live", path, "e", args[4], left, (char *)NULL);
    }
    return 0;
}
