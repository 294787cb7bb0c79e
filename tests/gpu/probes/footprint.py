"""What the driver takes beyond what is asked for; one topic a process, one JSON line a figure.

A figure is {"case", "mib", …}, or {"case", "missing"}: why there is none. `mib` is by NVML for this process
where it shows that, else the difference of what the device has in use (`by`).
"""

import ctypes
import json
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

from suite import cuda as cu
from suite.nvml import Nvml, NvmlError

MIB = 1 << 20
STACK, PRINTF, HEAP = 0, 1, 2  # CU_LIMIT_…
MULTIPROCESSORS, THREADS_EACH = 16, 39  # CU_DEVICE_ATTRIBUTE_…
FRAME = 8192
HEADER = """.version 7.0
.target sm_70
.address_size 64
"""
PLAIN = HEADER + ".visible .entry plain() { ret; }"
DEEP = HEADER + """.visible .entry deep(.param .u64 n) { .local .align 16 .b8 d[%d]; .reg .b64 %%r<4>;
  .reg .b32 %%v<2>; ld.param.u64 %%r1, [n]; mov.u64 %%r2, d; add.u64 %%r3, %%r2, %%r1;
  mov.u32 %%v1, 1; st.local.u32 [%%r3], %%v1; ret; }""" % FRAME
MALLOC = HEADER + """.extern .func (.param .b64 got) malloc (.param .b64 size);
.visible .entry heap() { .reg .b64 %r<3>; { .param .b64 size; .param .b64 got; mov.u64 %r1, 16;
  st.param.b64 [size], %r1; call.uni (got), malloc, (size); ld.param.b64 %r2, [got]; } ret; }"""
VPRINTF = HEADER + """.extern .func (.param .b32 n) vprintf (.param .b64 format, .param .b64 args);
.global .align 1 .b8 text[2] = {46, 0};
.visible .entry print() { .reg .b64 %r<3>; .reg .b32 %v<2>; { .param .b64 format; .param .b64 args;
  .param .b32 n; mov.u64 %r1, text; cvta.global.u64 %r1, %r1; st.param.b64 [format], %r1;
  mov.u64 %r2, 0; st.param.b64 [args], %r2; call.uni (n), vprintf, (format, args);
  ld.param.b32 %v1, [n]; } ret; }"""

nvml = Nvml(0)


def tell(case, **figures):
    print(json.dumps({"case": case, **figures}), flush=True)


def processes():
    """{pid: bytes}; in some containers nobody is shown, or all by other pids."""
    try:
        return nvml.processes()
    except NvmlError:
        return {}


class Meter:
    """Differences from a beginning."""

    def __init__(self):
        self.device, self.own = nvml.memory().used, processes().get(os.getpid())

    def mib(self):
        """Since then, and by what."""
        own = processes().get(os.getpid())
        if own is not None and self.own is not None:
            return {"mib": (own - self.own) / MIB, "by": "process"}
        return {"mib": (nvml.memory().used - self.device) / MIB, "by": "device"}


def attribute(cuda, which):
    value = c_int()
    cuda.call("cuDeviceGetAttribute", byref(value), c_int(which), cuda.device)
    return value.value


def threads(cuda):
    """All that the GPU holds at once."""
    return attribute(cuda, MULTIPROCESSORS) * attribute(cuda, THREADS_EACH)


def function(cuda, ptx, name):
    module, found = c_void_p(), c_void_p()
    cuda.call("cuModuleLoadData", byref(module), ptx.encode() + b"\0")
    cuda.call("cuModuleGetFunction", byref(found), module, name)
    return found


def launch(cuda, kernel):
    n, one = ctypes.c_ulonglong(0), c_uint(1)
    params = (c_void_p * 1)(ctypes.addressof(n))
    cuda.call("cuLaunchKernel", kernel, one, one, one, one, one, one, c_uint(0), None, params, None)
    cuda.synchronise()


def limit(cuda, which):
    value = c_size_t()
    cuda.call("cuCtxGetLimit", byref(value), c_int(which))
    return value.value


def set_limit(cuda, which, size):
    cuda.call("cuCtxSetLimit", c_int(which), c_size_t(size))


def context():
    start = nvml.memory().used
    cuda = cu.Cuda()
    whole = nvml.memory().used - start
    shown = processes()
    own = shown.get(os.getpid())
    sms, each = attribute(cuda, MULTIPROCESSORS), attribute(cuda, THREADS_EACH)
    formula = sms * (each * 1024 + 1.5 * MIB) / MIB
    note = f"{sms} SMs of {each} threads"
    tell("context: SMs × (threads × 1 KiB + 1.5 MiB)", mib=formula, by="formula", note=note)
    tell("context: by the device", mib=whole / MIB, by="device", expected_mib=formula)
    if own is None:
        listed = "shows other pids" if shown else "shows no process"
        tell("context: by NVML for the process", missing=f"NVML {listed}, not {os.getpid()}")
    else:
        tell("context: by NVML for the process", mib=own / MIB, by="process", expected_mib=formula)
    meter = Meter()
    kernel = function(cuda, PLAIN, b"plain")
    tell("context: … and a module is loaded", **meter.mib())
    launch(cuda, kernel)
    tell("context: … and its kernel has run", **meter.mib())
    meter, second = Meter(), c_void_p()
    cuda.call("cuCtxCreate_v2", byref(second), c_uint(0), cuda.device)
    tell("context: a second of the process", expected_mib=formula, **meter.mib())


