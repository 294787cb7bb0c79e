"""Every API is held to the quota, in one process and in many, as NVML sees it from outside."""

from .report import mib

APIS = ("plain", "pitched", "managed", "async", "pool", "vmm", "array", "mipmap", "graph")
# What the tenant exits with where a function is missing (tests/tenant/src/exit.rs).
DRIVER = 3
ABSENT = ("returned 500", "returned 801")


def usable(machine, report):
    """The APIs that the driver has."""
    found = []
    for api in APIS:
        out = machine.run(machine.tenant("greedy", "--apis", api, "--chunk", "2Mi", "--at-most", "2Mi"))
        if out.code == DRIVER and any(word in out.stderr for word in ABSENT):
            report.skip(f"greedy by {api}", out.tail())
        else:
            found.append(api)
    return found


def run(machine, report):
    """One greedy process for each API, then many that churn by all of them."""
    apis = usable(machine, report)
    for api in apis:
        one(machine, report, api)
    many(machine, report, apis)


def one(machine, report, api):
    """It gets its quota less a context, is refused then, and the GPU shows no more than that."""
    idle = machine.quiet()
    greedy = machine.tenant(
        "greedy", "--apis", api, "--chunk", "64Mi", "--min-chunk", "2Mi", "--at-most", 2 * machine.quota
    )
    if not machine.simulated:
        # Long enough to be seen from outside; on the simulator `many` is.
        greedy += ["--for", "1"]
    out = machine.run(machine.held(greedy), watch=True)
    reports = [r for r in out.json() if r["event"] == "full"]
    held = reports[-1]["held"] if reports else 0
    # A pool's last chunk, an array's tiles and the model's context may stay unused.
    enough = machine.quota - (640 << 20)
    report.check(
        f"greedy by {api} is refused at the quota",
        out.code == 0 and max(enough, 1) <= held <= machine.quota,
        f"held {mib(held)} of {mib(machine.quota)}" + (f"; {out.tail()}" if out.code else ""),
    )
    # Managed memory is populated when it is touched.
    report.check(
        f"the GPU shows no more than the quota for {api}",
        out.peak <= machine.quota and (out.peak > 0 or machine.simulated),
        f"at most {mib(out.peak)} more in use",
    )
    after = machine.quiet()
    report.check(f"everything comes back after {api}", after <= idle, f"{after - idle} bytes remain")


def many(machine, report, apis):
    """Eight processes of one tenant, all APIs in random order."""
    idle = machine.quiet()
    seconds = 1 if machine.simulated else 10
    contexts = 8 * (64 << 20 if machine.simulated else 512 << 20)
    quota = max(machine.quota, contexts + (512 << 20))
    churn = machine.tenant(
        "--processes", 8, "churn", "--for", seconds, "--max", "64Mi", "--apis", ",".join(apis)
    )
    out = machine.run(machine.held(churn, quota), watch=True, timeout=120)
    done = [r for r in out.json() if r["event"] == "done"]
    total = sum(r["allocations"] for r in done)
    report.check(
        "eight processes of one tenant churn by all APIs",
        out.code == 0 and len(done) == 8,
        f"{total} allocations, {sum(r['refused'] for r in done)} refused"
        + (f"; exit {out.code}: {out.tail()}" if out.code else ""),
    )
    report.check(
        "together they never hold more than the quota",
        0 < out.peak <= quota,
        f"at most {mib(out.peak)} of {mib(quota)}",
    )
    after = machine.quiet()
    report.check("everything comes back after them", after <= idle, f"{after - idle} bytes remain")
