"""nvidia-ml-py as a tenant: devices, one view of memory with the driver, processes, events."""

import ctypes
import os
import subprocess

import pynvml
from view import LIMIT, MIB, UUIDS, driver, holds, same


def devices():
    same("device count", pynvml.nvmlDeviceGetCount(), len(UUIDS))
    for index, uuid in enumerate(UUIDS):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        same("UUID", pynvml.nvmlDeviceGetUUID(handle), uuid)
        again = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        same("index by UUID", pynvml.nvmlDeviceGetIndex(again), index)
        holds("a name", pynvml.nvmlDeviceGetName(handle))
        holds("a PCI bus id", pynvml.nvmlDeviceGetPciInfo(handle).busId)


def memory(cuda):
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    same("cuMemGetInfo", cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), 0)
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    holds("the allocation counts as used", first.used >= 100 * MIB)
    same("NVML's versions agree on the total", first.total, second.total)
    same("NVML's versions agree on what is free", first.free, second.free)
    if LIMIT is not None:
        same("total", first.total, LIMIT)
        same("NVML's total and the driver's", first.total, total.value)
        same("NVML's free and the driver's", first.free, free.value)
        same("used and free make the total", first.used + first.free, first.total)


def processes():
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    holds(f"this process is among {pids}", os.getpid() in pids)


def events():
    events = pynvml.nvmlEventSetCreate()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    try:
        pynvml.nvmlEventSetWait_v2(events, 1)
        holds("a healthy GPU reports nothing", False)
    except pynvml.NVMLError_Timeout:
        pass
    # A fault of that GPU arrives; one of the other does not.
    for gpu, xid in ((1, 79), (0, 48)):
        subprocess.run([os.environ["TEST_SIMGPU_CTL"], "xid", str(gpu), str(xid)], check=True)
    event = pynvml.nvmlEventSetWait_v2(events, 5000)
    same("XID", event.eventData, 48)
    same("event type", event.eventType, pynvml.nvmlEventTypeXidCriticalError)
    same("the event's GPU", pynvml.nvmlDeviceGetUUID(event.device), UUIDS[0])
    pynvml.nvmlEventSetFree(events)


def main():
    pynvml.nvmlInit()
    holds("a driver version", pynvml.nvmlSystemGetDriverVersion())
    devices()
    memory(driver())
    processes()
    events()
    pynvml.nvmlShutdown()
    print("done")


main()