def stack():
    cuda = cu.Cuda()
    plain, deep = function(cuda, PLAIN, b"plain"), function(cuda, DEEP, b"deep")
    launch(cuda, plain)
    before, all_threads, meter = limit(cuda, STACK), threads(cuda), Meter()
    expected = (FRAME - before) * all_threads / MIB
    note = f"{before} B before; times {all_threads} threads"
    set_limit(cuda, STACK, FRAME)
    tell(f"stack: limit raised to {FRAME} B", expected_mib=expected, note=note, **meter.mib())
    launch(cuda, plain)
    tell("stack: … and a kernel without a frame has run", expected_mib=expected, **meter.mib())
    set_limit(cuda, STACK, before)
    tell("stack: … and lowered again", expected_mib=0.0, **meter.mib())
    launch(cuda, plain)
    tell("stack: … and a kernel has run", expected_mib=0.0, **meter.mib())
    meter = Meter()
    launch(cuda, deep)
    now = limit(cuda, STACK)
    note = f"no call asked for it; the limit says {now} B"
    tell(f"stack: a kernel with a frame of {FRAME} B has run", expected_mib=expected, note=note, **meter.mib())
    launch(cuda, plain)
    tell("stack: … and one without", expected_mib=expected, **meter.mib())
    set_limit(cuda, STACK, before)
    tell("stack: … and the limit is set to what it was", expected_mib=0.0, **meter.mib())


def buffer(which, name, size, ptx, entry):
    """A limit that is a buffer: when it is taken, and whether it comes back."""
    cuda = cu.Cuda()
    plain = function(cuda, PLAIN, b"plain")
    launch(cuda, plain)
    before, meter = limit(cuda, which), Meter()
    expected = (size - before) / MIB
    set_limit(cuda, which, size)
    note = f"{before / MIB:.1f} MiB before"
    tell(f"{name}: limit raised to {size // MIB} MiB", expected_mib=expected, note=note, **meter.mib())
    launch(cuda, plain)
    tell(f"{name}: … and a kernel that does not use it has run", expected_mib=expected, **meter.mib())
    user = function(cuda, ptx, entry)
    tell(f"{name}: … and one that uses it is loaded", expected_mib=expected, **meter.mib())
    launch(cuda, user)
    tell(f"{name}: … and has run", expected_mib=expected, **meter.mib())
    try:
        set_limit(cuda, which, before)
        tell(f"{name}: … and it is lowered again", expected_mib=0.0, **meter.mib())
    except cu.CudaError as error:
        # The heap's "may be set only before a kernel that uses malloc is launched".
        tell(f"{name}: … and it is lowered again", missing=str(error))


def pool():
    cuda = cu.Cuda()
    target = cuda.default_pool()

    def reserved():
        return cuda.pool_attribute(target)

    for size in (1, MIB, 31 * MIB, 32 * MIB, 33 * MIB, 64 * MIB, 100 * MIB, 257 * MIB):
        start, meter = reserved(), Meter()
        address = cuda.alloc_async(size)
        took = (reserved() - start) / MIB
        tell(f"pool: empty, grows for {size} B", mib=took, by="pool", note=f"device {meter.mib()['mib']:.1f} MiB")
        cuda.free_async(address)
        left = reserved()
        if left:
            tell(f"pool: keeps of {size} B after free and synchronise", mib=left / MIB, by="pool")
    blocks, steps = [], []
    for _ in range(48):
        before = reserved()
        blocks.append(cuda.alloc_async(4 * MIB))
        if reserved() != before:
            steps.append((reserved() - before) / MIB)
    note = f"{len(steps)} times, by {sorted(set(steps))} MiB"
    tell("pool: grows while 48 times 4 MiB are taken", mib=sum(steps), by="pool", expected_mib=192.0, note=note)
    for block in blocks:
        cuda.call("cuMemFreeAsync", ctypes.c_ulonglong(block), None)
    cuda.synchronise()
    tell("pool: … and keeps when all is free", mib=reserved() / MIB, by="pool", expected_mib=0.0)


def pages():
    cuda = cu.Cuda()
    launch(cuda, function(cuda, PLAIN, b"plain"))
    page = 2 * MIB
    for size in (MIB, MIB + 512, page, page + 1, 3 * MIB, 100 * MIB - 1):
        count, meter = 8, Meter()
        blocks = [cuda.alloc(size) for _ in range(count)]
        expected = -(-size // page) * page if size > MIB else size
        tell(
            f"cuMemAlloc of {size} B takes",
            expected_mib=expected / MIB,
            **{**meter.mib(), "mib": meter.mib()["mib"] / count},
        )
        for block in blocks:
            cuda.free(block)
    blocks = sorted(cuda.alloc(1) for _ in range(64))
    steps = [b - a for a, b in zip(blocks, blocks[1:])]
    note = f"least {min(steps)} B, most {max(steps)} B between two"
    tell("cuMemAlloc of 1 B lies apart", mib=min(steps) / MIB, expected_mib=512 / MIB, by="address", note=note)


TOPICS = {
    "context": context,
    "stack": stack,
    "heap": lambda: buffer(HEAP, "heap", 1 << 30, MALLOC, b"heap"),
    "printf": lambda: buffer(PRINTF, "printf", 256 * MIB, VPRINTF, b"print"),
    "pool": pool,
    "pages": pages,
}

try:
    TOPICS[sys.argv[1]]()
except (cu.CudaError, cu.Missing) as error:
    tell(f"{sys.argv[1]}: the rest", missing=str(error))
