"""The suite's own logic, tried without a GPU or a driver: python3 -B tests/gpu/selftest.py

What judges stamps and shares is tried on known ones, what ends processes on processes that do not want to end, and
the MPS daemon's keeper on scripts in its place.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from suite import phase_speed  # noqa: E402
from suite.report import Report  # noqa: E402
from suite.share import children, decode, judge, leases, mps, tables  # noqa: E402
from suite.share.budget import Budget  # noqa: E402
from suite.share.results import Results  # noqa: E402


class Here:
    """As much of a machine as processes need."""

    def __init__(self, **env):
        self.env = env

    def environment(self, more=None):
        return {**os.environ, **self.env, **(more or {})}


def is_alive(pid):
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def is_gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


class Judging(unittest.TestCase):
    def test_a_handover_is_from_ones_last_end_to_the_others_first_begin(self):
        # From 100 on both have work, and until 1400.
        first = [(100, 200), (200, 300), (1000, 1100), (1100, 1200), (1600, 1700)]
        second = [(50, 90), (350, 450), (450, 900), (1300, 1400)]
        got = judge.of_stamps([first, second])
        self.assertEqual(got["handovers"], 3)
        self.assertEqual(got["handovers_overlapping_pct"], 0)
        self.assertAlmostEqual(got["handover_p50_us"], 0.1)
        self.assertAlmostEqual(got["gpu_busy_pct"], 100 * 1050 / 1300)

    def test_kernels_that_are_sliced_overlap(self):
        first = [(n, n + 400) for n in range(0, 40000, 400)]
        second = [(n + 10, n + 410) for n in range(0, 40000, 400)]
        got = judge.of_stamps([first, second])
        self.assertGreater(got["handovers_overlapping_pct"], 99)
        self.assertAlmostEqual(got["gpu_busy_pct"], 100)

    def test_tenants_without_stamps_are_not_judged(self):
        self.assertEqual(judge.of_stamps([[(1, 2)], []]), {})
        self.assertEqual(judge.of_stamps([]), {})

    def test_stamps_are_read_as_they_are_written(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(n.to_bytes(8, "little") for n in (30, 40, 10, 20)))
            file.flush()
            self.assertEqual(judge.read(Path(file.name)), [(10, 20), (30, 40)])

    def test_shares_are_of_what_all_got_and_caps_of_the_gpu(self):
        weights = [(80, "burst", 0), (20, "burst", 0)]
        got = leases.verdict(weights, [380.0, 100.0], [500.0, 500.0])
        self.assertAlmostEqual(got["together_pct"], 96)
        self.assertAlmostEqual(abs(got["share_error_pp"]), 80 - 100 * 76 / 96)
        caps = [(25, "strict", 0), (50, "burst", 0)]
        got = leases.verdict(caps, [130.0, 360.0], [500.0, 500.0])
        self.assertAlmostEqual(got["off_the_cap_pct_of_it"][0], 4)
        self.assertNotIn("share_error_pp", got)
        self.assertEqual(leases.verdict(weights, [1.0, 1.0], [None, None]), {})


class Costs(unittest.TestCase):
    def judged(self, folder, bare, solo, capped):
        """The verdicts on a batch of copies, of a child that says how long it takes by how it is held."""
        machine = Here()
        machine.artefacts, machine.simulated = Path(folder), False
        (machine.artefacts / "tessera-bench").touch()
        machine.held = lambda command, share=None: [capped if share else solo]
        said = lambda line: mock.Mock(stdout=str(line[0] if len(line) == 1 else bare), tail=lambda: "no such call")
        machine.run = lambda line, timeout: said(line)
        report = mock.Mock()
        phase_speed.batch(machine, report)
        return [call.args[1] for call in report.check.call_args_list], report.skip.called

    def test_a_question_for_each_copy_of_a_batch_is_refuted_where_it_is_asked(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self.judged(folder, 4000.0, 4050.0, 4090.0), ([True, True], False))
            self.assertEqual(self.judged(folder, 4000.0, 4050.0, 8900.0), ([True, False], False))
            self.assertEqual(self.judged(folder, 4000.0, 4200.0, 4090.0), ([False, True], False))
            self.assertEqual(self.judged(folder, "", 1.0, 1.0), ([], True))


class Writing(unittest.TestCase):
    def test_every_result_is_on_the_disk_at_once_and_in_the_report(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
            path = Path(folder) / "report.md"
            report = Report("Title", [("GPU", "a|b")], path)
            results = Results(report, path.with_suffix(".jsonl"), report.facts, True)
            report.attach(results.markdown)
            results.add("marks", "one", p50=12.345, _raw=[1])
            results.missing("marks", "two", "no | such thing")
            report.check("a check", True)
            lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
            self.assertEqual([line.get("case") for line in lines], [None, "one", "two"])
            self.assertEqual((lines[1]["p50"], lines[1]["raw"], lines[1]["gpu"]), (12.345, [1], "simulated"))
            text = path.read_text()
            for word in ("Figures of the simulator", "| one | 12.3 |", "- two: no \\| such thing"):
                self.assertIn(word, text)

    def test_decode_rows_become_tables_by_requests(self):
        row = {"sharing": "dedicated", "mode": "eager", "p50_pct": 100.0}
        text = "\n".join(tables.pivots([("a", {**row, "requests": 8}), ("b", {**row, "requests": 1})]))
        self.assertIn("| | 1 | 8 |", text)
        self.assertIn("| dedicated | 100.0 | 100.0 |", text)

    def test_time_that_is_left_over_goes_to_those_to_come(self):
        budget = Budget(1, [("a", 10), ("b", 30), ("c", 20)])
        self.assertAlmostEqual(budget.enter("a").allotted, 10, delta=0.5)
        budget.leave_out("b")
        self.assertAlmostEqual(budget.enter("c").allotted, 60, delta=0.5)
        self.assertTrue(Budget(0, [("a", 1)]).enter("a").is_over())


class Ending(unittest.TestCase):
    def child(self, script):
        return children.Child(Here(), "it", [sys.executable, "-c", script])

    def test_answers_are_found_and_a_process_that_ends_is_quoted(self):
        child = self.child(
            "import sys; print('noise'); print('{\"event\": \"ready\", \"pid\": 7}', flush=True)\n"
            "sys.stdin.readline(); print('{\"event\": \"failed\", \"reason\": \"no room\"}', flush=True)\n"
            "sys.stdin.readline(); sys.exit('over and out')"
        )
        self.assertEqual(child.expect("ready", 30)["pid"], 7)
        child.ask(do="it")
        with self.assertRaisesRegex(children.Failed, "no room"):
            child.expect("done", 30)
        child.ask(do="more")
        with self.assertRaisesRegex(children.Lost, "exit 1 before done: over and out"):
            child.expect("done", 30)
        child.end()

    def test_one_that_does_not_answer_is_ended_with_its_children(self):
        child = self.child(
            "import os, signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "p = subprocess.Popen(['sleep', '600'])\n"
            "print('{\"event\": \"ready\", \"pid\": %d}' % p.pid, flush=True); time.sleep(600)"
        )
        grandchild = child.expect("ready", 30)["pid"]
        with self.assertRaisesRegex(children.Lost, "no done in 0 s"):
            child.expect("done", 0.1)
        child.end(0.1)
        self.assertTrue(is_gone(child.process.pid) and is_gone(grandchild))
        self.assertNotIn(child, children.LIVING)


STUB = """#!/bin/sh
# In place of nvidia-cuda-mps-control: a daemon with one server, which a file asks to quit.
dir=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    [ -z "$STUB_FAILS" ] || { echo "no GPU for MPS" > $CUDA_MPS_LOG_DIRECTORY/control.log; exit 3; }
    setsid "$(dirname "$0")/nvidia-cuda-mps-server" &
    echo $! > $dir/server
    while [ ! -e $dir/quit ] || [ -n "$STUB_STAYS" ]; do sleep 0.05; done
    kill $(cat $dir/server)
