"""Processes that measure at the same moments, asked by JSON lines; ended by their process groups."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time

# All that live, so that none is left behind whatever fails.
LIVING = set()


class Lost(Exception):
    """A process ended, or did not answer, and what it said."""


class Failed(Exception):
    """A process could not do what it was asked for, and lives on."""


class Child:
    """One process with its group."""

    def __init__(self, machine, name, command, env=None):
        self.name = name
        self.said = tempfile.TemporaryFile(mode="w+")
        self.lines, self.pid = queue.Queue(), None
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=machine.environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            start_new_session=True,
        )
        LIVING.add(self)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                pass
        self.lines.put(None)

    def tail(self):
        """The end of its standard error."""
        self.said.seek(0)
        return " / ".join(self.said.read().strip().splitlines()[-3:])[-400:]

    def expect(self, event, timeout):
        """The next object of that event."""
        end = time.monotonic() + timeout
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise Lost(f"{self.name}: no {event} in {timeout:.0f} s: {self.tail()}") from None
            if line is None:
                code = self.process.wait()
                raise Lost(f"{self.name}: exit {code} before {event}: {self.tail()}")
            if not isinstance(line, dict):
                continue
            self.pid = line.get("pid", self.pid)
            if line.get("event") == event:
                return line
            if line.get("event") == "failed":
                raise Failed(f"{self.name}: {line.get('reason')}")

    def ask(self, **request):
        """Sends a request."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Lost(f"{self.name}: {error}: {self.tail()}") from None

    def let_go(self):
        """The end of its input: it ends by itself."""
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def end(self, grace=4.0):
        """It ends, or is ended with all of its group."""
        self.let_go()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            for sig, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
                self._kill(sig)
                try:
                    self.process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    pass
        # Its leader is gone; whoever else was of the group must not stay.
        self._kill(signal.SIGKILL)
        LIVING.discard(self)
        self.reader.join(5)
        # A process that left the group may have it still.
        if not self.reader.is_alive():
            self.process.stdout.close()
        self.said.close()

    def _kill(self, sig):
        try:
            os.killpg(self.process.pid, sig)
        except (ProcessLookupError, PermissionError):
            pass


def end_all():
    """Whatever still runs."""
    for child in list(LIVING):
        child.let_go()
    for child in list(LIVING):
        child.end(1.0)


class Group:
    """Processes that begin and end together."""

    def __init__(self, machine, commands, env=None, timeout=60):
        """`commands`: [(name, command)]; waits until all are ready."""
        self.children = []
        try:
            for name, command in commands:
                self.add(machine, name, command, env, ready=False)
            for child in self.children:
                child.expect("ready", timeout)
        except BaseException:
            self.end()
            raise

    def add(self, machine, name, command, env=None, ready=True, timeout=30):
        """One more, by default waited for until it is ready."""
        child = Child(machine, name, command, env)
        self.children.append(child)
        if ready:
            child.expect("ready", timeout)
        return child

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """All."""
        for child in self.children:
            child.let_go()
        for child in self.children:
            child.end()

    def ask_all(self, request, event, timeout, children=None):
        """The same of each; their answers in order. All have answered where one failed."""
        children, answers, failed = children or self.children, [], None
        for child in children:
            child.ask(**request)
        for child in children:
            try:
                answers.append(child.expect(event, timeout))
            except Failed as error:
                failed = failed or error
        if failed:
            raise failed
        return answers

    def measure(self, seconds, timeout=30, children=None, warm=0.2):
        """What each did between the same two moments; work begins `warm` seconds before."""
        begin = time.monotonic_ns() + int(warm * 1e9)
        request = {"do": "measure", "begin": begin, "end": begin + int(seconds * 1e9)}
        return self.ask_all(request, "measured", warm + seconds + timeout, children)
