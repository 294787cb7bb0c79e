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


def run(machine, report):
    """Alternating rounds, bare and held."""
    calls(machine, report)
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
