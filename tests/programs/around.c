/* Preloaded into a program, and shared with a test by the file that AROUND names, two 64-bit words:
 *
 * 0: seconds by which the program's wall clock differs from the machine's, as if an administrator or NTP had
 *    set it. Every other clock is as it is.
 * 1: bytes that malloc has handed out and not got back, as of the last look at the wall clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shared;
static int (*next)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("AROUND");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *map = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED)
        shared = map;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int failed = next ? next(id, now) : (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && shared && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        struct mallinfo2 heap = mallinfo2();
        shared[1] = (int64_t)(heap.uordblks + heap.hblkhd);
        now->tv_sec += shared[0];
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec at;
    int failed = clock_gettime(CLOCK_REALTIME, &at);
    if (!failed) {
        now->tv_sec = at.tv_sec;
        now->tv_usec = at.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *now)
{
    struct timespec at;
    if (clock_gettime(CLOCK_REALTIME, &at))
        return -1;
    if (now)
        *now = at.tv_sec;
    return at.tv_sec;
}
