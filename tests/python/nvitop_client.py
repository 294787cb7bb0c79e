"""nvitop as a tenant: its devices, their memory and processes, and the one-time view that it prints."""

import ctypes
import os
import subprocess
import sys

import nvitop
from view import LIMIT, MIB, UUIDS, driver, holds, same


def main():
    cuda = driver()
    devices = nvitop.Device.all()
    same("UUIDs", [device.uuid() for device in devices], UUIDS)
    for device in devices:
        holds("a whole snapshot", device.as_snapshot().name)
        same("the driver model, which is Windows'", device.driver_model(), nvitop.NA)
    first = devices[0]
    holds("the allocation counts as used", first.memory_used() >= 100 * MIB)
    if LIMIT is not None:
        same("total", first.memory_total(), LIMIT)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        same("cuMemGetInfo", cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), 0)
        same("what is free", first.memory_free(), free.value)
    holds(f"this process is among {first.processes()}", os.getpid() in first.processes())
    command = [sys.executable, "-m", "nvitop", "--once", "--no-unicode"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    holds(f"the table names each GPU: {shown}", shown.count("MiB") >= len(UUIDS))
    print("done")


main()
