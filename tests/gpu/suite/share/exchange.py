"""Two processes on one GPU whose steps wait for one another: the shape of a collective with one GPU.

By words that streams write and wait for, and by kernels that spin, as NCCL's do. What leases make of it is
compared with the same pair without Tessera, which the driver slices. A pair that hangs is a result: how many
steps it had done.
"""

import struct
import tempfile
from pathlib import Path

from .children import Failed, Group, Lost
from .leases import rounds_per_us

WORK_US = 50
# Where the page has the steps done so far (tests/tenant/src/time/exchange.rs).
DONE = 16 * 8

# Case; the share of the tenant of both ranks, or of each rank's own; a backlogged neighbour's.
CASES = (
    ("bare", None, None, None),
    ("one tenant", 100, None, None),
    ("one tenant, 50 beside a backlog of 50", 50, None, 50),
    ("a tenant each, 50/50", None, (50, 50), None),
    ("bare, beside a backlog", None, None, 0),
)


def run(machine, results, slot):
    """Each case both ways; kernels that spin need a GPU that runs them."""
    rounds, ways = rounds_per_us(machine), ["stream", "kernel"]
    if machine.simulated:
        ways.remove("kernel")
        results.missing("exchange", "kernels that spin", "the simulator's kernels compute nothing")
    bare = {}
    for name, together, each, neighbour in CASES:
        for way in ways:
            case = f"{name}, by {way}s"
            if slot.is_over():
                results.missing("exchange", case, "the time is over")
                continue
            if way not in bare and name != "bare":
                results.missing("exchange", case, "the pair did not run bare")
                continue
            try:
                one(machine, results, slot, case, (way, together, each, neighbour), rounds, bare)
            except (Failed, Lost, RuntimeError, OSError, ValueError) as error:
                results.missing("exchange", case, str(error))


def one(machine, results, slot, case, what, rounds, bare):
    """One case. The page is shared memory: kernels refuse to pin pages of other files for long."""
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tessera-gpu.", dir=shm) as folder:
        on_page(machine, results, slot, case, what, rounds, bare, Path(folder) / "page")


def on_page(machine, results, slot, case, what, rounds, bare, page):
    """Two ranks that exchange words on `page`."""
    way, together, each, neighbour = what
    rank = ["time", "exchange", "--page", page, "--way", way, "--work-us", WORK_US]
    rank += ["--rounds-per-us", rounds]
    seconds = slot.seconds(3.0, 0.6)

    def command(which, share):
        line = machine.tenant(*rank, "--rank", which)
        return machine.held(line, share=(share, "burst")) if share else line

    with Group(machine, []) as group:
        if each:
            group.add(machine, "rank 1", command(1, each[1]), ready=False)
            group.add(machine, "rank 0", command(0, each[0]))
        else:
            group.add(machine, "both ranks", command("both", together))
        asked = [group.children[-1]]
        if neighbour is not None:
            backlog = machine.tenant("time", "turns", "--kernel-us", 200, "--rounds-per-us", rounds)
            if neighbour:
                backlog = machine.held(backlog, share=(neighbour, "burst"))
            asked.append(group.add(machine, "neighbour", backlog))
        try:
            got = group.measure(seconds, timeout=slot.seconds(12, 5), children=asked)
        except Lost as error:
            done = struct.unpack_from("<Q", page.read_bytes(), DONE)[0] if page.exists() else 0
            raise Lost(f"{error}; {done} steps were done by then") from None
    if got[0]["gave_up_at"]:
        raise Lost(f"the kernel of step {got[0]['gave_up_at']} spun for 2 s and gave up")
    rate = got[0]["steps"] / got[0]["seconds"]
    if case.startswith("bare, by"):
        bare[way] = rate
    figures = {"steps_per_s": rate}
    if bare.get(way):
        figures["of_bare_pct"] = 100 * rate / bare[way]
    if neighbour is not None:
        figures["neighbour_units_per_s"] = got[1]["units"] / got[1]["seconds"]
    results.add("exchange", case, **figures, _seconds=seconds)
