"""What markers of the end of work cost, and how soon the host sees them."""

from .lone import figures


def run(machine, results, slot):
    """Bare: what a gate could be built on."""
    trials = int(slot.seconds(600, 30))
    for name, value in figures(machine, machine.tenant("time", "marks", "--trials", trials)).items():
        if isinstance(value, dict) and "failed" in value:
            results.missing("marks", name, value["failed"])
        elif isinstance(value, dict):
            results.add("marks", name, p50=value["p50"], p99=value["p99"])
        else:
            results.add("marks", name, p50=value)
