"""Shares of backlogged tenants: what each got, against its share and against what one gets alone.

Units of work have a fixed amount of arithmetic for the whole GPU, so a tenant's units a second over
those of one alone without Tessera are its part of the GPU.
"""

from pathlib import Path

from . import judge
from .children import Failed, Group, Lost

KERNEL_US = 200
GRAPH = 40  # kernels: 8 ms

# Case, and the tenants: share in percent, policy, and kernels in a graph (0: single kernels). No share: bare.
BARE = (None, None, 0)
CASES = (
    ("alone, bare", [BARE]),
    ("alone, leases", [(100, "burst", 0)]),
    ("50/50", [(50, "burst", 0), (50, "burst", 0)]),
    ("two, the driver's time-slicing", [BARE, BARE]),
    ("80/20", [(80, "burst", 0), (20, "burst", 0)]),
    ("strict 25, alone", [(25, "strict", 0)]),
    ("strict 25 beside a backlog", [(25, "strict", 0), (50, "burst", 0)]),
    ("50/30/20", [(50, "burst", 0), (30, "burst", 0), (20, "burst", 0)]),
    ("strict 50, alone", [(50, "strict", 0)]),
    ("strict 25 and strict 50", [(25, "strict", 0), (50, "strict", 0)]),
    ("graphs of 8 ms, alone, bare", [(None, None, GRAPH)]),
    ("50/50, graphs of 8 ms", [(50, "burst", GRAPH), (50, "burst", GRAPH)]),
    ("80/20, graphs of 8 ms and kernels", [(80, "burst", GRAPH), (20, "burst", 0)]),
    ("strict 25, graphs of 8 ms", [(25, "strict", GRAPH)]),
    ("graphs of 8 ms, the driver's time-slicing", [(None, None, GRAPH), (None, None, GRAPH)]),
)


def rounds_per_us(machine):
    """How much arithmetic a microsecond is: measured once, as the clocks are when the GPU is warm."""
    if machine.rounds is None:
        outcome = machine.run(machine.tenant("time", "calibrate"), timeout=60)
        found = [line for line in outcome.json() if line.get("event") == "calibrated"]
        if not found:
            raise RuntimeError(f"the kernel cannot be calibrated: exit {outcome.code}: {outcome.tail()}")
        machine.rounds = found[0]["rounds_per_us"]
    return machine.rounds


def run(machine, results, slot):
    """Case after case; rates of one alone come first, by kind of unit."""
    rounds, alone = rounds_per_us(machine), {}
    for name, tenants in CASES:
        if slot.is_over():
            results.missing("leases", name, "the time is over")
            continue
        try:
            case(machine, results, slot, name, tenants, rounds, alone)
        except (Failed, Lost, RuntimeError, OSError, ValueError) as error:
            results.missing("leases", name, str(error))


def case(machine, results, slot, name, tenants, rounds, alone):
    """One case."""
    state = Path(machine.scratch.name) / "leases.state"
    env = {"SIMGPU_STATE": str(state)} if machine.simulated else {}
    stamps = [Path(machine.scratch.name) / f"stamps.{i}" for i in range(len(tenants))]
    # What a case that failed left behind is not this one's.
    for path in [*stamps, state]:
        path.unlink(missing_ok=True)
    commands = []
    for i, (share, policy, graph) in enumerate(tenants):
        command = machine.tenant("time", "turns", "--kernel-us", KERNEL_US, "--rounds-per-us", rounds)
        command += ["--graph", graph] if graph else ["--stamps", stamps[i]]
        if share:
            command = machine.held(command, share=(share, policy))
        commands.append((f"{name}, tenant {i}", command))
    seconds = slot.seconds(5.0, 0.6)
    with Group(machine, commands, env) as group:
        got = group.measure(seconds, timeout=15, warm=slot.seconds(1.0, 0.2))
        figures, clock = {}, machine.nvml.sm_clock()
        if machine.simulated:
            figures = judge.of_account(machine, state, [child.pid for child in group.children])
    if not machine.simulated and all(path.exists() for path in stamps):
        figures = judge.of_stamps([judge.read(path) for path in stamps])
    rates = [g["units"] / g["seconds"] for g in got]
    kinds = [graph for _, _, graph in tenants]
    if all(share is None for share, _, _ in tenants) and len(tenants) == 1:
        alone[kinds[0]] = rates[0]
    results.add(
        "leases",
        name,
        **verdict(tenants, rates, [alone.get(kind) for kind in kinds]),
        units_per_s=rates,
        longest_wait_ms=[g["longest_wait_ms"] for g in got],
        **figures,
        _seconds=seconds,
        _rounds_per_us=rounds,
        _sm_clock_mhz=clock,
    )


def verdict(tenants, rates, alone):
    """What each got of the GPU, and how far that is from its share."""
    if not all(alone):
        return {}
    parts = [100 * rate / most for rate, most in zip(rates, alone)]
    figures = {"got_pct": parts, "together_pct": sum(parts)}
    shares = [share for share, _, _ in tenants]
    caps = [
        100 * (part - share) / share
        for part, (share, policy, _) in zip(parts, tenants)
        if policy == "strict"
    ]
    if caps:
        figures["off_the_cap_pct_of_it"] = caps
    elif all(shares) and len(shares) > 1 and sum(parts) > 0:
        errors = [100 * p / sum(parts) - 100 * s / sum(shares) for p, s in zip(parts, shares)]
        figures["share_error_pp"] = max(errors, key=abs)
    return figures
