"""What a tenant sees: its quota, by every way of asking, coherent at every moment."""

import json
import subprocess

from .report import mib


def run(machine, report):
    """cuMemGetInfo, cuDeviceTotalMem, NVML, nvidia-smi and PyTorch agree."""
    args = ["torch"] if machine.torch else []
    bare = machine.run(machine.probe("views.py", *args)).last()
    held = machine.run(machine.held(machine.probe("views.py", *args))).last()
    report.check(
        "bare, the whole GPU is seen",
        bare["total"] > machine.quota and bare["nvml_total"] == machine.total,
        f"cuMemGetInfo {mib(bare['total'])}, NVML {mib(bare['nvml_total'])}",
    )
    totals = {k: v for k, v in held.items() if "total" in k}
    report.check(
        "held, every total is the quota",
        all(v == machine.quota for v in totals.values()),
        json.dumps(totals),
    )
    frees = {held["free"], held["nvml_free"], held["nvml_v2_free"]}
    report.check("held, CUDA's and NVML's free agree", len(frees) == 1, str(sorted(frees)))
    took = held["free"] - held["free_with_64_mib"]
    report.check(
        "64 MiB more are 64 MiB less free, in both views, and come back",
        took == 64 << 20
        and held["free_with_64_mib"] == held["nvml_free_with_64_mib"]
        and held["free_after"] == held["free"],
        f"{took} less; {held['free']} before, {held['free_after']} after",
    )
    if not machine.torch:
        report.skip("torch.cuda.mem_get_info sees the quota", "no PyTorch")
    smi(machine, report)


def smi(machine, report):
    """nvidia-smi asks through NVML."""
    if not machine.has_nvidia_smi():
        report.skip("nvidia-smi shows the quota", "no nvidia-smi")
        return
    ask = ["nvidia-smi", "-i", "0", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(
        machine.held(ask), env=machine.env, capture_output=True, text=True, timeout=60
    )
    total = out.stdout.split(",")[0].strip()
    report.check(
        "nvidia-smi shows the quota",
        total == str(machine.quota >> 20),
        (out.stdout.strip() or out.stderr.strip()) + " MiB",
    )
