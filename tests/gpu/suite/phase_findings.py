"""Whether the hardware is as it is known to be where a simulator's authors easily believe otherwise."""

# What a server holds; on the simulator as much as a machine has memory for.
LARGE, SIMULATED_LARGE = 60 << 30, 2 << 30


def run(machine, report):
    """A verdict for each belief, on the bare driver."""
    room = machine.nvml.memory().free * 7 // 10
    large = SIMULATED_LARGE if machine.simulated else min(LARGE, room)
    outcome = machine.run(machine.probe("findings.py", large), timeout=300)
    lines = outcome.json()
    for line in lines:
        name = f"{line['belief']}: {line['about'].rstrip('.')}"
        if "skip" in line:
            report.skip(name, line["skip"])
        elif "failed" in line:
            report.check(name, False, line["failed"])
        elif line["hardware"] is None:
            # Figures that no verdict hangs on.
            report.check(name, True, line["figures"])
        else:
            report.check(name, line["hardware"], line["figures"])
    if outcome.code or not lines:
        report.check("the probe ends in order", False, outcome.tail())
