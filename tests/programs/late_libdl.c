/*
 * A program without libdl that gets it later, with a library that libc loads on its own account, as
 * it does for the name service (NSS) and character sets. Argument: that library. glibc before 2.34.
 */
#include <stdio.h>

/* What libc's own parts call; it is private, and the only way to have this without libdl. */
extern void *__libc_dlopen_mode(const char *name, int mode);
extern void *__libc_dlsym(void *handle, const char *name);

int main(int argc, char **argv) {
    void *plugin = argc > 1 ? __libc_dlopen_mode(argv[1], (int)(0x80000000u | 2)) : NULL;
    if (!plugin) return 2;
    int (*ask)(void);
    *(void **)&ask = __libc_dlsym(plugin, "ask");
    if (!ask) return 3;
    printf("found %d\n", ask());
    return 0;
}
