/*
 * Preloaded beside the shim: the kernel refuses it memory. Of the anonymous mappings that libtessera
 * asks for, the one numbered STARVE_FROM (the first is 0) fails, and the STARVE_COUNT - 1 after it.
 * With STARVE_FORK another thread forks when libtessera is about to give the kernel its first advice
 * about memory. The child initialises the driver and writes `wiped` into that file if the shim has
 * memory there that is wiped in the child's own children, else `kept`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int is_shim(const void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libtessera");
}

static long number(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    static atomic_long asked;
    if ((flags & MAP_ANONYMOUS) && is_shim(__builtin_return_address(0))) {
        long from = number("STARVE_FROM", -1), this = atomic_fetch_add(&asked, 1);
        if (from >= 0 && this >= from && this - from < number("STARVE_COUNT", 1)) {
            errno = ENOMEM;
            return MAP_FAILED;
        }
    }
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

/* Times that libtessera has asked for memory to be wiped in children. */
static atomic_int wiped;

static void *forks(void *unused) {
    pid_t child = fork();
    if (child == 0) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
        FILE *out = fopen(getenv("STARVE_FORK"), "w");
        if (out && init && init(0) == 0) fputs(wiped ? "wiped" : "kept", out);
        if (out) fclose(out);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return unused;
}

int madvise(void *at, size_t bytes, int advice) {
    static atomic_int forked;
    if (advice == MADV_WIPEONFORK && is_shim(__builtin_return_address(0))) {
        pthread_t thread;
        if (getenv("STARVE_FORK") && !atomic_exchange(&forked, 1) &&
            pthread_create(&thread, NULL, forks, NULL) == 0) {
            pthread_join(thread, NULL);
        }
        atomic_fetch_add(&wiped, 1);
    }
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
