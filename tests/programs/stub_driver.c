/*
 * A driver library that keeps nothing but a context and a count: for C libraries that the simulated
 * driver can't be loaded under. Its one GPU has 1 GiB and UUID GPU-57ab0000-0000-4000-8000-000000000000.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;

static const size_t gpu_bytes = 1ul << 30;
static size_t held;
static _Thread_local void *current;
static int context, references;

static struct {
    CUdeviceptr at;
    size_t bytes;
} blocks[64];

CUresult cuInit(unsigned flags) {
    return flags ? 1 : 0;
}
CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}
CUresult cuDeviceGet(CUdevice *dev, int ordinal) {
    *dev = 0;
    return ordinal ? 101 : 0;
}
CUresult cuDeviceGetUuid_v2(void *uuid, CUdevice dev) {
    static const unsigned char bytes[16] = {0x57, 0xab, 0, 0, 0, 0, 0x40, 0, 0x80};
    (void)dev;
    memcpy(uuid, bytes, sizeof bytes);
    return 0;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    (void)dev;
    *bytes = gpu_bytes;
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(void **ctx, CUdevice dev) {
    (void)dev;
    references++;
    *ctx = &context;
    return 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active) {
    (void)dev;
    *flags = 0;
    *active = references > 0;
    return 0;
}
CUresult cuCtxSetCurrent(void *ctx) {
    current = ctx;
    return 0;
}
CUresult cuCtxGetCurrent(void **ctx) {
    *ctx = current;
    return 0;
}
CUresult cuCtxGetDevice(CUdevice *dev) {
    *dev = 0;
    return current ? 0 : 201;
}
CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes) {
    static CUdeviceptr next = 0x700000000;
    if (!current) return 201;
    if (bytes > gpu_bytes - held) return 2;
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (!blocks[i].bytes) {
            blocks[i].at = *ptr = next;
            blocks[i].bytes = bytes;
            next += bytes;
            held += bytes;
            return 0;
        }
    return 2;
}
CUresult cuMemFree_v2(CUdeviceptr ptr) {
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (blocks[i].bytes && blocks[i].at == ptr) {
            held -= blocks[i].bytes;
            blocks[i].bytes = 0;
            return 0;
        }
    return 1;
}
CUresult cuMemGetInfo_v2(size_t *avail, size_t *total) {
    *avail = gpu_bytes - held;
    *total = gpu_bytes;
    return current ? 0 : 201;
}
