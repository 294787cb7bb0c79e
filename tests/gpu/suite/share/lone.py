"""What a tenant that is alone pays: its calls, bare and held (SOLO), in alternating rounds."""

from ..report import median


def figures(machine, command, timeout=120):
    """{name: value} of what the tenant prints."""
    out = machine.run(command, timeout=timeout)
    found = {line["name"]: line["value"] for line in out.json() if line.get("event") == "figure"}
    if not found:
        raise RuntimeError(f"exit {out.code}: {out.tail()}")
    if out.code:
        found["the rest"] = {"failed": f"exit {out.code}: {out.tail()}"}
    return found


def run(machine, results, slot):
    """Medians of the rounds' medians. The decode loop's is a row of the part `decode`."""
    command = machine.tenant("time", "marks", "--only-host", "--trials", int(slot.seconds(200, 20)))
    bare, held = [], []
    while len(bare) < 9 and not (len(bare) >= 3 and slot.is_over()):
        bare.append(figures(machine, command))
        held.append(figures(machine, machine.held(command)))
        if machine.simulated:
            break
    for name in bare[0]:
        values = [[r.get(name) for r in rounds] for rounds in (bare, held)]
        if any(isinstance(v, dict) or v is None for side in values for v in side):
            results.missing("lone", name, str(next(v for s in values for v in s if not isinstance(v, float))))
            continue
        alone, under = median(values[0]), median(values[1])
        results.add(
            "lone",
            name.removesuffix("_host_ns"),
            bare_ns=alone,
            held_ns=under,
            more_ns=under - alone,
            bare_rounds_differ_by_ns=max(values[0]) - min(values[0]),
            rounds=len(bare),
        )
