"""Verdicts with their figures, for a terminal and as Markdown."""

import time

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


class Report:
    """Collects checks in the order in which they ran."""

    def __init__(self, title, facts, path):
        self.title = title
        self.path = path
        self.more = []  # functions that give lines of Markdown
        self.facts = facts  # [(what, value)], about the machine
        self.checks = []  # [(phase, name, verdict, figures)]
        self.phase = ""
        self.started = time.time()

    def enter(self, phase):
        """All checks from here on belong to `phase`."""
        self.phase = phase
        print(f"\n== {phase}", flush=True)

    def _add(self, verdict, name, figures):
        self.checks.append((self.phase, name, verdict, figures))
        print(f"{verdict}  {name}{': ' if figures else ''}{figures}", flush=True)
        self.save()

    def attach(self, lines):
        """Adds what `lines()` gives to the end of the Markdown."""
        self.more.append(lines)

    def save(self):
        """As it is now: a run that is cut short keeps what it found."""
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(self.markdown())
        part.replace(self.path)

    def check(self, name, holds, figures=""):
        """PASS or FAIL. Returns whether it holds."""
        self._add(PASS if holds else FAIL, name, figures)
        return bool(holds)

    def skip(self, name, reason):
        """Not tried, and why."""
        self._add(SKIP, name, reason)

    def failed(self):
        """How many checks failed."""
        return sum(verdict == FAIL for _, _, verdict, _ in self.checks)

    def count(self, verdict):
        """How many checks ended so."""
        return sum(v == verdict for _, _, v, _ in self.checks)

    def markdown(self):
        """The whole report; what failed comes first, as the surprises."""
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.started))
        lines = [f"# {self.title}", "", "| | |", "|---|---|", f"| Date | {date} |"]
        lines += [f"| {what} | {cell(value)} |" for what, value in self.facts]
        totals = ", ".join(f"{self.count(v)} {v}" for v in (PASS, FAIL, SKIP))
        lines += [f"| Checks | {totals} |", ""]
        surprises = [(p, n, f) for p, n, v, f in self.checks if v == FAIL]
        lines += ["## Surprises", ""]
        lines += [f"- **{p}: {n}** ({f})" for p, n, f in surprises] or ["None."]
        phase = None
        for of, name, verdict, figures in self.checks:
            if of != phase:
                phase = of
                lines += ["", f"## {phase}", "", "| Check | | Figures |", "|---|---|---|"]
            lines.append(f"| {cell(name)} | {verdict} | {cell(figures)} |")
        for more in self.more:
            lines += more()
        return "\n".join(lines) + "\n"


def cell(text):
    """Text that a table's cell can hold."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def mib(quantity):
    """Bytes as people read them."""
    return f"{quantity / (1 << 20):.1f} MiB"


def median(values):
    """The middle one."""
    values = sorted(values)
    return values[len(values) // 2]
