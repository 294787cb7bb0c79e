"""What the shim costs on the real driver: calls, and PyTorch's throughput."""

from .report import median

# Task of tests/bench's child, what it is, most that it may cost (docs/benchmarks.md), unit.
CALLS = (
    ("launch", "a launch", 8.0),
    ("mem-get-info", "cuMemGetInfo", 50.0),
    ("alloc-free", "cuMemAlloc + cuMemFree", 250.0),
    ("alloc-async", "cuMemAllocAsync + cuMemFreeAsync, warm pool", 250.0),
    ("array", "array create + destroy", None),
)
ROUNDS = 7
# A call with 8,192 copies to the device, in which a question for each would cost milliseconds: how the process is held,
# and what that may cost, microseconds (docs/benchmarks.md).
BATCH = (("held, SOLO", None), ("held under a cap, not SOLO", (90, "strict")))
BATCH_MOST = 100.0


def run(machine, report):
    """Alternating rounds, bare and held."""
    calls(machine, report)
    batch(machine, report)
    chained(machine, report)
    throughput(machine, report)


def calls(machine, report):
    """tests/bench's own child, on this driver."""
    child = machine.artefacts / "tessera-bench"
    if not child.exists():
        report.skip("calls", f"no {child.name}: cargo build --release -p tessera-bench")
        return
    # Real memory takes the driver microseconds to milliseconds; fewer batches do there.
    for task, what, most in CALLS:
        bare, held, reason = [], [], ""
        for _ in range(1 if machine.simulated else ROUNDS):
            command = [str(child), "child", task]
            for values, line in ((bare, command), (held, machine.held(command))):
                out = machine.run(line, timeout=90)
                try:
                    values.append(float(out.stdout))
                except ValueError:
                    reason = out.tail()
                    break
            if reason:
                break
        if reason:
            report.skip(what, reason)
            continue
        cost = median(held) - median(bare)
        figures = f"{cost:.1f} ns over {median(bare):.1f} ns bare"
        # One round says nothing about nanoseconds; a real driver's own noise is larger than ours.
        noise = max(bare) - min(bare)
        holds = most is None or machine.simulated or cost <= most + noise
        report.check(what, holds, figures + f", bare rounds differ by {noise:.1f}")


def batch(machine, report):
    """vLLM's offloading (vllm-project/vllm#38460). Of a process with a cap the gate is never SOLO."""
    child = machine.artefacts / "tessera-bench"
    if not child.exists():
        report.skip("a batch of 8,192 copies", f"no {child.name}: cargo build --release -p tessera-bench")
        return
    command = [str(child), "child", "offload"]
    lines = {"bare": command, **{name: machine.held(command, share=share) for name, share in BATCH}}
    took = {name: [] for name in lines}
    for _ in range(1 if machine.simulated else ROUNDS):
        for name, line in lines.items():
            out = machine.run(line, timeout=90)
            try:
                took[name].append(float(out.stdout))
            except ValueError:
                report.skip("a batch of 8,192 copies", out.tail())
                return
    bare = took.pop("bare")
    noise = max(bare) - min(bare)
    for name, values in took.items():
        more = median(values) - median(bare)
        figures = f"{more:.0f} us over {median(bare):.0f} us bare, {median(bare) / 8.192:.0f} ns a copy, bare rounds differ by {noise:.0f} us"
        # One round on a busy machine says as little about this as about a call.
        holds = machine.simulated or more <= BATCH_MOST + noise
        report.check(f"a batch of 8,192 copies, {name}", holds, figures)


def chained(machine, report):
    """Markers must not part kernels of which the second may begin with the first."""
    for name, share in BATCH:
        line = machine.held(machine.probe("findings.py", 0, "chained"), share=share)
        found, name = machine.run(line, timeout=60).last(), f"a pair of chained kernels begins together, {name}"
        if "skip" in found:
            report.skip(name, found["skip"])
        else:
            report.check(name, found.get("hardware"), found.get("figures", found.get("failed")))


def throughput(machine, report):
    """Rounds alternate, and the best of each is compared: the rest is other work's."""
    if not machine.torch:
        report.skip("PyTorch's throughput", "not there")
        return
    bare, held = [], []
    for _ in range(3):
        bare.append(machine.run(machine.probe("torch_speed.py"), timeout=120).last())
        held.append(machine.run(machine.held(machine.probe("torch_speed.py")), timeout=120).last())
    for what in bare[0]:
        alone, shared = max(r[what] for r in bare), max(r[what] for r in held)
        least = 0.5 if "cudaMalloc" in what else 0.97
        figures = f"{shared:,.0f} held, {alone:,.0f} bare: {shared / alone:.3f}"
        report.check(what, shared >= least * alone, figures)
