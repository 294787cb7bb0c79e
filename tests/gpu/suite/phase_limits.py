"""Every API is held to the quota, in one process and in many, as NVML sees it from outside."""

from concurrent.futures import ThreadPoolExecutor

from .report import mib

APIS = ("plain", "pitched", "managed", "async", "pool", "vmm", "array", "mipmap", "graph")
# Of these the driver says only afterwards what it took.
POOLS = ("async", "pool", "graph", "pitched")
POOL_CHUNK = 32 << 20
PROCESSES = 8
TENANTS = 4
# What the tenant exits with where a function is missing (tests/tenant/src/exit.rs).
DRIVER = 3
ABSENT = ("returned 500", "returned 801")


def usable(machine, report):
    """The APIs that the driver has."""
    found = []
    for api in machine.apis or APIS:
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
    brim(machine, report)


def brim(machine, report):
    """Quotas that sum to all that is sold, each filled at once: nobody is refused below its own (`gpus.reserve`)."""
    machine.quiet()
    memory = machine.nvml.memory_v2()
    # As the plugin: what the driver keeps and a margin, at least the default setting.
    sold = memory.total - max(memory.reserved + (128 << 20), 128 << 20 if machine.simulated else 512 << 20)
    quota = sold // TENANTS >> 21 << 21
    context = 64 << 20 if machine.simulated else 640 << 20
    greedy = ["greedy", "--apis", "plain", "--chunk", "64Mi", "--min-chunk", "2Mi", "--at-most", 2 * quota, "--for", 2]
    with ThreadPoolExecutor(TENANTS) as pool:
        outs = list(pool.map(lambda _: machine.run(machine.held(machine.tenant(*greedy), quota)), range(TENANTS)))
    full = [[r for r in out.json() if r["event"] == "full"] for out in outs]
    held = [reports[-1]["held"] if reports else 0 for reports in full]
    report.check(
        f"{TENANTS} tenants fill all that is sold at once",
        all(out.code == 0 for out in outs) and all(quota - context - (2 << 20) <= bytes <= quota for bytes in held),
        f"{', '.join(map(mib, held))} of {mib(quota)} each; {mib(memory.reserved)} reserved of {mib(memory.total)}"
        + "".join(f"; {out.tail()}" for out in outs if out.code),
    )


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
    """Eight processes of one tenant: first by what is known before the driver is called."""
    pools = [api for api in apis if api in POOLS]
    churn(machine, report, [api for api in apis if api not in POOLS], 0)
    if pools:
        # What a pool takes beyond the request shows only after the call; the shim frees it again
        # where the quota has no room (docs/internals/shim.md, "Pools"). A chunk for each pool at most.
        churn(machine, report, apis, PROCESSES * len(pools) * POOL_CHUNK)


def churn(machine, report, apis, transient):
    """Random sizes from a page on, in random order, at the limit all the time."""
    idle = machine.quiet()
    context = 64 << 20 if machine.simulated else 512 << 20
    quota = max(machine.quota, PROCESSES * context + (512 << 20))
    command = ["--processes", PROCESSES, "churn", "--for", 1 if machine.simulated else 8]
    command += ["--min", "2Mi", "--max", "64Mi", "--apis", ",".join(apis)]
    out = machine.run(machine.held(machine.tenant(*command), quota), watch=True, timeout=120)
    done = [r for r in out.json() if r["event"] == "done"]
    total = sum(r["allocations"] for r in done)
    names = ", ".join(apis)
    report.check(
        f"{PROCESSES} processes of one tenant churn by {names}",
        out.code == 0 and len(done) == PROCESSES,
        f"{total} allocations, {sum(r['refused'] for r in done)} refused"
        + (f"; exit {out.code}: {out.tail()}" if out.code else ""),
    )
    report.check(
        f"together they stay within the quota ({names})",
        0 < out.peak <= quota + transient,
        f"at most {mib(out.peak)} of {mib(quota)}"
        + (f", {mib(transient)} more allowed for a moment" if transient else ""),
    )
    after = machine.quiet()
    report.check(f"everything comes back after {names}", after <= idle, f"{after - idle} bytes remain")