else
    read line
    case $line in
        quit) touch $dir/quit ;;
        get_server_list) [ -n "$STUB_IDLES" ] || cat $dir/server ;;
    esac
fi
"""
SERVER = "#!/bin/sh\nwhile true; do sleep 0.05; done\n"


class Stubbed(unittest.TestCase):
    """Scripts in place of MPS."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def machine(self, **env):
        for name, text in ((mps.CONTROL, STUB), ("nvidia-cuda-mps-server", SERVER)):
            script = Path(self.folder.name) / name
            script.write_text(text)
            script.chmod(0o755)
        return Here(PATH=f"{self.folder.name}:{os.environ['PATH']}", **env)


class Daemon(Stubbed):
    def test_it_starts_and_quits(self):
        daemon = mps.Mps(self.machine())
        (server,) = daemon.look()
        self.assertTrue(is_alive(server))
        daemon.end()
        self.assertTrue(is_gone(daemon.process.pid) and is_gone(server))
        self.assertFalse(Path(daemon.directory.name).exists())

    def test_one_that_does_not_quit_is_ended_with_its_server(self):
        daemon = mps.Mps(self.machine(STUB_STAYS="1"))
        (server,) = daemon.look()
        with mock.patch.object(mps, "PATIENCE", 0.2):
            daemon.end()
        self.assertTrue(is_gone(daemon.process.pid) and is_gone(server))

    def test_where_there_is_none_or_it_fails_that_is_said(self):
        with self.assertRaisesRegex(mps.Unavailable, "no nvidia-cuda-mps-control on the PATH"):
            mps.Mps(Here(PATH=self.folder.name))
        with self.assertRaisesRegex(mps.Unavailable, "ended with 3: no GPU for MPS"):
            mps.Mps(self.machine(STUB_FAILS="1"))

    def test_a_pid_that_is_another_program_now_is_left_alone(self):
        other = subprocess.Popen(["sleep", "600"])
        mps.end_server(other.pid)
        self.assertTrue(is_alive(other.pid))
        other.send_signal(signal.SIGKILL)
        other.wait()


