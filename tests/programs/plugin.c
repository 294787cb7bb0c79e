/* A library that needs libdl and looks functions up. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int ask(void) {
    int getpid_found = dlsym(RTLD_DEFAULT, "getpid") == (void *)getpid;
    int driver_found = dlsym(RTLD_DEFAULT, "cuInit") != NULL;
    return getpid_found + 10 * driver_found;
}
