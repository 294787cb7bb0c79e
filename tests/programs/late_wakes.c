/* Preloaded: of a thread's wake-ups one in ten is late by 1 to 8 ms, as on a host whose CPUs are elsewhere.

   What sleeps by libc's own functions: futex(2) by number, as Rust's standard library and the shim call it, and
   nanosleep(2), as the simulated driver does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long (*next_syscall)(long, ...);

__attribute__((constructor)) static void find(void)
{
    next_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
}

static long next(long number, long a, long b, long c, long d, long e, long f)
{
    if (!next_syscall)
        find();
    return next_syscall(number, a, b, c, d, e, f);
}

/* xorshift, of each thread its own. */
static uint32_t draw(void)
{
    static __thread uint32_t state;
    if (!state)
        state = (uint32_t)gettid() * 2654435761u | 1;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static void late(void)
{
    int saved = errno;
    if (draw() % 10 == 0) {
        struct timespec more = { 0, (long)(1000000 + draw() % 7000000) };
        next(SYS_nanosleep, (long)&more, 0, 0, 0, 0, 0);
    }
    errno = saved;
}

long syscall(long number, ...)
{
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    long result = next(number, a, b, c, d, e, f);
    int command = (int)b & FUTEX_CMD_MASK;
    /* It slept, unless the word was another. */
    if (number == SYS_futex && (command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET)
        && (result == 0 || errno == ETIMEDOUT))
        late();
    if (number == SYS_nanosleep)
        late();
    return result;
}

int nanosleep(const struct timespec *time, struct timespec *rest)
{
    int result = (int)next(SYS_nanosleep, (long)time, (long)rest, 0, 0, 0, 0);
    late();
    return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest)
{
    int saved = errno;
    long result = next(SYS_clock_nanosleep, clock, flags, (long)time, (long)rest, 0, 0);
    int error = result == 0 ? 0 : errno;
    errno = saved;
    late();
    return error;
}
