"""Measures on the bare driver what the shim assumes of it; one JSON line for each fact.

A fact is {"fact", "holds", "figures"}, or {"fact", "skip"} where the driver lacks a function.
Bytes are differences of NVML's device-wide use, so nobody else may use the GPU meanwhile. The argument is what a context
may cost, 0 for the plugin's own formula.
"""

import ctypes
import json
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

from suite import cuda as cu
from suite.nvml import Nvml
from suite.report import mib

MIB, PAGE = 1 << 20, 2 << 20
nvml = Nvml(0)


def used():
    return nvml.memory().used


def footprint(size):
    """proto and docs/internals/shim.md: pages for what is larger than half of one, else steps of 512 bytes."""
    return -(-size // PAGE) * PAGE if size > PAGE // 2 else -(-size // 512) * 512


def tell(fact, holds, figures):
    print(json.dumps({"fact": fact, "holds": bool(holds), "figures": figures}), flush=True)


def fact(name):
    """Runs the measurement; a missing function is a skip, any other failure a fact that fails."""

    def run(measure):
        try:
            measure(name)
        except cu.Missing as missing:
            print(json.dumps({"fact": name, "skip": str(missing)}), flush=True)
        except Exception as error:  # noqa: BLE001: one fact must not hide the others
            tell(name, False, f"{type(error).__name__}: {error}")

    return run


before = used()
cuda = cu.Cuda()


def constant():
    """Multiprocessors x (threads of each x 1 KiB + 1.5 MiB): `gpus.context_overhead = "auto"`."""
    def attribute(which):
        value = c_int()
        cuda.call("cuDeviceGetAttribute", byref(value), c_int(which), cuda.device)
        return value.value
    return attribute(16) * (attribute(39) * 1024 + 3 * MIB // 2)


@fact("a context costs no more than the model's constant")
def _(name):
    context_constant = int(sys.argv[1]) or constant()
    cost = used() - before
    own = nvml.processes().get(os.getpid())
    shown = "does not list this pid" if own is None else f"shows {mib(own)} for this pid"
    tell(name, cost <= context_constant, f"{mib(cost)} of {mib(context_constant)}; NVML {shown}")


@fact("NVML lists this process by the pid that it has itself")
def _(name):
    pids = sorted(nvml.processes())
    tell(name, os.getpid() in pids, f"pid {os.getpid()}, NVML: {pids}")


@fact("allocations take whole 2 MiB pages from half a page on")
def _(name):
    wrong, figures = [], []
    for size in (MIB + 512, PAGE - 4096, PAGE, PAGE + 1, 3 * MIB, 5 * MIB + 7, 33 * MIB):
        start = used()
        blocks = [cuda.alloc(size) for _ in range(16)]
        each = (used() - start) / 16
        for block in blocks:
            cuda.free(block)
        figures.append(f"{size} B takes {each / MIB:.3f} MiB")
        if each != footprint(size):
            wrong.append(size)
    tell(name, not wrong, "; ".join(figures))


@fact("small allocations lie 512 bytes apart")
def _(name):
    blocks = sorted(cuda.alloc(1) for _ in range(64))
    steps = {b - a for a, b in zip(blocks, blocks[1:])}
    for block in blocks:
        cuda.free(block)
    tell(name, min(steps) == 512 and all(b % 512 == 0 for b in blocks), f"steps {sorted(steps)}")


@fact("up to 1 MiB allocations share pages")
def _(name):
    start = used()
    blocks = [cuda.alloc(MIB) for _ in range(16)]
    each = (used() - start) / 16
    for block in blocks:
        cuda.free(block)
    tell(name, each == MIB, f"1 MiB takes {each / MIB:.3f} MiB")


@fact("freeing gives everything back to the device at once")
def _(name):
    start = used()
    cuda.free(cuda.alloc(256 * MIB))
    tell(name, used() == start, f"{used() - start} bytes remain")


@fact("a pool reserves in chunks of 32 MiB")
def _(name):
    pool = cuda.default_pool()
    start, reserved = used(), cuda.pool_attribute(pool)
    small = cuda.alloc_async(1)
    first, device = cuda.pool_attribute(pool) - reserved, used() - start
    large = cuda.alloc_async(first + 1)
    second = cuda.pool_attribute(pool) - reserved - first
    cuda.free_async(large)
    cuda.free_async(small)
    after = cuda.pool_attribute(pool)
    figures = f"1 B reserves {mib(first)} (device {mib(device)}), {first + 1} B {mib(second)} more, {mib(after)} after free and synchronise"
    tell(name, first == device == 32 * MIB and second == 64 * MIB and after == 0, figures)


@fact("a graph's memory is reserved at launch, and given back by the trim")
def _(name):
    def reserved():
        value = ctypes.c_uint64()
        attribute = c_int(cu.GRAPH_RESERVED_MEM_CURRENT)
        cuda.call("cuDeviceGetGraphMemAttribute", cuda.device, attribute, byref(value))
        return value.value

    graph, node, exec_ = c_void_p(), c_void_p(), c_void_p()
    cuda.call("cuGraphCreate", byref(graph), c_uint(0))
    params = cu.AllocNodeParams(cu.PoolProps(1, 0, cuda.location()), None, 0, 5 * MIB, 0)
    cuda.call("cuGraphAddMemAllocNode", byref(node), graph, None, c_size_t(0), byref(params))
    cuda.call("cuGraphInstantiateWithFlags", byref(exec_), graph, c_ulonglong(0))
    start, idle = used(), reserved()
    stream = cuda.stream()
    cuda.call("cuGraphLaunch", exec_, stream)
    cuda.synchronise(stream)
    launched, device = reserved(), used() - start
    cuda.free_async(params.address, stream)
    kept = reserved()
    cuda.call("cuGraphExecDestroy", exec_)
    cuda.call("cuGraphDestroy", graph)
    cuda.call("cuDeviceGraphMemTrim", cuda.device)
    figures = f"5 MiB: {mib(idle)} before, {mib(launched)} launched (device {mib(device)}), {mib(kept)} freed, {mib(reserved())} trimmed"
    tell(name, idle == 0 and launched == device > 0 and reserved() == 0, figures)


@fact("a capture survives being asked for RESERVED attributes")
def _(name):
    pool, figures, holds = cuda.default_pool(), [], True
    value = ctypes.c_uint64()
    free, total = c_size_t(), c_size_t()
    asks = {
        "pool RESERVED": lambda: cuda.code(
            "cuMemPoolGetAttribute", pool, c_int(cu.RESERVED_MEM_CURRENT), byref(value)
        ),
        "graph RESERVED": lambda: cuda.code(
            "cuDeviceGetGraphMemAttribute",
            cuda.device,
            c_int(cu.GRAPH_RESERVED_MEM_CURRENT),
            byref(value),
        ),
        "cuMemGetInfo": lambda: cuda.code("cuMemGetInfo_v2", byref(free), byref(total)),
        "cuMemPoolTrimTo": lambda: cuda.code("cuMemPoolTrimTo", pool, c_size_t(0)),
    }
    for mode in ("GLOBAL", "RELAXED"):
        for what, ask in asks.items():
            stream, graph = cuda.stream(), c_void_p()
            cuda.call("cuStreamBeginCapture_v2", stream, c_int(cu.CAPTURE_GLOBAL))
            exchange = c_int(cu.CAPTURE_RELAXED if mode == "RELAXED" else cu.CAPTURE_GLOBAL)
            cuda.call("cuThreadExchangeStreamCaptureMode", byref(exchange))
            answer = ask()
            cuda.call("cuThreadExchangeStreamCaptureMode", byref(exchange))
            end = cuda.code("cuStreamEndCapture", stream, byref(graph))
            figures.append(f"{what} in {mode}: {answer}, capture ends with {end}")
            # In GLOBAL it may be refused, and end the capture: the shim sets RELAXED for it.
            if mode == "RELAXED":
                holds &= answer == 0 and end == 0
    tell(name, holds, "; ".join(figures))


@fact("an array takes what a deferred one of its shape says it needs")
def _(name):
    wrong, figures = [], []
    shapes = {
        "2D 1024x1024 4xf32": (1024, 1024, 0, 0x20, 4, 0),
        "2D 1000x1000 1xu8": (1000, 1000, 0, 0x01, 1, 0),
        "2D 4096x4096 1xf32": (4096, 4096, 0, 0x20, 1, 0),
        "1D 65536 1xf32": (65536, 0, 0, 0x20, 1, 0),
        "3D 128x128x128 1xf32": (128, 128, 128, 0x20, 1, 0),
        "layered 512x512x6 4xf16": (512, 512, 6, 0x10, 4, cu.LAYERED),
    }
    for what, shape in shapes.items():
        deferred = cuda.array(cu.ArrayDescriptor(*shape[:5], shape[5] | cu.DEFERRED_MAPPING))
        says = cuda.array_size(deferred)
        cuda.call("cuArrayDestroy", deferred)
        start = used()
        arrays = [cuda.array(cu.ArrayDescriptor(*shape)) for _ in range(16)]
        takes = (used() - start) / 16
        for array in arrays:
            cuda.call("cuArrayDestroy", array)
        figures.append(f"{what}: says {says}, takes {takes:.0f} ({mib(footprint(says))} charged)")
        if takes > footprint(says):
            wrong.append(what)
    tell(name, not wrong, "; ".join(figures))


@fact("virtual memory lives until unmapped and released, whichever is later")
def _(name):
    size = cuda.granularity()
    start = used()
    handle = cuda.create(32 * size)
    created = used() - start
    address = cuda.map(handle, 32 * size)
    again = c_ulonglong()
    cuda.call("cuMemRetainAllocationHandle", byref(again), c_void_p(address))
    cuda.release(again.value)
    cuda.release(handle)
    mapped = used() - start
    cuda.unmap(address, 32 * size)
    figures = f"granularity {mib(size)}: {mib(created)} created, {mib(mapped)} released but mapped, {mib(used() - start)} unmapped; retained handle {again.value:#x}, first {handle:#x}"
    holds = created == mapped == 32 * size and used() == start
    tell(name, holds and again.value == handle, figures)


@fact("lazy loading: what a module and its local memory take is known")
def _(name):
    ptx = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry spill(.param .u64 n) { .local .align 16 .b8 d[65536]; .reg .b64 %r<4>;
  .reg .b32 %v<2>; ld.param.u64 %r1, [n]; mov.u64 %r2, d; add.u64 %r3, %r2, %r1;
  mov.u32 %v1, 1; st.local.u32 [%r3], %v1; ret; }
"""
    start, module, function = used(), c_void_p(), c_void_p()
    cuda.call("cuModuleLoadData", byref(module), ptx)
    loaded = used() - start
    cuda.call("cuModuleGetFunction", byref(function), module, b"spill")
    n = c_ulonglong(0)
    params = (c_void_p * 1)(ctypes.addressof(n))
    one = c_uint(1)
    cuda.call("cuLaunchKernel", function, one, one, one, one, one, one, c_uint(0), None, params, None)
    cuda.synchronise()
    tell(name, True, f"module {mib(loaded)}, with 64 KiB of local memory launched {mib(used() - start)}")
