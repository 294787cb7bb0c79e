"""Measures on the bare driver what a simulator's authors easily believe otherwise; one JSON line for each belief.

A line is {"belief", "hardware", "figures"}: whether the driver behaves as NVIDIA's hardware is known to, and by which
figures; or {"belief", "skip"}. Arguments: NAME… of those to measure, after the bytes that the larger holder takes.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

from suite import cuda as cu
from suite.machine import GPU
from suite.nvml import Nvml, NvmlError
from suite.report import mib

MIB = 1 << 20
POINTER_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
nvml = Nvml(0)
measures = {}

# The parameter is nanoseconds on the GPU's clock (PTX ISA, "%globaltimer"). `other` is never launched before it matters.
PTX = b""".version 7.0
.target sm_70
.address_size 64
""" + b"".join(b""".visible .entry %s(.param .u64 ns) {
  .reg .b64 %%r<4>; .reg .pred %%p;
  ld.param.u64 %%r1, [ns]; mov.u64 %%r2, %%globaltimer; add.u64 %%r1, %%r1, %%r2;
again: mov.u64 %%r2, %%globaltimer; setp.lt.u64 %%p, %%r2, %%r1; @%%p bra again; ret; }
""" % name for name in (b"spin_ns", b"other_ns"))


# It lets the kernel behind it begin at once (PTX ISA, "griddepcontrol").
PRIMARY = PTX.replace(b"7.0", b"7.8").replace(b"sm_70", b"sm_90").replace(
    b"ld.param.u64 %r1, [ns];", b"griddepcontrol.launch_dependents; ld.param.u64 %r1, [ns];"
)


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", c_uint),
    ]


def belief(name):
    """Names a measurement, which gives whether the hardware is as it is known, and figures."""
    def keep(measure):
        measures[name] = measure
        return measure
    return keep


def timed(call):
    """Microseconds."""
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def each(count, call):
    """The median of so many calls, in microseconds."""
    return statistics.median(timed(call) for _ in range(count))


def least(count, call):
    """The least of so many calls, in microseconds: what else the machine does only adds to it."""
    return min(timed(call) for _ in range(count))


class Spinner:
    """A context with a kernel that takes as long as it is told."""

    def __init__(self, ptx=PTX):
        self.cuda, self.module = cu.Cuda(), c_void_p()
        self.cuda.call("cuModuleLoadData", byref(self.module), ptx)
        self.spin = self.function(b"spin_ns")
        self.launch(self.spin, 1000, None)
        self.cuda.synchronise()

    def function(self, name):
        function = c_void_p()
        self.cuda.call("cuModuleGetFunction", byref(function), self.module, name)
        return function

    def launch(self, function, ns, stream):
        value = c_ulonglong(ns)
        one, params = c_uint(1), (c_void_p * 1)(ctypes.addressof(value))
        self.cuda.call("cuLaunchKernel", function, one, one, one, one, one, one, c_uint(0), stream, params, None)

    def chained(self, function, ns, stream):
        """A launch that may begin before the kernel in front of it ends."""
        value = c_ulonglong(ns)
        params = (c_void_p * 1)(ctypes.addressof(value))
        attribute = LaunchAttribute(id=6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value[0] = 1
        config = LaunchConfig((1, 1, 1), (1, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
        self.cuda.call("cuLaunchKernelEx", byref(config), function, params, None)

    def pinned(self, size):
        host = c_void_p()
        self.cuda.call("cuMemAllocHost_v2", byref(host), c_size_t(size))
        return host

    def event(self):
        event = c_void_p()
        self.cuda.call("cuEventCreate", byref(event), c_uint(0))
        return event

    def here(self, call):
        """`call`, on a thread for which the context is made current."""
        def body():
            context = c_void_p()
            self.cuda.call("cuDevicePrimaryCtxRetain", byref(context), self.cuda.device)
            self.cuda.call("cuCtxSetCurrent", context)
            call()
        thread = threading.Thread(target=body)
        thread.start()
        return thread


@belief("reserved")
def _():
    """nvidia-smi's logs: 328 MiB (A10) to 700 MiB (H200)."""
    memory = nvml.memory_v2()
    return memory.reserved > 256 * MIB, f"{mib(memory.reserved)} of {mib(memory.total)}"


