"""PyTorch as a tenant: its three allocators at the limit, graphs, tensors shared by processes."""

from .report import mib

ALLOCATORS = {
    "caching": "",
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


def run(machine, report):
    """Each in processes of its own."""
    if not machine.torch:
        report.skip("PyTorch", "not there")
        return
    for name, setting in ALLOCATORS.items():
        limit(machine, report, name, {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {})
    graphs(machine, report)
    share(machine, report)


def attempt(machine, report, name, command, **options):
    """The probe's last object; a failed check where there is none."""
    try:
        return machine.run(command, **options).last()
    except RuntimeError as error:
        report.check(name, False, str(error))
        return None


def limit(machine, report, name, env):
    """OutOfMemoryError at the quota, and life after it."""
    command = machine.held(machine.probe("torch_limit.py", machine.quota))
    seen = attempt(machine, report, f"{name}: runs", command, env=env, timeout=240, watch=True)
    if seen is None:
        return
    report.check(f"{name}: total is the quota", seen["total"] == machine.quota, mib(seen["total"]))
    report.check(
        f"{name}: torch.OutOfMemoryError at the quota",
        seen["refused"] and seen["held"] <= machine.quota,
        f"held {mib(seen['held'])}, then free {mib(seen['free_when_full'])}: {seen['message']}",
    )
    report.check(
        f"{name}: the process goes on",
        seen["usable"] and seen["had_again"] and seen["computes"],
        f"usable {seen['usable']}, had again {seen['had_again']}, computes {seen['computes']}",
    )
    report.check(
        f"{name}: what it frees is free again",
        seen["free_after"] >= seen["free"] - (512 << 20),
        f"{mib(seen['free'])} before, {mib(seen['free_after'])} after (libraries loaded between)",
    )


def graphs(machine, report):
    """Capture works under the shim."""
    command = machine.held(machine.probe("torch_graphs.py"))
    seen = attempt(machine, report, "CUDA graphs: run", command, timeout=180)
    if seen:
        error = seen["worst_relative_error"]
        report.check("CUDA graphs: captured and replayed", error < 1e-2, f"relative error {error:.1e}")


def share(machine, report):
    """The exporter is charged; an importer's view must not shrink by what it imports."""
    command = machine.held(machine.probe("torch_share.py"))
    seen = attempt(machine, report, "shared tensors: run", command, timeout=240)
    if seen:
        report.check(
            "shared tensors: arrive whole", seen["right"] and seen["exit"] == 0, f"exit {seen['exit']}"
        )
        shrunk = seen["importer_free_before"] - seen["importer_free_with"]
        report.check(
            "shared tensors: are charged once",
            abs(shrunk) < 64 << 20,
            f"the importer's free shrank by {mib(shrunk)} by importing 256 MiB",
        )
