"""NVIDIA's MPS daemon as an ordinary process with directories of its own; it leaves when the suite does."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
# How long it may take to quit, seconds.
PATIENCE = 10


class Unavailable(Exception):
    """It cannot be had here, and why."""


class Mps:
    """The daemon, in the foreground, so that its pid is known; its servers are asked for."""

    def __init__(self, machine):
        self.env = machine.environment()
        control = shutil.which(CONTROL, path=self.env.get("PATH"))
        if not control:
            raise Unavailable(f"no {CONTROL} on the PATH")
        self.control, self.servers = control, set()
        # Its sockets' paths have room for 108 bytes.
        self.directory = tempfile.TemporaryDirectory(prefix="mps.", dir="/tmp")
        self.settings = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.directory.name}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self.directory.name}/log",
        }
        for path in self.settings.values():
            os.mkdir(path)
        self.env.update(self.settings)
        self.process = subprocess.Popen(
            [control, "-f"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def _wait(self):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Unavailable(f"{CONTROL} -f ended with {self.process.returncode}: {self.log()}")
            if self.say("get_server_list", 3) is not None:
                return
            time.sleep(0.2)
        raise Unavailable(f"{CONTROL} does not answer: {self.log()}")

    def say(self, line, timeout=10):
        """What the daemon answers; None where it does not."""
        try:
            out = subprocess.run(
                [self.control],
                input=line + "\n",
                env=self.env,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return None
        return out.stdout if out.returncode == 0 else None

    def look(self):
        """Remembers its servers, so that they can be ended should the daemon die before them."""
        found = (self.say("get_server_list") or "").split()
        self.servers |= {int(word) for word in found if word.isdigit()}
        return self.servers

    def log(self):
        """The end of what it and its servers wrote."""
        said = []
        for path in sorted(Path(self.settings["CUDA_MPS_LOG_DIRECTORY"]).glob("*.log")):
            said += path.read_text(errors="replace").strip().splitlines()[-2:]
        return " / ".join(said)[-400:] or "no log"

    def end(self):
        """Asked to quit; what is still there then is ended by its pid."""
        if self.process.poll() is None:
            self.look()
            self.say("quit", 15)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        for server in self.servers:
            end_server(server)
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sig)
                self.process.wait(3)
            except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                pass
        self.process.wait(10)
        self.directory.cleanup()


def end_server(pid):
    """A server that outlived its daemon: if the pid is still such a server's."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return
    # The kernel keeps 15 bytes of a name.
    if not name.startswith("nvidia-cuda-mps"):
        return
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, sig)
        except (ProcessLookupError, PermissionError):
            return
        end = time.monotonic() + 3
        while time.monotonic() < end and Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
