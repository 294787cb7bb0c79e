"""What both clients need: the expected view of the machine, and checks that say what they saw.

TEST_LIMIT is the quota in bytes, absent on the bare driver. TEST_UUIDS are the machine's GPUs.
"""

import ctypes
import os
import sys

LIMIT = int(os.environ["TEST_LIMIT"]) if "TEST_LIMIT" in os.environ else None
UUIDS = os.environ["TEST_UUIDS"].split(",")
MIB = 1 << 20


def same(what, seen, expected):
    """Ends the test unless the two are equal."""
    if seen != expected:
        sys.exit(f"{what}: {seen!r}, expected {expected!r}")


def holds(what, condition):
    """Ends the test unless the condition holds."""
    if not condition:
        sys.exit(f"{what} does not hold")


def driver():
    """libcuda with a context on GPU 0 and 100 MiB allocated there."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    same("cuInit", cuda.cuInit(0), 0)
    same("retain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), 0)
    same("current", cuda.cuCtxSetCurrent(context), 0)
    same("allocation", cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(100 * MIB)), 0)
    return cuda
