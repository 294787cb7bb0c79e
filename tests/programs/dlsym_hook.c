/*
 * A preloaded library with a dlsym of its own, as profilers and overlays have: it counts, and asks
 * libc's, which it finds as they all do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>

static atomic_int asked;

void *dlsym(void *restrict handle, const char *restrict name) {
    static void *(*real)(void *, const char *);
    if (!real) {
        void *found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        real = (void *(*)(void *, const char *))found;
    }
    asked++;
    return real(handle, name);
}

int dlsym_hook_asked(void) {
    return asked;
}
