"""Memory that no allocation shows: contexts, pools' chunks, limits, rounding; by NVML, bare.

Nobody else may use the GPU meanwhile: where NVML does not show this process, bytes are differences of what
the whole device has in use.
"""

TOPICS = ("context", "stack", "heap", "printf", "pool", "pages")


def run(machine, results, slot):
    """Each topic in a process of its own, which begins without a context."""
    for topic in TOPICS:
        if slot.is_over():
            results.missing("footprint", topic, "the time is over")
            continue
        machine.quiet()
        outcome = machine.run(machine.probe("footprint.py", topic), timeout=60)
        for line in outcome.json():
            if "missing" in line:
                results.missing("footprint", line["case"], line["missing"])
            elif "case" in line:
                case = line.pop("case")
                results.add("footprint", case, **line)
        if outcome.code:
            results.missing("footprint", topic, f"exit {outcome.code}: {outcome.tail()}")
