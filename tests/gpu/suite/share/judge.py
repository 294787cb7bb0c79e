"""When each tenant had the GPU: by the GPU's clock where there is one, by the simulator's account elsewhere.

A kernel's first thread writes when it began and ended by %globaltimer, which all processes of a GPU
read alike. A hand-over is the time from the end of one tenant's kernel to the beginning of another's.
"""

import array
import json
import subprocess
import sys


def read(path):
    """[(begin, end)] of one tenant's kernels, in order."""
    words = array.array("Q")
    words.frombytes(path.read_bytes())
    if sys.byteorder == "big":
        words.byteswap()
    return sorted(zip(words[::2], words[1::2]))


def percentile(values, part):
    """Of any values; None of none."""
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))] if values else None


def of_stamps(tenants):
    """Figures of the time in which all tenants had work, given each one's kernels."""
    if not tenants or not all(tenants):
        return {}
    begin = max(kernels[0][0] for kernels in tenants)
    end = min(kernels[-1][1] for kernels in tenants)
    merged = sorted(
        (first, last, who)
        for who, kernels in enumerate(tenants)
        for first, last in kernels
        if first >= begin and last <= end
    )
    if len(merged) < 2 or end <= begin:
        return {}
    busy, gaps, overlaps = 0, [], 0
    until, holder = merged[0][0], merged[0][2]
    for first, last, who in merged:
        if who != holder:
            gaps.append(max(0, first - until))
            overlaps += first < until
        busy += max(0, last - max(first, until))
        # Beside others' kernels the later end counts, and whose it is.
        if last >= until:
            until, holder = last, who
    figures = {"gpu_busy_pct": 100 * busy / (end - begin)}
    if len(tenants) > 1:
        figures["handovers"] = len(gaps)
        figures["handover_p50_us"] = (percentile(gaps, 0.5) or 0) / 1e3
        figures["handover_p99_us"] = (percentile(gaps, 0.99) or 0) / 1e3
        figures["handovers_overlapping_pct"] = 100 * overlaps / max(1, len(gaps))
    return figures


def of_account(machine, state, pids):
    """The simulator's own account: GPU time of each process, and idle time between two processes."""
    out = subprocess.run(
        [str(machine.artefacts / "sim/simgpu-ctl"), "account"],
        env=machine.environment({"SIMGPU_STATE": str(state)}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    account = json.loads(out.stdout.splitlines()[0])
    busy = {context["pid"]: context["busy_ns"] for context in account["contexts"]}
    together = sum(busy.get(pid, 0) for pid in pids)
    figures = {}
    if together:
        figures["gpu_time_pct"] = [100 * busy.get(pid, 0) / together for pid in pids]
    if len(pids) > 1:
        handovers = account["handovers"]
        figures["handovers"] = handovers["count"]
        figures["handover_p50_us"] = handovers["idle_p50_ns"] / 1e3
        figures["handover_p99_us"] = handovers["idle_p99_ns"] / 1e3
    return figures
