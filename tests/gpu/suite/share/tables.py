"""Rows of figures as Markdown."""

from ..report import cell


def number(value):
    """A figure with as many digits as people read."""
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return " / ".join(number(v) for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def table(rows):
    """One table: all keys of all rows are its columns."""
    keys = list(dict.fromkeys(k for _, figures in rows for k in figures if k[0] != "_"))
    if not keys:
        return []
    lines = ["| | " + " | ".join(key.replace("_", " ") for key in keys) + " |"]
    lines.append("|---" * (len(keys) + 1) + "|")
    for case, figures in rows:
        cells = (cell(number(figures.get(key))) for key in keys)
        lines.append(f"| {cell(case)} | " + " | ".join(cells) + " |")
    return lines


# Key of a decode row, and what the table of it is called.
PIVOTS = (
    ("throughput_pct", "throughput of each tenant, % of dedicated"),
    ("p50_pct", "inter-token time p50, % of dedicated"),
    ("p99_pct", "inter-token time p99, % of dedicated"),
    ("tokens_per_s", "tokens a second of each tenant"),
    ("p50_ms", "inter-token time p50, ms"),
    ("p99_ms", "inter-token time p99, ms"),
)


def pivots(rows):
    """For each way of running and each figure a table: sharing by requests at once."""
    lines = []
    figures = [f for _, f in rows]
    requests = sorted({f["requests"] for f in figures})
    for mode in dict.fromkeys(f["mode"] for f in figures):
        for key, title in PIVOTS:
            lines += ["", f"**{mode}: {title}**, by requests at once", ""]
            lines.append("| | " + " | ".join(map(str, requests)) + " |")
            lines.append("|---" * (len(requests) + 1) + "|")
            for sharing in dict.fromkeys(f["sharing"] for f in figures):
                got = {
                    f["requests"]: f.get(key)
                    for f in figures
                    if f["mode"] == mode and f["sharing"] == sharing
                }
                cells = " | ".join(number(got.get(r)) for r in requests)
                lines.append(f"| {cell(sharing)} | {cells} |")
    return lines
