"""nvidia-ml-py and cuda-bindings on a GPU in MIG mode: its instances, one of which CUDA sees."""

import os
import uuid

import pynvml
from cuda.bindings import driver as cu
from view import LIMIT, MIB, UUIDS, holds, same

PARENT = os.environ["TEST_PARENT"]


def ok(answer):
    """The value of a call that must succeed."""
    error, *values = answer
    same("result", error, cu.CUresult.CUDA_SUCCESS)
    return values[0] if len(values) == 1 else tuple(values)


def instances():
    """The instances as clients find them: all indexes there could be, gaps left out."""
    parent = pynvml.nvmlDeviceGetHandleByIndex(0)
    same("MIG mode", pynvml.nvmlDeviceGetMigMode(parent), [pynvml.NVML_DEVICE_MIG_ENABLE] * 2)
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index))
        except pynvml.NVMLError_NotFound:
            continue
    same("instances", [pynvml.nvmlDeviceGetUUID(mig) for mig in found], UUIDS)
    for mig in found:
        holds("an instance", pynvml.nvmlDeviceIsMigDeviceHandle(mig))
        above = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        same("its GPU", pynvml.nvmlDeviceGetUUID(above), PARENT)
        holds("its name", " MIG " in pynvml.nvmlDeviceGetName(mig))
        attributes = pynvml.nvmlDeviceGetAttributes(mig)
        holds("its multiprocessors", attributes.multiprocessorCount > 0)
        try:
            pynvml.nvmlDeviceGetUtilizationRates(mig)
            holds("no utilisation", False)
        except pynvml.NVMLError_NotSupported:
            pass
    same("GPU instances", [pynvml.nvmlDeviceGetGpuInstanceId(mig) for mig in found], [1, 2])
    return found


def device():
    """The one that CUDA sees."""
    ok(cu.cuInit(0))
    same("device count", ok(cu.cuDeviceGetCount()), 1)
    device = ok(cu.cuDeviceGet(0))
    seen = "MIG-" + str(uuid.UUID(bytes=bytes(ok(cu.cuDeviceGetUuid(device)).bytes)))
    same("UUID", seen, UUIDS[1])
    holds("its name", b" MIG 2g.4gb" in ok(cu.cuDeviceGetName(64, device)))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
    total = ok(cu.cuDeviceTotalMem(device))
    same("total memory", total, 4096 * MIB if LIMIT is None else LIMIT)
    return total


def memory(found, total):
    pointer = ok(cu.cuMemAlloc(100 * MIB))
    mine = pynvml.nvmlDeviceGetMemoryInfo(found[1])
    same("NVML's total and the driver's", mine.total, total)
    same("NVML's free and the driver's", mine.free, ok(cu.cuMemGetInfo())[0])
    holds("the allocation counts as used", mine.used >= 100 * MIB)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(found[1])
    holds(f"this process is among {processes}", os.getpid() in [p.pid for p in processes])
    same("its GPU instance", processes[0].gpuInstanceId, 2)
    same("nobody on the other", pynvml.nvmlDeviceGetComputeRunningProcesses(found[0]), [])
    error, _ = cu.cuMemAlloc(total)
    same("more than there is", error, cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    ok(cu.cuMemFree(pointer))


def main():
    pynvml.nvmlInit()
    found = instances()
    memory(found, device())
    pynvml.nvmlShutdown()
    print("done")


main()
