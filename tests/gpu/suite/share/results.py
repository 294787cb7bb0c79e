"""What was measured: a JSON line at once, a table in the report."""

import json
import time

from ..report import cell
from . import tables

TITLES = {
    "footprint": "Memory that nobody asked for",
    "marks": "Hand-over: events against memory writes",
    "leases": "Shares",
    "decode": "Decode loops",
    "exchange": "Two processes whose steps wait for one another",
    "lone": "What a lone tenant pays",
}
SIMULATED = "Figures of the simulator (tests/sim), not of a GPU."


class Results:
    """Rows by part, in the order in which they came."""

    def __init__(self, report, path, facts, simulated):
        self.report, self.path, self.simulated = report, path, simulated
        self.rows, self.gaps = {}, {}
        gpu = dict(facts)["GPU"]
        path.write_text("")
        self._write({"phase": "share", "facts": {what: str(value) for what, value in facts}})
        self.label = {"phase": "share", "gpu": "simulated" if simulated else gpu}

    def _write(self, line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.report.save()

    def fact(self, **values):
        """Something about the machine that explains figures."""
        self._write({**self.label, "fact": values})

    def add(self, part, case, **figures):
        """A result. Keys become columns; keys with a leading underscore stay in the JSON."""
        self.rows.setdefault(part, []).append((case, figures))
        named = {key.lstrip("_"): value for key, value in figures.items()}
        self._write({**self.label, "part": part, "case": case, "at": round(time.time(), 1), **named})
        said = {k: v for k, v in figures.items() if k[0] != "_" and k not in ("sharing", "mode", "requests")}
        shown = ", ".join(f"{k} {tables.number(v)}" for k, v in said.items())
        print(f"      {case}: {shown}{' (simulator)' if self.simulated else ''}", flush=True)

    def missing(self, part, case, reason):
        """What could not be measured, and why: a result, too."""
        self.gaps.setdefault(part, []).append((case, reason))
        self._write({**self.label, "part": part, "case": case, "not_measured": reason})
        print(f"      {case}: not measured: {reason}", flush=True)

    def count(self, part):
        """How many results a part has."""
        return len(self.rows.get(part, ()))

    def markdown(self):
        """A table for each part."""
        lines = []
        for part, title in TITLES.items():
            rows, gaps = self.rows.get(part, []), self.gaps.get(part, [])
            if not rows and not gaps:
                continue
            lines += ["", f"## {title}", ""]
            if self.simulated:
                lines += [SIMULATED, ""]
            lines += tables.pivots(rows) if part == "decode" else tables.table(rows)
            if gaps:
                lines += ["", "Not measured:", ""]
                lines += [f"- {cell(case)}: {cell(reason)}" for case, reason in gaps]
        return lines
