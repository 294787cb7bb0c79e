/*
 * Virtual memory management, arrays and IPC: one call per line of standard input, answered
 * `RESULT VALUE…`.
 *
 *   create DEV BYTES -> handle (memory that can be exported as a descriptor) | host BYTES -> handle
 *   release HANDLE | reserve BYTES -> ptr | map PTR BYTES HANDLE | unmap PTR BYTES
 *   retained PTR -> handle | fill PTR BYTES (makes it accessible on device 0 and writes)
 *   export HANDLE -> fd | close FD | import PID FD -> handle (of another process's descriptor)
 *   multicast DEVICES BYTES -> handle | member MC DEV | bind MC OFFSET HANDLE BYTES
 *   unbind MC DEV OFFSET BYTES
 *   array W H FORMAT CHANNELS -> handle | array1 (the same, 32-bit form of CUDA 2)
 *   array3 W H D FORMAT CHANNELS FLAGS -> handle | array31 (likewise)
 *   mipmap W H D FORMAT CHANNELS FLAGS LEVELS -> handle | unarray HANDLE | unmipmap HANDLE
 *   needs W H D FORMAT CHANNELS FLAGS LEVELS -> bytes that the driver says (LEVELS 0: an array)
 *   getipc PTR -> the eight words of the handle | openipc WORD… -> ptr | closeipc PTR
 *
 * Written from the CUDA Driver API manual, "Virtual Memory Management", "Multicast Object
 * Management" and "Memory Management".
 */
#include "conversation.h"

#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long Handle;
typedef struct {
    int type, handleTypes, location, id;
    void *metadata;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} Prop;
typedef struct {
    int location, id, flags;
} Access;
typedef struct {
    unsigned devices;
    size_t size;
    unsigned long long handleTypes, flags;
} MulticastProp;
typedef struct {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
} Array3;
typedef struct {
    size_t width, height;
    int format;
    unsigned channels;
} Array;
typedef struct {
    unsigned width, height, depth;
    int format;
    unsigned channels, flags;
} OldArray3;
typedef struct {
    unsigned width, height;
    int format;
    unsigned channels;
} OldArray;
typedef struct {
    size_t size, alignment;
    unsigned reserved[4];
} Needs;
typedef struct {
    unsigned long long words[8];
} Ipc;

#define MORE(X)                                                                                    \
    X(cuMemCreate, (Handle * handle, size_t bytes, const Prop *prop, unsigned long long flags))    \
    X(cuMemRelease, (Handle handle))                                                               \
    X(cuMemAddressReserve,                                                                         \
      (CUdeviceptr * ptr, size_t bytes, size_t align, CUdeviceptr at, unsigned long long flags))   \
    X(cuMemMap, (CUdeviceptr ptr, size_t bytes, size_t offset, Handle handle,                      \
                 unsigned long long flags))                                                        \
    X(cuMemUnmap, (CUdeviceptr ptr, size_t bytes))                                                 \
    X(cuMemSetAccess, (CUdeviceptr ptr, size_t bytes, const Access *access, size_t count))         \
    X(cuMemRetainAllocationHandle, (Handle * handle, void *address))                               \
    X(cuMemExportToShareableHandle,                                                                \
      (void *shareable, Handle handle, int type, unsigned long long flags))                        \
    X(cuMemImportFromShareableHandle, (Handle * handle, void *shareable, int type))                \
    X(cuMulticastCreate, (Handle * object, const MulticastProp *prop))                             \
    X(cuMulticastAddDevice, (Handle object, CUdevice dev))                                         \
    X(cuMulticastBindMem, (Handle object, size_t object_offset, Handle memory, size_t offset,      \
                           size_t bytes, unsigned long long flags))                                \
    X(cuMulticastUnbind, (Handle object, CUdevice dev, size_t object_offset, size_t bytes))        \
    X(cuArrayCreate_v2, (void **array, const Array *descriptor))                                   \
    X(cuArrayCreate, (void **array, const OldArray *descriptor))                                   \
    X(cuArray3DCreate_v2, (void **array, const Array3 *descriptor))                                \
    X(cuArray3DCreate, (void **array, const OldArray3 *descriptor))                                \
    X(cuMipmappedArrayCreate, (void **array, const Array3 *descriptor, unsigned levels))           \
    X(cuArrayDestroy, (void *array))                                                               \
    X(cuMipmappedArrayDestroy, (void *array))                                                      \
    X(cuArrayGetMemoryRequirements, (Needs * needs, void *array, CUdevice dev))                    \
    X(cuMipmappedArrayGetMemoryRequirements, (Needs * needs, void *array, CUdevice dev))           \
    X(cuIpcGetMemHandle, (Ipc * handle, CUdeviceptr ptr))                                          \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr * ptr, Ipc handle, unsigned flags))                      \
    X(cuIpcCloseMemHandle, (CUdeviceptr ptr))
MORE(DECLARE_MORE)

