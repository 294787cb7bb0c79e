"""NVIDIA's cuda-bindings as a tenant: memory to the limit and back, copies, streams, events, launches."""

import ctypes
import uuid

from cuda.bindings import driver as cu
from view import LIMIT, MIB, UUIDS, holds, same


def ok(answer):
    """The values of a call that must succeed."""
    error, *values = answer
    same("result", error, cu.CUresult.CUDA_SUCCESS)
    return values[0] if len(values) == 1 else tuple(values)


def devices():
    same("device count", ok(cu.cuDeviceGetCount()), len(UUIDS))
    holds("a driver version", ok(cu.cuDriverGetVersion()) >= 11040)
    for ordinal, expected in enumerate(UUIDS):
        device = ok(cu.cuDeviceGet(ordinal))
        seen = "GPU-" + str(uuid.UUID(bytes=bytes(ok(cu.cuDeviceGetUuid(device)).bytes)))
        same("UUID", seen, expected)
        holds("a name", ok(cu.cuDeviceGetName(64, device)).strip(b"\0"))
        major = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        holds("a compute capability", ok(cu.cuDeviceGetAttribute(major, device)) >= 5)


def memory_to_the_limit(device):
    total = ok(cu.cuDeviceTotalMem(device))
    free, same_total = ok(cu.cuMemGetInfo())
    same("cuMemGetInfo's total", same_total, total)
    holds("free <= total", free <= total)
    if LIMIT is not None:
        same("total memory", total, LIMIT)
    chunk = 64 * MIB
    held = []
    while True:
        error, pointer = cu.cuMemAlloc(chunk)
        if error == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            break
        same("allocation", error, cu.CUresult.CUDA_SUCCESS)
        held.append(pointer)
        holds("the allocations stay within the memory there is", len(held) * chunk <= free)
    same("allocations until out of memory", len(held), free // chunk)
    holds("little is free at the limit", ok(cu.cuMemGetInfo())[0] < chunk)
    for pointer in held:
        ok(cu.cuMemFree(pointer))
    same("free memory after all frees", ok(cu.cuMemGetInfo())[0], free)


def every_kind_of_memory(device):
    free = ok(cu.cuMemGetInfo())[0]
    pitched, pitch = ok(cu.cuMemAllocPitch(1000, 1000, 4))
    holds("the pitch covers a row", pitch >= 1000)
    managed = ok(cu.cuMemAllocManaged(4 * MIB, 1))
    asynchronous = ok(cu.cuMemAllocAsync(4 * MIB, 0))
    pool = ok(cu.cuDeviceGetDefaultMemPool(device))
    pooled = ok(cu.cuMemAllocFromPoolAsync(4 * MIB, pool, 0))
    holds("memory is in use", ok(cu.cuMemGetInfo())[0] < free)
    ok(cu.cuMemFreeAsync(pooled, 0))
    ok(cu.cuMemFreeAsync(asynchronous, 0))
    ok(cu.cuStreamSynchronize(0))
    ok(cu.cuMemFree(managed))
    ok(cu.cuMemFree(pitched))
    if LIMIT is not None:
        # On the bare driver a pool may keep what it has reserved.
        same("free memory after all frees", ok(cu.cuMemGetInfo())[0], free)


def copies():
    size = 3 * MIB + 7
    source = (ctypes.c_ubyte * size)(*(i * 31 % 251 for i in range(size)))
    target = (ctypes.c_ubyte * size)()
    first, second = ok(cu.cuMemAlloc(size)), ok(cu.cuMemAlloc(size))
    ok(cu.cuMemcpyHtoD(first, ctypes.addressof(source), size))
    ok(cu.cuMemcpyDtoD(second, first, size))
    ok(cu.cuMemsetD8(first, 0, size))
    ok(cu.cuMemcpyDtoH(ctypes.addressof(target), second, size))
    holds("a round trip keeps the bytes", bytes(source) == bytes(target))
    ok(cu.cuMemFree(first))
    ok(cu.cuMemFree(second))


def launches():
    image = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n\0"
    module = ok(cu.cuModuleLoadData(image))
    kernel = ok(cu.cuModuleGetFunction(module, b"nothing"))
    stream = ok(cu.cuStreamCreate(0))
    before, after = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
    ok(cu.cuEventRecord(before, stream))
    for _ in range(100):
        ok(cu.cuLaunchKernel(kernel, 8, 1, 1, 128, 1, 1, 0, stream, 0, 0))
    ok(cu.cuEventRecord(after, stream))
    ok(cu.cuEventSynchronize(after))
    same("a finished event", cu.cuEventQuery(after)[0], cu.CUresult.CUDA_SUCCESS)
    holds("the kernels took time", ok(cu.cuEventElapsedTime(before, after)) > 0)
    ok(cu.cuLaunchCooperativeKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0))
    config = cu.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.hStream = stream
    ok(cu.cuLaunchKernelEx(config, kernel, 0, 0))
    ok(cu.cuStreamSynchronize(stream))
    graph = ok(cu.cuGraphCreate(0))
    node = cu.CUDA_KERNEL_NODE_PARAMS()
    node.func = kernel
    node.gridDimX = node.gridDimY = node.gridDimZ = 1
    node.blockDimX, node.blockDimY, node.blockDimZ = 32, 1, 1
    ok(cu.cuGraphAddKernelNode(graph, None, 0, node))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuEventDestroy(before))
    ok(cu.cuEventDestroy(after))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuModuleUnload(module))


