/*
 * Linked with the driver and run with both the shim and `wrapper` preloaded: allocates within the
 * quota and beyond it, and calls a function of libc that the wrapper wraps.
 * Arguments: bytes that fit, bytes that do not.
 */
#define LINKED
#include "driver.h"

#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    CUcontext ctx;
    CUdeviceptr ptr = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx)) return 3;
    printf("fits %d\n", cuMemAlloc_v2(&ptr, strtoull(argv[1], NULL, 10)));
    printf("beyond %d\n", cuMemAlloc_v2(&ptr, strtoull(argv[2], NULL, 10)));
    printf("parent %d\n", getppid() > 0);
    int (*counted)(void) = dlsym(RTLD_DEFAULT, "wrapper_allocations");
    printf("counted %d\n", counted ? counted() : -1);
    return 0;
}
