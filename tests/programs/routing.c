/*
 * Prints where every look-up of the driver leads, one line each, for names read from standard input:
 *
 *   dlsym NAME -> WHERE
 *   v1 NAME VERSION FLAGS RESULT -> WHERE
 *   v2 NAME VERSION FLAGS RESULT STATUS -> WHERE
 *
 * WHERE is `FILE SYMBOL` where the address is exactly an exported symbol's, `FILE +OFFSET` where it
 * is not, or `NULL`. Run with and without the shim, the two answers can be compared line by line.
 * Arguments: the versions to ask cuGetProcAddress for.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void where(const void *address) {
    Dl_info info;
    if (!address) {
        printf("NULL\n");
    } else if (!dladdr(address, &info)) {
        printf("nowhere %p\n", address);
    } else {
        const char *slash = strrchr(info.dli_fname, '/');
        const char *file = slash ? slash + 1 : info.dli_fname;
        if (info.dli_saddr == address)
            printf("%s %s\n", file, info.dli_sname);
        else
            printf("%s +%#lx\n", file, (unsigned long)((const char *)address - (const char *)info.dli_fbase));
    }
}

int main(int argc, char **argv) {
    static char out[1 << 16];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    int (*v1)(const char *, void **, int, uint64_t) = dlsym(driver, "cuGetProcAddress");
    int (*v2)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    char name[256];
    while (fgets(name, sizeof name, stdin)) {
        name[strcspn(name, "\n")] = 0;
        printf("dlsym %s -> ", name);
        where(dlsym(driver, name));
        for (int i = 1; i < argc; i++) {
            const int version = atoi(argv[i]);
            /* Default, legacy, per-thread, and a combination that the driver refuses. */
            for (uint64_t flags = 0; flags <= 3; flags++) {
                void *found = (void *)0x5a5a;
                int status = -7;
                int result = v1(name, &found, version, flags);
                printf("v1 %s %d %d %d -> ", name, version, (int)flags, result);
                where(found == (void *)0x5a5a ? NULL : found);
                found = (void *)0x5a5a;
                result = v2(name, &found, version, flags, &status);
                printf("v2 %s %d %d %d %d%s -> ", name, version, (int)flags, result, status,
                       found == (void *)0x5a5a ? " untouched" : "");
                where(found == (void *)0x5a5a ? NULL : found);
            }
        }
    }
    /* The status may be NULL. (The symbol may not: the driver itself crashes.) */
    void *found = NULL;
    int result = v2("cuMemAlloc", &found, 12000, 0, NULL);
    printf("v2-without-status %d -> ", result);
    where(found);
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    printf("cuInit %d\n", init(0));
    return 0;
}
