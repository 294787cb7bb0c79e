"""NVML by ctypes (nvml.h 12.9), as pynvml is not everywhere."""

import ctypes


class Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    """`nvmlMemory_v2_t`."""

    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_t` as `nvmlDeviceGetComputeRunningProcesses_v3` fills it."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


# What NVML says where the driver does not tell (nvml.h, NVML_VALUE_NOT_AVAILABLE).
NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
INSUFFICIENT_SIZE = 7


class NvmlError(Exception):
    """A call that did not return NVML_SUCCESS."""


class Nvml:
    """One device of NVML's."""

    def __init__(self, index=0, library="libnvidia-ml.so.1"):
        try:
            self.lib = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"no NVML: {error}") from None
        self.call("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self.device))

    def call(self, name, *args):
        """Calls, and raises what is not success."""
        function = getattr(self.lib, name, None)
        if function is None:
            raise NvmlError(f"no {name}")
        code = function(*args)
        if code:
            raise NvmlError(f"{name} returned {code}")

    def _text(self, name, *args):
        buffer = ctypes.create_string_buffer(96)
        self.call(name, *args, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    def name(self):
        """The product."""
        return self._text("nvmlDeviceGetName", self.device)

    def uuid(self):
        """GPU-…"""
        return self._text("nvmlDeviceGetUUID", self.device)

    def driver(self):
        """The driver's version."""
        return self._text("nvmlSystemGetDriverVersion")

    def memory(self):
        """`nvmlDeviceGetMemoryInfo`."""
        memory = Memory()
        self.call("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(memory))
        return memory

    def memory_v2(self):
        """`nvmlDeviceGetMemoryInfo_v2`."""
        memory = MemoryV2(version=ctypes.sizeof(MemoryV2) | 2 << 24)
        self.call("nvmlDeviceGetMemoryInfo_v2", self.device, ctypes.byref(memory))
        return memory

    def _number(self, name, *args):
        """One number, only read; None where the driver does not say."""
        value = ctypes.c_uint()
        try:
            self.call(name, self.device, *args, ctypes.byref(value))
        except NvmlError:
            return None
        return value.value

    def compute_mode(self):
        """0 default, 2 prohibited, 3 one process."""
        return self._number("nvmlDeviceGetComputeMode")

    def sm_clock(self):
        """MHz."""
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_int(1))

    def processes(self):
        """{pid: bytes or None} of all processes with a compute context."""
        count = ctypes.c_uint(0)
        call = getattr(self.lib, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None:
            raise NvmlError("no nvmlDeviceGetComputeRunningProcesses_v3")
        while True:
            room = count.value + 16
            infos, count = (ProcessInfo * room)(), ctypes.c_uint(room)
            code = call(self.device, ctypes.byref(count), infos)
            if code == INSUFFICIENT_SIZE:
                continue
            if code:
                raise NvmlError(f"nvmlDeviceGetComputeRunningProcesses_v3 returned {code}")
            found = {i.pid: i.used for i in infos[: count.value]}
            return {pid: None if used == NOT_AVAILABLE else used for pid, used in found.items()}
