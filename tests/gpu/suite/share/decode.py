"""Decode loops of two tenants by ways of sharing a GPU: throughput and inter-token times of each, beside
those of one that has the GPU to itself. PyTorch's decoder where it is; else a loop of kernels like one.
"""

import time

from . import mps
from .children import Failed, Group, Lost
from .leases import rounds_per_us

MODES = ("graphs", "eager")
# By worth: a short lease gets the ends and the middle.
REQUESTS = (8, 32, 1, 16, 4, 2)
HALF_OF_THE_SMS = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
DEDICATED = "dedicated"
# Name, tenants, share of each held by leases, whether with MPS, and more of the environment. By worth.
SHARINGS = (
    (DEDICATED, 1, None, False, {}),
    ("two, the driver's time-slicing", 2, None, False, {}),
    ("two, leases 50/50", 2, 50, False, {}),
    ("two, MPS, 50 % of the SMs each", 2, None, True, HALF_OF_THE_SMS),
    ("alone, leases", 1, 100, False, {}),
    ("two, MPS", 2, None, True, {}),
    ("two, MPS and leases 50/50", 2, 50, True, {}),
)
# A fresh PyTorch reads gigabytes of libraries, seconds.
FIRST_START = 150
WITHOUT_MPS = "the simulator has no MPS"
# Seconds for the cells of one way of sharing, however long its processes took to start.
LEAST = 8


class Loop:
    """What the tenants run."""

    def __init__(self, machine, is_torch):
        self.name = "PyTorch" if is_torch else "kernels like a decoder's"
        if is_torch:
            self.command = machine.probe("torch_decode.py", machine.quota)
        else:
            rounds = rounds_per_us(machine)
            self.command = machine.tenant("time", "steps", "--rounds-per-us", rounds)
        # How long a start may take; where it took so long once, not much longer another time.
        self.patience = FIRST_START
        # Why there is no MPS, once that is known.
        self.no_mps = None

    def group(self, machine, tenants, share, env):
        """Its processes, once they are ready."""
        line = machine.held(self.command, share=(share, "burst")) if share else self.command
        begin = time.monotonic()
        commands = [(f"tenant {i}", line) for i in range(tenants)]
        group = Group(machine, commands, env, self.patience)
        self.patience = min(self.patience, 20 + 3 * (time.monotonic() - begin))
        return group


def run(machine, results, slot):
    """Each way in processes of its own, which go through all cells together."""
    is_torch, dedicated = machine.has_torch(), {}
    if not is_torch:
        why = "the simulator does not run it" if machine.simulated else machine.torch or "it is not installed"
        results.missing("decode", "PyTorch", why)
    loop = Loop(machine, is_torch)
    if machine.simulated:
        loop.no_mps = WITHOUT_MPS
    for at, (name, tenants, share, with_mps, env) in enumerate(SHARINGS):
        what, rest = (name, tenants, share, with_mps, env), len(SHARINGS) - at
        if slot.is_over():
            results.missing("decode", name, "the time is over")
            continue
        attempt(machine, results, slot, loop, what, rest, dedicated)
        if name == DEDICATED and not dedicated and is_torch:
            # Without it nothing could be compared: the other loop says something, at least.
            loop = Loop(machine, False)
            attempt(machine, results, slot, loop, what, rest, dedicated)


def attempt(machine, results, slot, loop, what, rest, dedicated):
    """One way of sharing, or why it could not be measured."""
    name, tenants, share, with_mps, env = what
    daemon = None
    try:
        if with_mps and loop.no_mps:
            raise mps.Unavailable(loop.no_mps)
        if with_mps:
            daemon = mps.Mps(machine)
            env = {**env, **daemon.settings}
        sharing(machine, results, slot, loop, (name, tenants, share, env), rest, dedicated, daemon)
    except (mps.Unavailable, Failed, Lost, RuntimeError, OSError, ValueError) as error:
        reason = f"{error}; MPS: {daemon.log()}" if daemon else str(error)
        if isinstance(error, mps.Unavailable) or (daemon and not daemon.servers):
            # It does not come to run by being asked again.
            loop.no_mps = reason
        results.missing("decode", name, reason)
    finally:
        if daemon:
            daemon.end()


def sharing(machine, results, slot, loop, what, rest, dedicated, daemon):
    """All cells of one way of sharing."""
    name, tenants, share, env = what
    with loop.group(machine, tenants, share, env) as group:
        # That its clients run says nothing; a server says that they run through it.
        if daemon and not daemon.look():
            raise mps.Unavailable("the tenants run, but MPS has no server")
        # Of those that are to come, each gets as much; what the start took is nobody's.
        until = time.monotonic() + max(slot.left() / rest, LEAST)
        requests = (8, 32, 1) if machine.simulated else REQUESTS
        cells = [(mode, n) for n in requests for mode in MODES]
        for done, (mode, n) in enumerate(cells):
            cell = f"{name}, {mode}, {n}"
            left = until - time.monotonic()
            if left <= 0:
                results.missing("decode", cell, "the time is over")
                continue
            # About as long again goes for preparing.
            seconds = max(0.4, min(3.0, left / (len(cells) - done) / 2)) if slot.scale else 0.4
            try:
                group.ask_all({"do": "prepare", "mode": mode, "requests": n}, "prepared", 40)
                got = group.measure(seconds, timeout=15)
            except Failed as error:
                results.missing("decode", cell, str(error))
                continue
            row(results, name, (loop.name, mode, n), got, dedicated, machine.nvml.sm_clock())


def row(results, name, kind, got, dedicated, clock):
    """The tenants' mean, and each one's."""
    loop, mode, requests = kind

    # A tenant that made no step in the window has no times between steps.
    stepped = [g for g in got if g["steps"]]

    def mean(of, key, scale=1.0):
        return sum(g[key] for g in of) / len(of) * scale if of else None

    figures = {
        "tokens_per_s": mean(got, "tokens_per_s"),
        "p50_ms": mean(stepped, "p50_us", 1e-3),
        "p99_ms": mean(stepped, "p99_us", 1e-3),
    }
    if name == DEDICATED:
        dedicated[kind] = figures
    base = dedicated.get(kind)
    if base:
        for of, percent in (("tokens_per_s", "throughput_pct"), ("p50_ms", "p50_pct"), ("p99_ms", "p99_pct")):
            known = figures[of] is not None and base[of]
            figures[percent] = 100 * figures[of] / base[of] if known else None
    results.add(
        "decode",
        f"{name}, {mode}, {requests}",
        sharing=name,
        mode=f"{loop}, {mode}",
        requests=requests,
        **figures,
        _tenants=got,
        _sm_clock_mhz=clock,
    )