static CUresult needs(const unsigned long long *n, unsigned long long *bytes) {
    Array3 d = {n[0], n[1], n[2], (int)n[3], (unsigned)n[4], (unsigned)n[5] | 0x80 /* deferred */};
    Needs needs = {0};
    void *array = NULL;
    CUresult result;
    if (n[6]) {
        result = more_cuMipmappedArrayCreate(&array, &d, (unsigned)n[6]);
        if (result) return result;
        result = more_cuMipmappedArrayGetMemoryRequirements(&needs, array, 0);
        more_cuMipmappedArrayDestroy(array);
    } else {
        result = more_cuArray3DCreate_v2(&array, &d);
        if (result) return result;
        result = more_cuArrayGetMemoryRequirements(&needs, array, 0);
        more_cuArrayDestroy(array);
    }
    *bytes = needs.size;
    return result;
}

static int foreign_descriptor(int pid, int fd) {
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    int here = (int)syscall(SYS_pidfd_getfd, process, fd, 0);
    close(process);
    return here;
}

static void call(const char *line) {
    char command[32] = "";
    unsigned long long n[8] = {0}, value = 0;
    sscanf(line, "%31s %llu %llu %llu %llu %llu %llu %llu %llu", command, n, n + 1, n + 2, n + 3, n + 4,
           n + 5, n + 6, n + 7);
    void *array = NULL, *handle = (void *)(uintptr_t)n[0];
    CUresult result;
    IS("create") {
        Prop prop = {.type = 1, .handleTypes = 1, .location = 1, .id = (int)n[0]};
        ANSWER_WITH(value, more_cuMemCreate(&value, n[1], &prop, 0));
    }
    IS("host") {
        Prop prop = {.type = 1, .location = 3 /* NUMA node 0 */};
        ANSWER_WITH(value, more_cuMemCreate(&value, n[0], &prop, 0));
    }
    IS("release") ANSWER(more_cuMemRelease(n[0]));
    IS("reserve") ANSWER_WITH(value, more_cuMemAddressReserve(&value, n[0], 0, 0, 0));
    IS("map") ANSWER(more_cuMemMap(n[0], n[1], 0, n[2], 0));
    IS("unmap") ANSWER(more_cuMemUnmap(n[0], n[1]));
    IS("fill") {
        Access access = {1, 0, 3};
        result = more_cuMemSetAccess(n[0], n[1], &access, 1);
        ANSWER(result ? result : cuMemsetD8_v2(n[0], 7, n[1]));
    }
    IS("retained") ANSWER_WITH(value, more_cuMemRetainAllocationHandle(&value, handle));
    IS("export") {
        int fd = -1;
        ANSWER_WITH(fd, more_cuMemExportToShareableHandle(&fd, n[0], 1, 0));
    }
    IS("close") ANSWER(close((int)n[0]));
    IS("import") {
        int fd = foreign_descriptor((int)n[0], (int)n[1]);
        result = more_cuMemImportFromShareableHandle(&value, (void *)(uintptr_t)fd, 1);
        close(fd);
        ANSWER_WITH(value, result);
    }
    IS("multicast") {
        MulticastProp prop = {.devices = (unsigned)n[0], .size = n[1]};
        ANSWER_WITH(value, more_cuMulticastCreate(&value, &prop));
    }
    IS("member") ANSWER(more_cuMulticastAddDevice(n[0], (CUdevice)n[1]));
    IS("bind") ANSWER(more_cuMulticastBindMem(n[0], n[1], n[2], 0, n[3], 0));
    IS("unbind") ANSWER(more_cuMulticastUnbind(n[0], (CUdevice)n[1], n[2], n[3]));
    Array3 d3 = {n[0], n[1], n[2], (int)n[3], (unsigned)n[4], (unsigned)n[5]};
    IS("array") {
        Array d = {n[0], n[1], (int)n[2], (unsigned)n[3]};
        ANSWER_WITH((uintptr_t)array, more_cuArrayCreate_v2(&array, &d));
    }
    IS("array1") {
        OldArray d = {(unsigned)n[0], (unsigned)n[1], (int)n[2], (unsigned)n[3]};
        ANSWER_WITH((uintptr_t)array, more_cuArrayCreate(&array, &d));
    }
    IS("array3") ANSWER_WITH((uintptr_t)array, more_cuArray3DCreate_v2(&array, &d3));
    IS("array31") {
        OldArray3 d = {(unsigned)n[0], (unsigned)n[1], (unsigned)n[2], (int)n[3], (unsigned)n[4], (unsigned)n[5]};
        ANSWER_WITH((uintptr_t)array, more_cuArray3DCreate(&array, &d));
    }
    IS("mipmap") ANSWER_WITH((uintptr_t)array, more_cuMipmappedArrayCreate(&array, &d3, (unsigned)n[6]));
    IS("needs") ANSWER_WITH(value, needs(n, &value));
    IS("unarray") ANSWER(more_cuArrayDestroy(handle));
    IS("unmipmap") ANSWER(more_cuMipmappedArrayDestroy(handle));
    IS("getipc") {
        Ipc ipc = {{0}};
        result = more_cuIpcGetMemHandle(&ipc, n[0]);
        printf("%d", result);
        for (int i = 0; i < 8; i++) printf(" %llu", ipc.words[i]);
        printf("\n");
        return;
    }
    IS("openipc") {
        Ipc ipc;
        memcpy(ipc.words, n, sizeof ipc);
        ANSWER_WITH(value, more_cuIpcOpenMemHandle_v2(&value, ipc, 1 /* lazy peer access */));
    }
    IS("closeipc") ANSWER(more_cuIpcCloseMemHandle(n[0]));
    common(line);
}

CONVERSATION
