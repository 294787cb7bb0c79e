"""The driver API by ctypes (cuda.h 12.9): what the probes need of it, and no more.

Every function is looked up with dlsym on the library's handle, as PyTorch does.
"""

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_FOUND, NOT_SUPPORTED = 0, 1, 2, 500, 801
RESERVED_MEM_CURRENT, USED_MEM_CURRENT = 5, 7  # CU_MEMPOOL_ATTR_…
GRAPH_RESERVED_MEM_CURRENT = 2  # CU_GRAPH_MEM_ATTR_…
DEFERRED_MAPPING = 0x80  # CUDA_ARRAY3D_DEFERRED_MAPPING
LAYERED = 0x01  # CUDA_ARRAY3D_LAYERED
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 0, 1, 2


class CudaError(Exception):
    """A call that did not return CUDA_SUCCESS."""

    def __init__(self, call, code):
        super().__init__(f"{call} returned {code}")
        self.code = code


class Missing(Exception):
    """The driver lacks a function."""


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", Location), ("flags", c_int)]


class ArrayDescriptor(ctypes.Structure):
    """`CUDA_ARRAY3D_DESCRIPTOR`."""

    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class ArrayRequirements(ctypes.Structure):
    """`CUDA_ARRAY_MEMORY_REQUIREMENTS`."""

    _fields_ = [("size", c_size_t), ("alignment", c_size_t), ("reserved", c_uint * 4)]


class PoolProps(ctypes.Structure):
    """`CUmemPoolProps`."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("max_size", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class AllocNodeParams(ctypes.Structure):
    """`CUDA_MEM_ALLOC_NODE_PARAMS`."""

    _fields_ = [
        ("props", PoolProps),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("address", c_ulonglong),
    ]


class Cuda:
    """A device with its primary context current."""

    def __init__(self, ordinal=0):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", c_uint(0))
        self.device = c_int()
        self.call("cuDeviceGet", byref(self.device), c_int(ordinal))
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def code(self, name, *args):
        """A call's result."""
        try:
            function = getattr(self.lib, name)
        except AttributeError:
            raise Missing(f"the driver has no {name}") from None
        return function(*args)

    def call(self, name, *args):
        """A call that must succeed."""
        code = self.code(name, *args)
        if code in (NOT_FOUND, NOT_SUPPORTED):
            raise Missing(f"the driver has no {name} ({code})")
        if code:
            raise CudaError(name, code)

    def total(self):
        """`cuDeviceTotalMem`."""
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(total), self.device)
        return total.value

    def info(self):
        """`cuMemGetInfo`: free and total bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def free_bytes(self):
        """Of `cuMemGetInfo`."""
        return self.info()[0]

    def alloc(self, size):
        """`cuMemAlloc`: an address."""
        address = c_ulonglong()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address):
        """`cuMemFree`."""
        self.call("cuMemFree_v2", c_ulonglong(address))

    def stream(self):
        """A stream that does not wait for the default one."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), c_uint(1))
        return stream

    def synchronise(self, stream=None):
        """`cuStreamSynchronize`."""
        self.call("cuStreamSynchronize", stream)

    def default_pool(self):
        """`cuDeviceGetDefaultMemPool`."""
        pool = c_void_p()
        self.call("cuDeviceGetDefaultMemPool", byref(pool), self.device)
        return pool

    def pool_attribute(self, pool, attribute=RESERVED_MEM_CURRENT):
        """One of the 64-bit attributes of a pool."""
        value = c_uint64()
        self.call("cuMemPoolGetAttribute", pool, c_int(attribute), byref(value))
        return value.value

    def alloc_async(self, size, stream=None):
        """`cuMemAllocAsync`, waited for."""
        address = c_ulonglong()
        self.call("cuMemAllocAsync", byref(address), c_size_t(size), stream)
        self.synchronise(stream)
        return address.value

    def free_async(self, address, stream=None):
        """`cuMemFreeAsync`, waited for."""
        self.call("cuMemFreeAsync", c_ulonglong(address), stream)
        self.synchronise(stream)

    def location(self):
        """This device, as a location of memory."""
        return Location(1, self.device.value)

    def prop(self, handle_types=0):
        """Pinned memory of this device."""
        return AllocationProp(1, handle_types, self.location())

    def granularity(self):
        """The minimum that `cuMemCreate` takes."""
        value, prop = c_size_t(), self.prop()
        self.call("cuMemGetAllocationGranularity", byref(value), byref(prop), c_int(0))
        return value.value

    def create(self, size, handle_types=0):
        """`cuMemCreate`: a handle."""
        handle, prop = c_ulonglong(), self.prop(handle_types)
        self.call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_ulonglong(0))
        return handle.value

    def release(self, handle):
        """`cuMemRelease`."""
        self.call("cuMemRelease", c_ulonglong(handle))

    def map(self, handle, size):
        """Reserves addresses, maps a handle there and makes it accessible."""
        address = c_ulonglong()
        zero = c_ulonglong(0)
        self.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), zero, zero)
        self.call("cuMemMap", address, c_size_t(size), c_size_t(0), c_ulonglong(handle), zero)
        access = AccessDesc(self.location(), 3)
        self.call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        return address.value

    def unmap(self, address, size):
        """Undoes `map`."""
        self.call("cuMemUnmap", c_ulonglong(address), c_size_t(size))
        self.call("cuMemAddressFree", c_ulonglong(address), c_size_t(size))

    def array(self, shape):
        """`cuArray3DCreate`."""
        array = c_void_p()
        self.call("cuArray3DCreate_v2", byref(array), byref(shape))
        return array

    def array_size(self, array):
        """What the driver says that an array with deferred mapping needs."""
        needs = ArrayRequirements()
        self.call("cuArrayGetMemoryRequirements", byref(needs), array, self.device)
        return needs.size

    def text(self, name, *args):
        """A call that fills a buffer of 64 bytes."""
        buffer = (c_char * 64)()
        self.call(name, buffer, *args)
        return bytes(buffer)