LOOP = """
import json, os, sys
def say(event, **more): print(json.dumps({"event": event, **more}), flush=True)
say("ready")
shared = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare" and (request["mode"], request["requests"]) == ("eager", 32):
        say("failed", reason="OutOfMemoryError: no room")
    elif request["do"] == "prepare":
        say("prepared")
    else:
        us = 2000.0 if shared else 1000.0
        say("measured", steps=10, tokens_per_s=1e6 / us, p50_us=us, p99_us=us, max_us=us)
"""


class Decoding(Stubbed):
    """The table of ways of sharing, with scripts for the decoder, for `tessera run` and for MPS."""

    def measured(self, **env):
        machine = self.machine(**env)
        machine.simulated, machine.quota, machine.nvml = True, 1 << 30, mock.Mock()
        machine.nvml.sm_clock.return_value = None
        machine.has_torch = lambda: True
        machine.probe = lambda *_: [sys.executable, "-c", LOOP]
        machine.held = lambda command, share: command
        path = Path(self.folder.name) / "report.md"
        results = Results(Report("", [("GPU", "none")], path), path.with_suffix(".jsonl"), [("GPU", "none")], True)
        slot = Budget.least(["decode"]).enter("decode")
        # As on a GPU, where MPS is tried.
        with mock.patch("builtins.print"), mock.patch.object(decode, "WITHOUT_MPS", None):
            decode.run(machine, results, slot)
        return results

    def test_each_way_is_compared_with_a_gpu_of_ones_own_and_a_cell_that_fails_costs_no_other(self):
        results = self.measured()
        rows = dict(results.rows["decode"])
        self.assertEqual(rows["dedicated, graphs, 8"]["p50_pct"], 100.0)
        self.assertEqual(rows["two, MPS, graphs, 32"]["throughput_pct"], 50.0)
        self.assertEqual(rows["two, MPS and leases 50/50, eager, 1"]["p50_pct"], 200.0)
        self.assertEqual(rows["two, leases 50/50, eager, 8"]["throughput_pct"], 100.0)
        self.assertEqual({reason for _, reason in results.gaps["decode"]}, {"tenant 0: OutOfMemoryError: no room"})
        self.assertEqual(len(results.gaps["decode"]), len(decode.SHARINGS))
        self.assertFalse(children.LIVING)

    def test_mps_that_does_not_start_is_tried_once_and_said_of_each_way(self):
        results = self.measured(STUB_FAILS="1")
        reasons = [reason for case, reason in results.gaps["decode"] if case.startswith("two, MPS")]
        self.assertEqual(len(reasons), 3)
        self.assertTrue(all("no GPU for MPS" in reason for reason in reasons), reasons)
        self.assertIn("two, leases 50/50, graphs, 8", dict(results.rows["decode"]))

    def test_tenants_that_mps_does_not_serve_are_not_said_to_be_its(self):
        results = self.measured(STUB_IDLES="1")
        reasons = [reason for case, reason in results.gaps["decode"] if case == "two, MPS"]
        self.assertRegex(reasons[0], "MPS has no server")


if __name__ == "__main__":
    unittest.main()
