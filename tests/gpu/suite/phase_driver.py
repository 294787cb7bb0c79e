"""Whether the real driver is as the shim and the simulator assume."""

import statistics
import subprocess
import time

from .report import mib

# On the simulator; on a GPU the plugin's own formula.
SIMULATED_CONTEXT = 64 << 20
HELD = 512 << 20


def run(machine, report):
    """All on the bare driver."""
    constant = SIMULATED_CONTEXT if machine.simulated else 0
    outcome = machine.run(machine.probe("driver.py", constant), timeout=180)
    for fact in outcome.json():
        if "skip" in fact:
            report.skip(fact["fact"], fact["skip"])
        else:
            report.check(fact["fact"], fact["holds"], fact["figures"])
    if outcome.code:
        report.check("the driver's probe ends in order", False, outcome.tail())
    imports(machine, report)
    teardown(machine, report)


def imports(machine, report):
    """Contract: physical memory is the creator's; when it gives up, it moves to an importer."""
    for kind, name in (("ipc", "a legacy IPC handle"), ("fd", "a descriptor of cuMemCreate")):
        name = f"memory imported by {name} counts once"
        steps = machine.run(machine.probe("importer.py", kind)).last()
        if "skip" in steps:
            report.skip(name, steps["skip"])
            continue
        table = "; ".join(
            f"{step}: " + ", ".join(
                f"{who} {'?' if seen[who] is None else mib(seen[who])}" for who in seen
            )
            for step, seen in steps.items()
        )
        grown = steps["imported"]["device"] - steps["before"]["device"]
        kept = steps["given_up"]["device"] - steps["before"]["device"]
        report.check(name, grown == 0 and abs(kept) < 2 << 20, table)


def teardown(machine, report):
    """From SIGKILL, and from the end of the process, to the driver's own release."""
    after_kill, after_wait = [], []
    for _ in range(3 if machine.simulated else 10):
        idle = machine.quiet()
        child = subprocess.Popen(
            machine.probe("hold.py", HELD),
            env=dict(machine.env, PYTHONPATH=machine_path()),
            stdout=subprocess.PIPE,
            text=True,
        )
        said = child.stdout.readline().strip()
        if said != "holding":
            child.kill()
            child.wait()
            report.check("a killed process's memory comes back", False, f"said {said!r}")
            return
        killed = time.monotonic()
        child.kill()
        child.wait()
        ended = time.monotonic()
        while machine.nvml.memory().used > idle and time.monotonic() < ended + 5:
            time.sleep(0.0002)
        back = time.monotonic()
        after_kill.append((back - killed) * 1e3)
        after_wait.append((back - ended) * 1e3)
    report.check(
        "a killed process's memory comes back within the 2 s that the shim waits",
        max(after_wait) < 2000,
        f"{mib(HELD)}: median {statistics.median(after_kill):.1f} ms after SIGKILL, "
        f"{statistics.median(after_wait):.1f} ms after its end, worst {max(after_wait):.1f} ms",
    )


def machine_path():
    """Where probes find `suite`."""
    from .machine import GPU

    return str(GPU)