def attributes():
    kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    managed, plain = ok(cu.cuMemAllocManaged(MIB, 1)), ok(cu.cuMemAlloc(MIB))
    pinned = ok(cu.cuMemHostAlloc(MIB, 0))
    for pointer, expected in ((managed, True), (plain, False), (pinned, False)):
        same("whether it is managed", bool(ok(cu.cuPointerGetAttribute(kind, pointer))), expected)
    ok(cu.cuStreamDestroy(ok(cu.cuStreamCreateWithPriority(1, -2))))
    same("a wrong free", cu.cuMemFree(0x1000)[0], cu.CUresult.CUDA_ERROR_INVALID_VALUE)
    ok(cu.cuMemFreeHost(pinned))
    ok(cu.cuMemFree(plain))
    ok(cu.cuMemFree(managed))


def green_contexts(device):
    """Two partitions, memory and work in each: what they cost is the memory alone."""
    free = ok(cu.cuMemGetInfo())[0]
    primary = ok(cu.cuCtxGetCurrent())
    sm = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = ok(cu.cuDeviceGetDevResource(device, sm))
    parts, count, rest = ok(cu.cuDevSmResourceSplitByCount(2, whole, 0, 16))
    same("partitions", (count, rest.sm.smCount), (2, whole.sm.smCount - 32))
    for part in parts:
        green = ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc([part], 1)), device, 1))
        ok(cu.cuCtxSetCurrent(ok(cu.cuCtxFromGreenCtx(green))))
        stream = ok(cu.cuGreenCtxStreamCreate(green, 1, 0))
        pointer = ok(cu.cuMemAlloc(MIB))
        ok(cu.cuMemsetD8Async(pointer, 1, MIB, stream))
        ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuMemFree(pointer))
        same("free memory in a green context", ok(cu.cuMemGetInfo())[0], free)
        ok(cu.cuStreamDestroy(stream))
        ok(cu.cuCtxSetCurrent(primary))
        ok(cu.cuGreenCtxDestroy(green))
    same("free memory after green contexts", ok(cu.cuMemGetInfo())[0], free)


def main():
    ok(cu.cuInit(0))
    devices()
    device = ok(cu.cuDeviceGet(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
    memory_to_the_limit(device)
    every_kind_of_memory(device)
    copies()
    launches()
    attributes()
    green_contexts(device)
    ok(cu.cuCtxSynchronize())
    ok(cu.cuDevicePrimaryCtxRelease(device))
    print("done")


main()
