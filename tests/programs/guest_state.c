/*
 * Prints what a guest library must leave alone, after using the driver if an argument says so:
 * one `NAME VALUE` line each. Two runs, with and without the shim, must print the same.
 */
#include "driver.h"

#include <dirent.h>
#include <errno.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

static void signals(void) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    for (int signo = 1; signo < 65; signo++) {
        struct sigaction action;
        if (sigaction(signo, NULL, &action) != 0) continue;
        if (action.sa_handler != SIG_DFL || action.sa_flags || sigismember(&mask, signo) == 1)
            printf("signal %d handler %d flags %x blocked %d\n", signo,
                   action.sa_handler != SIG_DFL, action.sa_flags, sigismember(&mask, signo));
    }
    stack_t stack;
    sigaltstack(NULL, &stack);
    printf("altstack %d\n", stack.ss_flags);
}

static void environment(void) {
    for (char **at = environ; *at; at++)
        /* The test itself sets these, or not. */
        if (strncmp(*at, "LD_PRELOAD=", 11) && strncmp(*at, "TESSERA_DIR=", 12)) printf("env %s\n", *at);
}

static void limits(void) {
    for (int which = 0; which < 16; which++) {
        struct rlimit limit;
        if (getrlimit(which, &limit) == 0)
            printf("rlimit %d %llu %llu\n", which, (unsigned long long)limit.rlim_cur,
                   (unsigned long long)limit.rlim_max);
    }
}

/* Numbers that applications may rely on getting; the shim's own lie above. */
static void low_files(void) {
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    for (struct dirent *entry; (entry = readdir(dir));) count += entry->d_name[0] != '.' && atoi(entry->d_name) < 512;
    closedir(dir);
    printf("low files %d\n", count);
    int next = dup(0);
    printf("next file %d\n", next);
    close(next);
}

static void use_driver(void) {
    CUcontext ctx;
    CUdeviceptr ptr;
    size_t avail, total;
    load_driver();
    errno = 4711;
    int failed = cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx) ||
                 cuMemAlloc_v2(&ptr, 1 << 20) || cuMemGetInfo_v2(&avail, &total) || cuMemFree_v2(ptr);
    if (failed) exit(2);
    errno = 4711;
    /* Once all is set up, calls within the quota leave errno alone. */
    if (cuMemAlloc_v2(&ptr, 1 << 20) || cuMemFree_v2(ptr)) exit(2);
    printf("errno %d\n", errno);
}

int main(int argc, char **argv) {
    (void)argv;
    umask(027);
    if (argc > 1) use_driver();
    mode_t mask = umask(0);
    char cwd[512], name[32] = "";
    prctl(PR_GET_NAME, name);
    printf("umask %o\ncwd %s\nname %s\n", mask, getcwd(cwd, sizeof cwd), name);
    printf("dumpable %d\n", prctl(PR_GET_DUMPABLE));
    printf("locale %s\n", setlocale(LC_ALL, NULL));
    printf("rounding %d exceptions %d\n", fegetround(), fetestexcept(FE_ALL_EXCEPT));
    printf("group %d session %d\n", getpgrp() == getpid(), getsid(0) == getpid());
    printf("nice %d\n", getpriority(PRIO_PROCESS, 0));
    signals();
    environment();
    limits();
    low_files();
    return 0;
}
