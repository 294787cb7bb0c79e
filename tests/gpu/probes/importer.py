"""Whose bytes does NVML say that imported memory is?

A child imports what this process exported: a legacy IPC handle, then a file descriptor of
`cuMemCreate`. Then this process gives its own reference up while the child maps the memory.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p

from suite import cuda as cu
from suite.nvml import Nvml

SIZE = 64 << 20


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = [("reserved", c_char * 64)]


def child(kind, what):
    cuda = cu.Cuda()
    print("context", flush=True)
    sys.stdin.readline()
    if kind == "ipc":
        address, handle = c_ulonglong(), IpcHandle.from_buffer_copy(bytes.fromhex(what))
        cuda.call("cuIpcOpenMemHandle_v2", byref(address), handle, c_uint(1))
    else:
        handle = c_ulonglong()
        fd = c_void_p(int(what))
        cuda.call("cuMemImportFromShareableHandle", byref(handle), fd, c_int(cu.POSIX_FD))
        cuda.map(handle.value, SIZE)
    print("imported", flush=True)
    sys.stdin.readline()


def parent(kind):
    cuda, nvml = cu.Cuda(), Nvml(0)
    if kind == "ipc":
        address, handle = cuda.alloc(SIZE), IpcHandle()
        cuda.call("cuIpcGetMemHandle", byref(handle), c_ulonglong(address))
        what, fds = bytes(handle).hex(), ()
    else:
        exported, fd = cuda.create(SIZE, cu.POSIX_FD), c_int()
        cuda.call(
            "cuMemExportToShareableHandle",
            byref(fd),
            c_ulonglong(exported),
            c_int(cu.POSIX_FD),
            c_ulonglong(0),
        )
        what, fds = str(fd.value), (fd.value,)
    other = subprocess.Popen(
        [sys.executable, "-B", __file__, "child", kind, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )

    def look():
        by_pid = nvml.processes()
        return by_pid.get(os.getpid()), by_pid.get(other.pid), nvml.memory().used

    def wait_for(word):
        line = other.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the importer said {line!r}")

    wait_for("context")
    before = look()
    other.stdin.write("\n")
    other.stdin.flush()
    wait_for("imported")
    imported = look()
    if kind == "fd":
        os.close(fds[0])
        cuda.release(exported)
        time.sleep(0.05)
    given_up = look()
    other.stdin.write("\n")
    other.stdin.flush()
    other.wait()
    end = time.monotonic() + 2
    while nvml.processes().get(other.pid) is not None and time.monotonic() < end:
        time.sleep(0.005)
    after = look()
    names = ("exporter", "importer", "device")
    steps = {"before": before, "imported": imported, "given_up": given_up, "after": after}
    print(json.dumps({k: dict(zip(names, v)) for k, v in steps.items()}))


try:
    if sys.argv[1] == "child":
        child(*sys.argv[2:])
    else:
        parent(sys.argv[1])
except cu.Missing as missing:
    print(json.dumps({"skip": str(missing)}))
