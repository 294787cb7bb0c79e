"""The phase `share`: how a GPU's time is divided, measured. See tests/gpu/README.md.

Parts run in the order of their worth, each within its part of the time that is left, and write
every figure as it comes.
"""

import time

from . import decode, exchange, footprint, leases, lone, marks
from .budget import Budget
from .children import end_all
from .results import Results

# Name, what it does, and the seconds it takes when there is time enough.
PARTS = (
    ("footprint", footprint.run, 30),
    ("marks", marks.run, 30),
    ("leases", leases.run, 100),
    ("decode", decode.run, 290),
    ("exchange", exchange.run, 45),
    ("lone", lone.run, 25),
)
MINUTES = 9.0


def run(machine, report):
    """All parts; a part that fails takes no other along."""
    results = Results(report, machine.results, machine.facts(), machine.simulated)
    report.attach(results.markdown)
    minutes = (machine.minutes or MINUTES) - machine.found_in / 60
    budget = Budget(minutes, [(name, needs) for name, _, needs in PARTS])
    if machine.simulated and not machine.minutes:
        budget = Budget.least([name for name, _, _ in PARTS])
    alone(machine, results)
    for name, _, _ in PARTS:
        if machine.parts and name not in machine.parts:
            budget.leave_out(name)
    for name, measure, _ in PARTS:
        if machine.parts and name not in machine.parts:
            continue
        slot, start, before = budget.enter(name), time.monotonic(), results.count(name)
        if slot.is_over():
            report.skip(f"{name} is measured", "the time is over")
            results.missing(name, "all", "the time is over")
            continue
        print(f"-- {name}, about {slot.allotted:.0f} s", flush=True)
        reason = ""
        try:
            measure(machine, results, slot)
        except Exception as error:  # noqa: BLE001: a part must not take the others' figures along
            reason = f"{type(error).__name__}: {error}"
            results.missing(name, "the rest", reason)
        finally:
            end_all()
        got = results.count(name) - before
        figures = f"{got} results in {time.monotonic() - start:.0f} s" + (f"; {reason}" if reason else "")
        report.check(f"{name} is measured", got and not reason, figures)


def alone(machine, results):
    """Bare is bare: no MPS daemon of somebody else's, no part of the SMs from the caller's environment."""
    inherited = {k: v for k, v in machine.env.items() if k.startswith("CUDA_MPS_")}
    for name in inherited:
        del machine.env[name]
    machine.env["CUDA_MPS_PIPE_DIRECTORY"] = f"{machine.scratch.name}/no-mps"
    results.fact(compute_mode=machine.nvml.compute_mode(), mps_of_the_caller=inherited or None)
