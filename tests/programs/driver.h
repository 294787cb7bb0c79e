/*
 * The few driver and NVML functions that the test programs call, reachable in each of the ways in
 * which real programs reach them. Written from the CUDA Driver API and NVML manuals, so that no
 * toolkit is needed to compile the tests.
 *
 *   default            dlopen("libcuda.so.1") + dlsym, as cudarc, Triton and PyTorch's lazy stubs do
 *   -DLINKED           NEEDED libcuda.so.1, calls through the PLT, as programs built with -lcuda do
 *   -DPROC_ADDRESS     cuGetProcAddress for all, as libcudart does from CUDA 11.3 on
 *   -DPER_THREAD       with PROC_ADDRESS: the per-thread default stream flavour
 *
 * A function that this driver does not have is NULL (never so when LINKED).
 */
#ifndef TESSERA_TESTS_DRIVER_H
#define TESSERA_TESTS_DRIVER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUfunction, *CUmemoryPool;
typedef struct {
    unsigned char bytes[16];
} CUuuid;

/* X(name as cuda.h's macros map it, name for cuGetProcAddress, version asked for, arguments) */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(cuInit, cuInit, 2000, (unsigned flags))                                                      \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, (int *version))                                \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000, (int *count))                                      \
    X(cuDeviceGet, cuDeviceGet, 2000, (CUdevice *dev, int ordinal))                                \
    X(cuDeviceGetUuid_v2, cuDeviceGetUuid, 11040, (CUuuid *uuid, CUdevice dev))                    \
    X(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice dev))                  \
    X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020,                                 \
      (CUmemoryPool *pool, CUdevice dev))                                                          \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, (CUcontext *ctx, CUdevice dev))    \
    X(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, (CUdevice dev))              \
    X(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, (CUdevice dev))                  \
    X(cuCtxCreate_v2, cuCtxCreate, 3020, (CUcontext *ctx, unsigned flags, CUdevice dev))           \
    X(cuCtxDestroy_v2, cuCtxDestroy, 4000, (CUcontext ctx))                                        \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, (CUcontext ctx))                                     \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000, (void))                                            \
    X(cuMemAlloc_v2, cuMemAlloc, 3020, (CUdeviceptr * ptr, size_t bytes))                          \
    X(cuMemAllocPitch_v2, cuMemAllocPitch, 3020,                                                   \
      (CUdeviceptr * ptr, size_t *pitch, size_t width, size_t height, unsigned element))           \
    X(cuMemAllocManaged, cuMemAllocManaged, 6000, (CUdeviceptr * ptr, size_t bytes, unsigned f))   \
    X(cuMemAllocAsync, cuMemAllocAsync, 11020, (CUdeviceptr * ptr, size_t bytes, CUstream s))      \
    X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020,                                     \
      (CUdeviceptr * ptr, size_t bytes, CUmemoryPool pool, CUstream s))                            \
    X(cuMemFree_v2, cuMemFree, 3020, (CUdeviceptr ptr))                                            \
    X(cuMemFreeAsync, cuMemFreeAsync, 11020, (CUdeviceptr ptr, CUstream s))                        \
    X(cuMemGetInfo_v2, cuMemGetInfo, 3020, (size_t *avail, size_t *total))                         \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020, (void **ptr, size_t bytes, unsigned flags))            \
    X(cuMemFreeHost, cuMemFreeHost, 2000, (void *ptr))                                             \
    X(cuMemAlloc, cuMemAlloc, 2000, (unsigned *ptr, unsigned bytes))                               \
    X(cuMemFree, cuMemFree, 2000, (unsigned ptr))                                                  \
    X(cuMemGetInfo, cuMemGetInfo, 2000, (unsigned *avail, unsigned *total))                        \
    X(cuDeviceTotalMem, cuDeviceTotalMem, 2000, (unsigned *bytes, CUdevice dev))                   \
    X(cuMemcpyHtoD_v2, cuMemcpyHtoD, 3020, (CUdeviceptr dst, const void *src, size_t bytes))       \
    X(cuMemcpyDtoH_v2, cuMemcpyDtoH, 3020, (void *dst, CUdeviceptr src, size_t bytes))             \
    X(cuMemcpyDtoD_v2, cuMemcpyDtoD, 3020, (CUdeviceptr dst, CUdeviceptr src, size_t bytes))       \
    X(cuMemsetD8_v2, cuMemsetD8, 3020, (CUdeviceptr dst, unsigned char value, size_t count))       \
    X(cuStreamCreate, cuStreamCreate, 2000, (CUstream * s, unsigned flags))                        \
    X(cuStreamDestroy_v2, cuStreamDestroy, 4000, (CUstream s))                                     \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000, (CUstream s))                                \
    X(cuModuleLoadData, cuModuleLoadData, 2000, (CUmodule * module, const void *image))            \
    X(cuModuleGetFunction, cuModuleGetFunction, 2000,                                              \
      (CUfunction * f, CUmodule module, const char *name))                                         \
    X(cuLaunchKernel, cuLaunchKernel, 4000,                                                        \
      (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
       unsigned shared, CUstream s, void **params, void **extra))

