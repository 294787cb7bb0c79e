/*
 * A program that is over in a few milliseconds: it takes 64 MiB, is refused 1 TiB, and ends.
 */
#include "driver.h"

int main(void) {
    load_driver();
    CUcontext context;
    CUdeviceptr memory;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
    if (cuMemAlloc_v2(&memory, 64ul << 20)) return 4;
    return cuMemAlloc_v2(&memory, 1ul << 40) == 2 ? 0 : 5;
}
