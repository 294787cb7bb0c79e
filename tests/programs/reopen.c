/* Loads the driver late, closes it, and loads it again, as plug-in systems do; it is held both times. */
#include "driver.h"

static void use(const char *what) {
    CUcontext ctx;
    CUdeviceptr ptr = 0;
    load_driver();
    CUresult result = cuInit(0);
    if (result == 0) result = cuDevicePrimaryCtxRetain(&ctx, 0);
    if (result == 0) result = cuCtxSetCurrent(ctx);
    if (result == 0) result = cuMemAlloc_v2(&ptr, 1 << 20);
    printf("%s %d\n", what, result);
    CUdeviceptr other = 0;
    printf("beyond %d\n", cuMemAlloc_v2(&other, (size_t)1 << 30));
    cuMemFree_v2(ptr);
}

int main(void) {
    use("first");
    /* Twice: once for load_driver's own, once for what it would hold. Drivers stay mapped. */
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!handle) return 2;
    dlclose(handle);
    dlclose(handle);
    use("second");
    return 0;
}