@belief("lists")
def _():
    """MangoHud#2104: 4.5 ms a list, under a lock that allocations take."""
    cuda = cu.Cuda()
    used, listed = each(200, nvml.memory), each(50, nvml.processes)
    def create():
        cuda.release(cuda.create(2 * MIB))
    alone = each(100, create)
    reader = subprocess.Popen([sys.executable, "-B", __file__, "reader"], stdout=subprocess.PIPE, text=True)
    reader.stdout.readline()
    took, end = [], time.monotonic() + 0.3
    while time.monotonic() < end:
        took.append(timed(create))
    reader.kill()
    reader.wait()
    waited = 100 * sum(us for us in took if us > 1000) / sum(took)
    figures = f"memory {used:.0f} us, list {listed:.0f} us; create and release {alone:.0f} us, beside a reader of lists {waited:.0f} % of the time in calls of more than 1 ms"
    return listed > 500 and waited > 10, figures


@belief("handles")
def _():
    """RM walks all memory objects of each process for a list (open-gpu-kernel-modules, `_gpuCollectMemInfo`)."""
    cuda = cu.Cuda()
    size = cuda.granularity()
    count = min(20_000, nvml.memory().free * 7 // 10 // size)
    few = least(50, nvml.processes)
    begun = time.perf_counter()
    handles = [cuda.create(size) for _ in range(count)]
    created = time.perf_counter() - begun
    many = least(50, nvml.processes)
    begun = time.perf_counter()
    for handle in handles:
        cuda.release(handle)
    released = time.perf_counter() - begun
    # Other handles, of which programs have as many: whether they take memory of the device.
    def taken(what, number, make):
        idle, begun = nvml.memory().used, time.perf_counter()
        kept = [make() for _ in range(number)]
        us = (time.perf_counter() - begun) / len(kept) * 1e6
        return f"{number} {what} {us:.1f} us each and {mib(nvml.memory().used - idle)}"
    def event():
        made = c_void_p()
        cuda.call("cuEventCreate", byref(made), c_uint(2))
        return made
    others = f"{taken('streams', 1000, cuda.stream)}; {taken('events', 20_000, event)}"
    figures = f"{count} by cuMemCreate, {created / count * 1e6:.1f} us each and {released / count * 1e6:.1f} us to release: a list {few:.0f} us before, {many:.0f} us with them; {others}"
    return many > few + 100, figures


@belief("pinning")
def _():
    """TensorRT-LLM#17429, vllm#51080: pinning host memory, 0.1 to 1 s a GB, keeps everybody's questions for memory waiting."""
    on, size, took = Spinner(), 1 << 30, []
    idle = max(timed(nvml.memory) for _ in range(50))
    pin = on.here(lambda: took.append(timed(lambda: on.pinned(size))))
    worst = 0.0
    while pin.is_alive():
        worst = max(worst, timed(nvml.memory))
    return took[0] > 30_000 and worst > took[0] / 2, f"{mib(size)} pinned in {took[0] / 1e3:.0f} ms, NVML's memory meanwhile at most {worst / 1e3:.1f} ms, idle {idle / 1e3:.2f} ms"


@belief("managed")
def _():
    """pynvml#63: resident managed memory is in the device's figure and in nobody's."""
    cuda, size, address = cu.Cuda(), 256 * MIB, c_ulonglong()
    own = lambda: nvml.processes().get(os.getpid()) or 0
    device, mine = nvml.memory().used, own()
    cuda.call("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))
    cuda.call("cuMemsetD8_v2", address, ctypes.c_ubyte(1), c_size_t(size))
    cuda.synchronise()
    device, mine = nvml.memory().used - device, own() - mine
    cuda.free(address.value)
    return device >= size and mine < size // 2, f"{mib(size)}: device {mib(device)}, process {mib(mine)} more"


@belief("imports")
def _():
    """RM keeps a sum of duplicates: an importer may be shown what it imported, too."""
    grown = []
    for kind in ("ipc", "fd"):
        out = subprocess.run(
            [sys.executable, "-B", str(GPU / "probes/importer.py"), kind], capture_output=True, text=True, check=True
        )
        steps = json.loads(out.stdout.splitlines()[-1])
        if "skip" not in steps:
            by = {step: steps[step]["importer"] or 0 for step in ("before", "imported")}
            grown.append((kind, by["imported"] - by["before"]))
    if not grown:
        raise cu.Missing("nothing can be imported")
    return any(more > 0 for _, more in grown), "; ".join(f"by {kind} the importer is shown {mib(more)} more" for kind, more in grown)


@belief("teardown")
def _():
    """sglang#32829: 0.4 to 26 s for a killed process's memory, by its size."""
    def after(size):
        idle = nvml.memory().used
        child = subprocess.Popen(
            [sys.executable, "-B", str(GPU / "probes/hold.py"), str(size)], stdout=subprocess.PIPE, text=True
        )
        if child.stdout.readline().strip() != "holding":
            raise RuntimeError("the holder did not start")
        child.kill()
        child.wait()
        ended = time.monotonic()
        while nvml.memory().used > idle and time.monotonic() < ended + 40:
            time.sleep(0.0005)
        return (time.monotonic() - ended) * 1e3
    small, large = min(after(256 * MIB) for _ in range(3)), after(LARGE)
    return large > 2 * small, f"{mib(256 * MIB)} {small:.0f} ms, {mib(LARGE)} {large:.0f} ms after the end"


@belief("lock")
def _():
    """cmssw#37323, torchcomms#2334: a kernel's first launch is loaded under the context's lock, after the GPU's work."""
    on = Spinner()
    stream, second, event = on.cuda.stream(), on.cuda.stream(), on.event()
    other, events = on.function(b"other_ns"), [on.event() for _ in range(100)]
    on.cuda.call("cuEventRecord", event, second)
    on.cuda.synchronise(second)
    query = lambda: on.cuda.code("cuEventQuery", event)
    # Before the lock is taken, which an allocation needs, too.
    idle, free = each(200, query), on.cuda.alloc(2 * MIB)
    on.launch(on.spin, 200_000_000, stream)
    loader = on.here(lambda: on.launch(other, 1000, second))
    worst, record = 0.0, 0.0
    # Each is recorded once: one that is in use might be waited for.
    for fresh in events:
        worst = max(worst, timed(query))
        record = max(record, timed(lambda: on.cuda.code("cuEventRecord", fresh, stream)))
        time.sleep(0.001)
    freed = timed(lambda: on.cuda.free(free))
    loader.join()
    on.cuda.synchronise(stream)
    figures = f"query {idle:.1f} us idle, at most {worst / 1e3:.1f} ms beside a first launch; record {record / 1e3:.1f} ms; free {freed / 1e3:.1f} ms"
    return worst > 20_000 or record > 20_000, figures


@belief("creations")
def _():
    """yaksa#228: creating a stream waits; here for a kernel's first launch, which waits for the GPU's work."""
    on = Spinner()
    stream, second, other = on.cuda.stream(), on.cuda.stream(), on.function(b"other_ns")
    idle = timed(on.cuda.stream)
    on.launch(on.spin, 100_000_000, stream)
    beside = timed(on.cuda.stream)
    loader, took = on.here(lambda: on.launch(other, 1000, second)), 0.0
    while loader.is_alive():
        time.sleep(0.005)
        took = max(took, timed(on.cuda.stream))
    on.cuda.synchronise(stream)
    return took > 20_000, f"{idle:.0f} us idle, {beside / 1e3:.1f} ms beside a kernel of 100 ms, {took / 1e3:.1f} ms beside a first launch"


@belief("host")
def _():
    """nccl#48, cutorch#618: giving pinned memory back waits for the context's work."""
    on = Spinner()
    stream, host = on.cuda.stream(), on.pinned(1 << 20)
    on.launch(on.spin, 100_000_000, stream)
    took = timed(lambda: on.cuda.call("cuMemFreeHost", host))
    on.cuda.synchronise(stream)
    return took > 50_000, f"cuMemFreeHost behind 100 ms of another's work: {took / 1e3:.1f} ms"


@belief("queue")
def _():
    """A launch into a full queue keeps the context's lock while it waits for room."""
    on = Spinner()
    stream, second, event = on.cuda.stream(), on.cuda.stream(), on.event()
    on.cuda.call("cuEventRecord", event, second)
    on.cuda.synchronise(second)
    # Long enough that no stall of a busy machine is taken for it.
    on.launch(on.spin, 300_000_000, stream)
    def fill():
        for _ in range(2500):
            on.launch(on.spin, 1000, stream)
    filler, worst = on.here(fill), 0.0
    begun = time.monotonic()
    while filler.is_alive():
        worst = max(worst, timed(lambda: on.cuda.code("cuEventQuery", event)))
    longest = time.monotonic() - begun
    on.cuda.synchronise(stream)
    return worst > 120_000, f"2500 launches behind 300 ms took {longest * 1e3:.0f} ms, a query meanwhile at most {worst / 1e3:.1f} ms"


@belief("records")
def _():
    """pixeltrack-standalone#218: records of many threads wait for each other: 0.45 us alone."""
    on, figures = Spinner(), {}
    for threads in (1, 4, 16):
        took, lock = [], threading.Lock()
        def body():
            stream, event = on.cuda.stream(), on.event()
            mine = [timed(lambda: on.cuda.call("cuEventRecord", event, stream)) for _ in range(300)]
            with lock:
                took.extend(mine)
        running = [on.here(body) for _ in range(threads)]
        for thread in running:
            thread.join()
        figures[threads] = statistics.median(took)
    # This interpreter runs one thread at a time but in the calls themselves.
    return None, ", ".join(f"{n} threads {us:.2f} us" for n, us in figures.items())


@belief("pointers")
def _():
    """vllm#48434: half a microsecond for each question about a pointer."""
    cuda, value = cu.Cuda(), c_int()
    address, place = c_ulonglong(cuda.alloc(2 * MIB)), byref(value)
    memory_type, sm_count = c_int(POINTER_MEMORY_TYPE), c_int(16)
    ask = lambda: cuda.lib.cuPointerGetAttribute(place, memory_type, address)
    nothing = lambda: cuda.lib.cuDeviceGetAttribute(place, sm_count, cuda.device)
    both = [(timed(ask), timed(nothing)) for _ in range(4000)]
    more = statistics.median(a for a, _ in both) - statistics.median(n for _, n in both)
    return more > 0.15, f"{more * 1e3:.0f} ns more than cuDeviceGetAttribute"


@belief("legacy")
def _():
    """CUDA Runtime API, "Stream synchronization behavior": the legacy stream is a barrier for blocking streams."""
    on = Spinner()
    streams = [c_void_p(), c_void_p()]
    for stream in streams:
        on.cuda.call("cuStreamCreate", byref(stream), c_uint(0))
    event = on.event()
    on.launch(on.spin, 200_000_000, streams[0])
    on.cuda.call("cuEventRecord", event, None)
    on.launch(on.spin, 1000, streams[1])
    waited = timed(lambda: on.cuda.synchronise(streams[1]))
    on.cuda.synchronise()
    return waited > 150_000, f"a short kernel behind a legacy event behind 200 ms: {waited / 1e3:.0f} ms"


@belief("queues")
def _():
    """A stream's copy does not wait for another stream's kernel (CUDA Programming Guide, "Asynchronous Concurrent Execution")."""
    on = Spinner()
    host = on.pinned(4096)
    first, second, device = on.cuda.stream(), on.cuda.stream(), c_ulonglong(on.cuda.alloc(4096))
    def beside():
        on.launch(on.spin, 100_000_000, first)
        on.cuda.call("cuMemcpyHtoDAsync_v2", device, host, c_size_t(4096), second)
        took = timed(lambda: on.cuda.synchronise(second))
        on.cuda.synchronise(first)
        return took
    took = min(beside() for _ in range(3))
    return took < 50_000, f"4 KiB behind another stream's 100 ms: {took / 1e3:.1f} ms"


@belief("kernels")
def _():
    """Kernels of several streams run at once (CUDA Programming Guide, "Concurrent Kernel Execution")."""
    on = Spinner()
    streams = [on.cuda.stream() for _ in range(4)]
    def together():
        for stream in streams:
            on.launch(on.spin, 20_000_000, stream)
        for stream in streams:
            on.cuda.synchronise(stream)
    took = least(3, together)
    return took < 60_000, f"four kernels of 20 ms in four streams: {took / 1e3:.0f} ms"


@belief("chained")
def _():
    """A kernel may begin with the one before it unless something is between (CUDA Programming Guide, "Programmatic Dependent Launch")."""
    cuda, major = cu.Cuda(), c_int()
    cuda.call("cuDeviceGetAttribute", byref(major), c_int(75), cuda.device)
    if major.value < 9:
        raise cu.Missing("compute capability 9.0 has it first")
    on, took = Spinner(PRIMARY), {}
    stream, event, host = on.cuda.stream(), on.event(), on.pinned(4096)
    word = c_ulonglong()
    on.cuda.call("cuMemHostGetDevicePointer_v2", byref(word), host, c_uint(0))
    between = {
        "nothing": lambda: None,
        "an event": lambda: on.cuda.call("cuEventRecord", event, stream),
        "a word written": lambda: on.cuda.call("cuStreamWriteValue32_v2", stream, word, c_uint(1), c_uint(0)),
    }
    for what, call in between.items():
        def pair():
            on.launch(on.spin, 40_000_000, stream)
            call()
            on.chained(on.spin, 40_000_000, stream)
            on.cuda.synchronise(stream)
        # Held, a stream's first pair has a marker between: nobody has said yet that there will be pairs. Under a cap
        # some wait in the middle for their turn.
        pair()
        took[what] = least(10, pair) / 1e3
    figures = "; ".join(f"with {what} between {ms:.0f} ms" for what, ms in took.items())
    return took["nothing"] < 65 and took["an event"] > 75, f"two kernels of 40 ms, {figures}"


@belief("foreign")
def _():
    """Another process's small copies take their turns from a backlog, because time slices are the context's."""
    on, rates = Spinner(), {}
    host, device = on.pinned(4096), c_ulonglong(on.cuda.alloc(4096))
    stream = on.cuda.stream()
    def copy():
        on.cuda.call("cuMemcpyHtoDAsync_v2", device, host, c_size_t(4096), stream)
        on.cuda.synchronise(stream)
    for what, work in (("nothing", None), ("copies", copy)):
        child = subprocess.Popen(
            [sys.executable, "-B", __file__, "backlog"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        child.stdout.readline()
        child.stdin.write("\n")
        child.stdin.flush()
        end, took = time.monotonic() + BACKLOG_S, []
        while time.monotonic() < end:
            if work:
                took.append(timed(work))
            time.sleep(0.001)
        rates[what] = float(child.communicate()[0])
    lost = 100 * (1 - rates["copies"] / rates["nothing"])
    figures = f"{rates['nothing']:.0f} kernels of 200 us a second alone, {lost:.1f} % fewer beside {len(took) / BACKLOG_S:.0f} copies a second, which took {statistics.median(took):.0f} us"
    return None, figures


BACKLOG_S = 1.0


def backlog():
    """Kernels of 200 us, two at a time, for as long as is asked; prints how many a second."""
    on = Spinner()
    stream = on.cuda.stream()
    print("ready", flush=True)
    sys.stdin.readline()
    begun, done = time.monotonic(), 0
    while time.monotonic() < begun + BACKLOG_S:
        for _ in range(2):
            on.launch(on.spin, 200_000, stream)
        on.cuda.synchronise(stream)
        done += 2
    print(done / (time.monotonic() - begun), flush=True)


# The interpreter's threads else wait 5 ms for each other.
sys.setswitchinterval(1e-5)
if sys.argv[1] == "backlog":
    backlog()
    sys.exit()
if sys.argv[1] == "reader":
    print("ready", flush=True)
    while True:
        nvml.processes()
LARGE = int(sys.argv[1])
for name in sys.argv[2:] or measures:
    measure = measures[name]
    line = {"belief": name, "about": measure.__doc__.strip()}
    try:
        line["hardware"], line["figures"] = measure()
    except (cu.Missing, NvmlError) as missing:
        line["skip"] = str(missing)
    except Exception as error:  # noqa: BLE001: one belief must not hide the others
        line["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(line), flush=True)
