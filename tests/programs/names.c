/*
 * Looks names up that only resemble the driver's, in the library that its first argument names and
 * in the process, and prints what each finds. With and without the shim the output must be the same.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void look(void *handle, const char *where, const char *name) {
    dlerror();
    void *found = dlsym(handle, name);
    const char *error = dlerror();
    Dl_info info = {0};
    if (found && !dladdr(found, &info)) info.dli_fname = "?";
    const char *slash = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
    printf("%s %s -> %s, %s\n", where, name, found ? (slash ? slash + 1 : info.dli_fname) : "NULL",
           error ? "error" : "no error");
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    static const char *const names[] = {
        "cuInit", "cuMemAlloc_v2", "nvmlDeviceGetMemoryInfo", "cuGetProcAddress", "curl_easy_init",
        "cublasCreate_v2", "cudaMalloc", "custom", "nvmlish", "cu", "nvml", "", "cuNoSuchFunction",
    };
    /* Nothing that looks like a driver is loaded yet. */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) look(RTLD_DEFAULT, "process", names[i]);
    look(RTLD_DEFAULT, "process", "getpid");
    look(RTLD_NEXT, "next", "getpid");
    look(RTLD_NEXT, "next", "cuInit");

    void *impostor = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!impostor) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) look(impostor, "library", names[i]);
    int (*init)(unsigned) = dlsym(impostor, "cuInit");
    int (*alloc)(void *, unsigned long) = dlsym(impostor, "cuMemAlloc_v2");
    int (*memory)(void *, void *) = dlsym(impostor, "nvmlDeviceGetMemoryInfo");
    printf("calls %d %d %d\n", init(0), alloc(NULL, 1), memory(NULL, NULL));
    return 0;
}
