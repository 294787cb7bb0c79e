/* Another preloaded library beside the shim: a profiler that counts calls and passes them on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>

static int allocations, questions;

int cuMemAlloc_v2(unsigned long long *ptr, size_t bytes) {
    int (*next)(unsigned long long *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    allocations++;
    return next(ptr, bytes);
}

/* A name that is none of the driver's: found from this library's place, not from the shim's. */
pid_t getppid(void) {
    pid_t (*next)(void) = dlsym(RTLD_NEXT, "getppid");
    questions++;
    return questions > 1 ? -1 : next();
}

int wrapper_allocations(void) {
    return allocations;
}