#ifdef LINKED
#define DECLARE(symbol, name, version, arguments) extern CUresult symbol arguments;
DRIVER_FUNCTIONS(DECLARE)
static inline void load_driver(void) {}
#else
#define DECLARE(symbol, name, version, arguments) static CUresult(*symbol) arguments;
DRIVER_FUNCTIONS(DECLARE)

static void *driver_handle(void) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (!handle) {
        fprintf(stderr, "no driver: %s\n", dlerror());
        exit(3);
    }
    return handle;
}

static inline void load_driver(void) {
    void *handle = driver_handle();
#ifdef PROC_ADDRESS
    CUresult (*resolve)(const char *, void **, int, uint64_t, int *) =
        dlsym(handle, "cuGetProcAddress_v2");
#ifdef PER_THREAD
    /* The flavour exists from CUDA 7 on; before that the driver answers nothing. (So the functions of
       CUDA 2 are not to be called in this flavour: their names lead to the later forms.) */
    const uint64_t flags = 2;
    const int least = 7000;
#else
    const uint64_t flags = 0;
    const int least = 0;
#endif
#define LOAD(symbol, name, version, arguments)                                                     \
    do {                                                                                           \
        void *found = NULL;                                                                        \
        int status = 0;                                                                            \
        if (!resolve || resolve(#name, &found, version < least ? least : version, flags, &status)) \
            found = NULL;                                                                          \
        *(void **)&symbol = found;                                                                 \
    } while (0);
#else
#define LOAD(symbol, name, version, arguments) *(void **)&symbol = dlsym(handle, #symbol);
#endif
    DRIVER_FUNCTIONS(LOAD)
}
#endif

typedef void *nvmlDevice_t;
typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

static int (*nvmlInit_v2)(void);
static int (*nvmlDeviceGetCount_v2)(unsigned *count);
static int (*nvmlDeviceGetHandleByIndex_v2)(unsigned index, nvmlDevice_t *device);
static int (*nvmlDeviceGetMemoryInfo)(nvmlDevice_t device, nvmlMemory_t *memory);
static int (*nvmlDeviceGetMemoryInfo_v2)(nvmlDevice_t device, nvmlMemory_v2_t *memory);

/* Loads libnvidia-ml.so.1 with dlopen, as every NVML client does; 0, or 12 (library not found). */
static inline int load_nvml(void) {
    void *handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!handle) return 12;
    *(void **)&nvmlInit_v2 = dlsym(handle, "nvmlInit_v2");
    *(void **)&nvmlDeviceGetCount_v2 = dlsym(handle, "nvmlDeviceGetCount_v2");
    *(void **)&nvmlDeviceGetHandleByIndex_v2 = dlsym(handle, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&nvmlDeviceGetMemoryInfo = dlsym(handle, "nvmlDeviceGetMemoryInfo");
    *(void **)&nvmlDeviceGetMemoryInfo_v2 = dlsym(handle, "nvmlDeviceGetMemoryInfo_v2");
    return 0;
}

#endif
