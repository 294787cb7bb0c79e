"""The GPU under test, the built files, and children with and without the shim."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from .nvml import Nvml, NvmlError

GPU = Path(__file__).resolve().parent.parent
ROOT = GPU.parent.parent

# What the simulator's authors believed, and what it does by default: of imports either is possible.
BELIEFS = {
    "old": """
reserved = "256MiB"
teardown_ms_per_gib = 0.0
managed = "process"
imports = "maker"
[nvml]
process_list_us = 0.0
handle_ns = 0
memory_info_us = 0.0
[driver]
context_lock = false
lazy_loading = false
queues = 1
[costs]
cold_us = 0.0
record_cpu_ns = 0
query_cpu_ns = 0
pointer_query_cpu_ns = 0
pin_ms_per_gib = 0.0
""",
    "new": """
imports = "both"
""",
}
# Small and quick: the suite's own test runs on it.
SIMULATED = """
[memory]
context_overhead = "64MiB"
teardown_ms = 5.0
%s
[[gpu]]
memory = "8GiB"
[[kernel]]
name = "fixed_work"
parameter = 0
[[kernel]]
name = "spin_ns"
parameter = 0
[[kernel]]
name = "other_ns"
parameter = 0
"""


class Problem(Exception):
    """The suite can't run, and why."""


class Outcome:
    """What a child left behind."""

    def __init__(self, code, stdout, stderr, seconds, peak):
        self.code, self.stdout, self.stderr = code, stdout, stderr
        self.seconds, self.peak = seconds, peak

    def json(self):
        """The objects among its lines."""
        found = []
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                try:
                    found.append(json.loads(line))
                except ValueError:
                    pass
        return found

    def last(self):
        """Its last object; raises with what it said where there is none."""
        objects = self.json()
        if self.code or not objects:
            raise RuntimeError(f"exit {self.code}: {self.tail()}")
        return objects[-1]

    def tail(self):
        """The end of what it said, in one line."""
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return " / ".join(said[-3:])


class Machine:
    """Where everything runs."""

    def __init__(self, artefacts, simulated, quota, beliefs="new"):
        self.artefacts, self.simulated = Path(artefacts), simulated
        for name in ("tessera", "libtessera.so", "tessera-tenant"):
            if not (self.artefacts / name).exists():
                raise Problem(f"{self.artefacts / name} is missing: run `make build`")
        self.scratch = tempfile.TemporaryDirectory(prefix="tessera-gpu.")
        self.env = dict(os.environ)
        # Sharing belongs to the suite: what the caller was given must not reach the children.
        for name in ("LD_PRELOAD", "TESSERA_DIR"):
            self.env.pop(name, None)
        # `tessera run` keeps its pages there; not every machine has the usual place.
        self.env.setdefault("XDG_RUNTIME_DIR", self.scratch.name)
        library = "libnvidia-ml.so.1"
        if simulated:
            sim = self.artefacts / "sim"
            (Path(self.scratch.name) / "simgpu.toml").write_text(SIMULATED % BELIEFS[beliefs])
            settings = {
                "SIMGPU_CONFIG": f"{self.scratch.name}/simgpu.toml",
                "SIMGPU_STATE": f"{self.scratch.name}/simgpu.state",
            }
            self.env.update(settings, LD_LIBRARY_PATH=str(sim))
            os.environ.update(settings)
            library = str(sim / library)
        try:
            self.nvml = Nvml(0, library)
        except NvmlError as error:
            raise Problem(
                f"no NVIDIA GPU here: {error}. `--simulated` tries the suite itself on the simulator."
            ) from None
        self.total = self.nvml.memory().total
        self.quota = quota or (1 << 30 if simulated else min(8 << 30, self.total // 4 >> 21 << 21))
        self.python = sys.executable
        # Those that the phase `limits` tries, and parts of `share`; None: all.
        self.apis = self.parts = None
        # Of the phase `share`: how long it may take, where its results go, the kernel's rounds in a
        # microsecond once they are measured.
        self.minutes = self.results = self.rounds = None
        self.found_in = 0.0
        self.torch = None if simulated else self._torch()

    def _torch(self):
        code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
        try:
            out = subprocess.run(
                [self.python, "-c", code], env=self.env, capture_output=True, text=True, timeout=180
            )
        except subprocess.TimeoutExpired:
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    def has_torch(self):
        """Whether PyTorch is there and sees the GPU."""
        return bool(self.torch) and self.torch.endswith("True")

    def facts(self):
        """For the report's head."""
        kind = "simulated (tests/sim), not a GPU" if self.simulated else self.nvml.name()
        rows = [
            ("GPU", kind),
            ("Memory", f"{self.total / (1 << 30):.1f} GiB"),
            ("Driver", self.nvml.driver()),
            ("PyTorch, its CUDA, usable", self.torch or "not there"),
            ("Kernel", os.uname().release),
            ("CPUs", os.cpu_count()),
            ("Quota of the tenants", f"{self.quota / (1 << 20):.0f} MiB"),
        ]
        version = subprocess.run(
            [self.artefacts / "tessera", "--version"], capture_output=True, text=True, check=False
        )
        return rows + [("Tessera", version.stdout.strip())]

    def environment(self, more=None):
        """Of children."""
        return dict(self.env, PYTHONPATH=str(GPU), **(more or {}))

    def held(self, command, quota=None, share=None):
        """`command`, held to a quota, and to a share (percent, policy), by `tessera run`."""
        held = [str(self.artefacts / "tessera"), "run", "--memory", str(quota or self.quota)]
        if share:
            held += ["--cores", str(share[0]), "--policy", share[1]]
        if self.simulated:
            held += ["--sim", "--context-overhead", "64MiB"]
        return held + ["--"] + command

    def probe(self, name, *args):
        """The command of a probe."""
        return [self.python, "-B", str(GPU / "probes" / name), *map(str, args)]

    def tenant(self, *args):
        """The command of the tenant."""
        return [str(self.artefacts / "tessera-tenant"), *map(str, args)]

    def run(self, command, env=None, timeout=120, watch=False):
        """Runs to the end. With `watch`, `peak` is the most that NVML showed beyond the start."""
        before = self.nvml.memory().used if watch else 0
        start, peak, over = time.monotonic(), [0], threading.Event()
        child = subprocess.Popen(
            command,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

        def look():
            while not over.wait(0.002):
                peak[0] = max(peak[0], self.nvml.memory().used - before)

        watcher = threading.Thread(target=look) if watch else None
        if watcher:
            watcher.start()
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # The whole session: `tessera run` passes on what it can, a killed one can't.
            os.killpg(child.pid, 9)
            out, err = child.communicate()
            err += f"\nkilled after {timeout} s"
        except BaseException:
            os.killpg(child.pid, 9)
            child.wait()
            raise
        finally:
            over.set()
            if watcher:
                watcher.join()
        return Outcome(child.returncode, out, err, time.monotonic() - start, peak[0])

    def quiet(self, seconds=5.0):
        """Waits until nothing of ours is on the GPU; returns the bytes in use then."""
        end = time.monotonic() + seconds
        try:
            while self.nvml.processes() and time.monotonic() < end:
                time.sleep(0.02)
        except NvmlError:
            # No process is shown; a moment must do.
            time.sleep(0.5)
        return self.nvml.memory().used

    def has_nvidia_smi(self):
        """Whether the tool is there (it is no part of the simulator)."""
        return not self.simulated and shutil.which("nvidia-smi", path=self.env.get("PATH"))
