"""The pieces of the agent that need no scheduler: evidence, command lines, process trees, the log tee, hung
workers, the folder of the compilers.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins

from tests.waiting import is_gone, until
from tr11ops.agent import allocation, worker_environment
from tr11ops.agent.allocation import Allocation, free_port, master_address, read_allocation
from tr11ops.agent.batch import read_resolved
from tr11ops.agent.exit_records import NodeSettings
from tr11ops.agent.lines import LONGEST_LINE, whole_lines
from tr11ops.agent.node import NodeTask, holder_of
from tr11ops.agent.step import LineTee, WorkerLaunch, srun_command
from tr11ops.agent.worker_environment import caches_folder, prepare_caches, worker_defaults
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Evidence
from tr11ops.diagnose.attribution.records import read_failures, read_reports
from tr11ops.health.base import EXIT_BAD_NODE
from tr11ops.rundir.attempts import of_marker
from tr11ops.trainers.trainer import NodePlaces
from trainer.config.card import CardError
from trainer.contract.attempt import EndMarker
from trainer.contract.state_file import read_json

ROOT = Path(__file__).parents[3]


def marker(reason: str) -> EndMarker:
    return EndMarker(reason, 12, 10, False, "words", 1.0, "node", "7")


def said_by(child):
    """The next line of its workers; that other trainings live on this machine is the agent's to say."""
    lines = iter(child.stdout.readline, "")
    return next(line for line in lines if "health check leftovers" not in line)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("finished", 0),
        ("exit-duration", 0),
        ("kill-switch", 0),
        ("signal", 0),
        ("refused", 2),
        ("error", 1),
    ],
)
def test_the_trainers_own_word_decides(reason, status):
    assert of_marker(marker(reason)).exit_status == status


def first_failure(attempt: Path) -> str:
    """What the attribution says of an attempt's records, where nothing else is known."""
    nodes = tuple(sorted({one.host for one in read_failures(attempt, 1)}))
    return attribute(Evidence(nodes=nodes, status=1, failures=read_failures(attempt, 1))).summary


def test_the_first_cause_is_quoted_and_half_records_skipped(tmp_path):
    folder = tmp_path / "failures"
    folder.mkdir()
    for rank, moment, error in (
        (3, 20.0, "RuntimeError: peer closed"),
        (5, 10.0, "MemoryError: no memory"),
    ):
        (folder / f"rank-{rank}.json").write_text(
            json.dumps({"rank": rank, "host": "x02", "time": moment, "error": error})
        )
    (folder / "rank-6.json").write_text('{"rank": 6')  # half a record
    assert first_failure(tmp_path) == "rank 5 on x02: MemoryError: no memory"


def test_allocation_of_an_array_task():
    environment = {
        "SLURM_JOB_ID": "105", "SLURM_ARRAY_JOB_ID": "103", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "x[1-2],y7",
    }  # fmt: skip
    assert read_allocation(environment, None) == Allocation(
        "slurm", "105", "103", 2, ("x1", "x2", "y7")
    )
    assert read_allocation({**environment, "TR11_SCHEDULER": "local"}, None).kind == "local"
    alone = read_allocation({}, 3)
    assert (alone.kind, len(alone.nodes), len(set(alone.nodes))) == ("foreground", 3, 3)
    with pytest.raises(RuntimeError, match="inside a job"):
        read_allocation({}, None)
    assert master_address(alone) == "127.0.0.1"


@pytest.mark.parametrize("given", ["32768\t60999\n", "15000 65535\n", "1024 65535\n", None])
def test_the_port_of_rank_0_is_none_that_srun_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """What asks for any port gets one of the kernel's range: a step's srun took rank 0's before it
    listened.
    """
    file = tmp_path / "ip_local_port_range"
    if given is not None:
        file.write_text(given)
    monkeypatch.setattr(allocation, "_GIVEN_PORTS", file)
    first_given = int(given.split()[0]) if given else 65_536
    ports = [free_port() for _ in range(200)]
    assert all(1024 <= port <= 65535 for port in ports)
    if first_given > allocation.FIRST_PORT:
        # two launches on a node seldom try the same
        assert max(ports) < first_given and len(set(ports)) > 100


def test_a_port_that_someone_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(allocation, "_GIVEN_PORTS", Path("/nowhere"))
        monkeypatch.setattr(allocation, "FIRST_PORT", port)
        monkeypatch.setattr(allocation, "LAST_PORT", port)
        assert free_port() != port


def test_srun_ends_the_whole_step_and_never_hides_a_dead_node():
    launch = WorkerLaunch(
        1,
        Path("/run/state/attempts/7"),
        Path("/run/card.json"),
        "7",
        ("x1", "x2"),
        8,
        "10.0.0.1",
        6000,
    )
    command = srun_command(launch)
    assert {"--wait=60", "--kill-on-bad-exit=1", "--ntasks-per-node=1"} <= set(command)
    assert "--no-kill" not in command
    assert command[command.index("--nodelist") + 1] == "x1,x2"


def test_torchrun_gets_a_static_rendezvous_and_no_restarts():
    task = NodeTask(Path("/a"), Path("/c.json"), "7", 1, NodePlaces(2, 1, 8, "10.0.0.1", 6000))
    assert {
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=8",
        "--max-restarts=0",
        "--tee=3",
    } <= set(task.command)
    assert task.command[-3:] == ["-m", "trainer", "/c.json"]
    environment = task.environment(NodeSettings())
    assert (environment["TR11_JOB_ID"], environment["TR11_LAUNCH"]) == ("7", "1")


def test_the_threads_of_another_trainer_are_not_counted_for_it(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    card = tmp_path / "card.json"
    card.write_text('{"trainer": {}}')
    task = NodeTask(tmp_path, card, "7", 1, NodePlaces(1, 0, 1, "127.0.0.1", 6000))
    assert "OMP_NUM_THREADS" not in task.environment(NodeSettings())
    card.write_text("{}")
    assert task.environment(NodeSettings())["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("text", [None, "", "[]", '{"run": 1}', "\x00"])
def test_an_unreadable_card_is_one_clear_refusal(tmp_path, text):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CardError):
        read_resolved(path)


def test_daemons_that_ignore_signals_are_ended():
    # The child makes a grandchild in a session of its own, which ignores TERM, then dies: the usual
    # way to escape.
    script = textwrap.dedent("""
        import json, subprocess, sys, time
        from tr11ops.base.processes import adopt_orphans, end_descendants
        adopt_orphans()
        stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
        parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True); print(p.pid, flush=True)"
        child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
        pid = int(child.stdout.readline()); assert child.stdout.readline() == "up\\n"
        child.wait()
        print(json.dumps([pid, end_descendants(0.5)]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    pid, ended = json.loads(done.stdout)
    assert ended == [pid]
    until(lambda: is_gone(pid), "the end of the daemon")


def test_tee_keeps_lines_whole_and_survives_a_full_disk(tmp_path, capfd):
    tee = LineTee(tmp_path / "logs" / "main_log.txt")
    seen = []
    tee.copy(io.BytesIO(b"one\n\xff two\nno end"), seen.append)
    assert (tmp_path / "logs" / "main_log.txt").read_bytes() == b"one\n\xff two\nno end\n"
    assert len(seen) == 3
    full = LineTee(Path("/dev/full"))
    full.line("first")
    full.line("second")
    shown = capfd.readouterr()
    assert "first\nsecond\n" in shown.out
    assert shown.err.count("cannot be written") == 1


class Chunks(io.RawIOBase):
    """A pipe out of which each read takes one chunk, one second after the other."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks, self.now = list(chunks), 0.0

    def read1(self, _size: int) -> bytes:
        self.now += 1.0
        return self.chunks.pop(0) if self.chunks else b""


def passed(*chunks: bytes) -> list[bytes]:
    stream = Chunks(list(chunks))
    return list(whole_lines(stream, lambda: stream.now))


def test_a_bar_is_passed_on_now_and_then_and_as_it_stood_before_another_line():
    bars = [b"\r %d%%|##| %d/100" % (number, number) for number in range(1, 14)]
    found = passed(b"[default1]:begins\n[default1]: 0%", *bars, b"\rTraceback\nnext\r\nend")
    assert found == [
        b"[default1]:begins\n", b"[default1]: 0%\n", b"[default1]: 5%|##| 5/100\n",
        b"[default1]: 10%|##| 10/100\n", b"[default1]: 13%|##| 13/100\n",
        b"[default1]:Traceback\n", b"next\n", b"end\n",
    ]  # fmt: skip
    assert passed(b"[default0]:\r 1%\r 2%\n") == [b"[default0]: 1%\n", b"[default0]: 2%\n"]
    assert passed(b"a\r", b"\nb\r\r", b"c") == [b"a\n", b"b\n", b"c\n"]
    assert passed(b"1%\r2%\r3%\r") == [b"1%\n", b"3%\n"], "its last state is not lost"


def test_a_line_without_an_end_comes_in_pieces():
    found = passed(*[b"x" * 50_000] * 5, b"\nend")
    assert b"".join(found).replace(b"\n", b"") == b"x" * 250_000 + b"end"
    assert max(map(len, found)) <= LONGEST_LINE + 1


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_lines_without_carriage_returns_are_passed_on_as_they_are(chunks):
    chunks = [chunk.replace(b"\r", b"") for chunk in chunks if chunk.replace(b"\r", b"")]
    whole = b"".join(chunks)
    expected = whole if not whole or whole.endswith(b"\n") else whole + b"\n"
    assert b"".join(passed(*chunks)) == expected


def test_the_batch_controller_outside_a_job_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tr11ops.agent.batch", "--card", str(tmp_path / "none.json")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SLURM_JOB_ID": ""}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_signal_reaches_the_agent_as_a_request(tmp_path):
    # A stand-in for torchrun on PATH would prove nothing of torchrun: the whole chain is proved by
    # the end-to-end tests. Here only: the agent's own handler turns USR1 into the file that the
    # trainer polls.
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tr11ops.agent import node
        node.NodeTask.command = property(lambda self: [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3)"])
        task = node.NodeTask(Path({str(tmp_path)!r}), Path("c"), "7", 1, node.NodePlaces(1, 0, 1, "127.0.0.1", 1))
        sys.exit(node.run(task))
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert said_by(child) == "up\n"
    os.kill(child.pid, signal.SIGUSR1)
    until((tmp_path / "stop-request.json").exists, "the request to stop")
    child.communicate(timeout=300)
    assert child.returncode == 0
    assert "signal" in json.loads((tmp_path / "stop-request.json").read_text())["by"]


def record(folder: Path, name: str, **value: object) -> None:
    (folder / "failures").mkdir(exist_ok=True)
    (folder / "failures" / f"{name}.json").write_text(json.dumps(value))


def test_a_killed_process_comes_before_the_peers_that_lost_it(tmp_path):
    record(
        tmp_path,
        "rank-0",
        rank=0,
        host="x01",
        time=5.0,
        error="RuntimeError: Connection closed by peer",
    )
    record(
        tmp_path,
        "killed-3",
        rank=3,
        host="x02",
        time=5.4,
        error="the worker was ended by SIGKILL",
        signal=9,
    )
    record(
        tmp_path,
        "launcher-x03",
        rank=None,
        host="x03",
        time=9.0,
        error="torchrun was ended by SIGKILL",
        signal=9,
    )
    assert first_failure(tmp_path) == "rank 3 on x02: the worker was ended by SIGKILL"


def node_agent(
    tmp_path: Path, torchrun: str, prelude: str = "", node_rank: int = 1, port: int = 1
) -> subprocess.Popen[str]:
    """A real node agent around a stand-in for torchrun (a Python program)."""
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tr11ops.agent import node
        {prelude}
        node.NodeTask.command = property(lambda self: [sys.executable, "-u", "-c", {torchrun!r}])
        sys.exit(node.run(node.NodeTask(Path({str(tmp_path)!r}), Path("c"), "7", 1, node.NodePlaces(2, {node_rank}, 4, "127.0.0.1", {port}))))
    """)
    environment = {**os.environ, "TR11_NODE_NAME": "x02"}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def test_a_trainer_that_stays_after_its_end_marker_is_ended(tmp_path):
    (tmp_path / "end.json").write_text(json.dumps({**to_builtins(marker("finished")), "launch": 1}))
    child = node_agent(
        tmp_path,
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)",
        "node.QUIT_SECONDS = 0.5",
    )
    shown, _ = child.communicate(timeout=300)
    assert child.returncode == 0  # the work is done: what hangs after it is no failure
    assert "its processes stay: ending them" in shown
    pids = [int(line) for line in shown.splitlines() if line.isdigit()]
    assert len(pids) == 2
    until(lambda: all(is_gone(pid) for pid in pids), "the end of both")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("failed (exitcode: -9) local_rank: 2 (pid: 77) of binary: python", "SIGKILL"),
        # a real-time signal has no name of its own; the reading of the workers' lines goes on
        ("failed (exitcode: -37) local_rank: 2 (pid: 77) of binary: python", "SIGRTMIN+3"),
        ("tr11: worker 6 (process 77) failed: ended by SIGRTMIN+3", "SIGRTMIN+3"),
        ("tr11: worker 6 (process 77) failed: ended by SIGKILL", "SIGKILL"),
    ],
)
def test_a_worker_that_was_killed_is_named_by_rank_and_host(tmp_path, line, name):
    child = node_agent(tmp_path, f"print({line!r}); print('read on'); raise SystemExit(1)")
    shown, _ = child.communicate(timeout=300)
    assert child.returncode == 1 and "read on" in shown, shown
    assert first_failure(tmp_path) == f"rank 6 on x02: the worker was ended by {name}"


def test_a_torchrun_that_fails_itself_is_recorded_with_who_holds_the_port(tmp_path):
    said = "DistNetworkError: port: 4, code: -98, name: EADDRINUSE"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = f"tr11: the launcher on x02 failed: {said}"
        child = node_agent(
            tmp_path, f"print({line!r}); raise SystemExit(1)", node_rank=0, port=port
        )
        assert child.wait(timeout=300) == 1
    assert first_failure(tmp_path) == f"x02: {said}"
    [report] = read_reports(tmp_path, 1)
    process = psutil.Process()
    assert report.port_holder == f"process {process.pid} ({process.name()}) of {process.username()}"
    assert holder_of(port) == ""  # it is gone


@pytest.mark.parametrize("is_own", [False, True])
def test_a_failure_is_on_record_before_all_that_stays_is_gone(tmp_path: Path, is_own: bool) -> None:
    """The agent may be killed before that. A port that its own launcher holds is taken by no one."""
    line = "tr11: worker 0 (process 7) failed: exit status 1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if is_own:
            taken.close()
        listen = f"import socket; held = socket.create_server(('127.0.0.1', {port})); "
        stays = f"print({line!r}, flush=True); import time; time.sleep(600)"
        child = node_agent(tmp_path, f"{listen if is_own else ''}{stays}", node_rank=0, port=port)
        path = tmp_path / "nodes" / "x02.json"

        def failures() -> list[dict[str, Any]]:
            value = read_json(path) or {}
            found: list[dict[str, Any]] = value.get("failed_workers", [])
            return found

        try:
            until(failures, "the failure on record")
        finally:
            child.kill()
            child.wait()
    process = psutil.Process()
    who = f"process {process.pid} ({process.name()}) of {process.username()}"
    [report] = read_reports(tmp_path, 1)
    assert report.port_holder == ("" if is_own else who)
    assert [one["how"] for one in failures()] == ["exit status 1"]


def test_a_bad_node_stays_until_the_others_have_told_how_their_checks_ended(tmp_path: Path) -> None:
    bad = "node.check_node = lambda *_: (node.CheckResult('fans', node.CheckOutcome.BAD, 'slow'),)"
    child = node_agent(tmp_path, "raise SystemExit(0)", f"{bad}; node.OTHERS_SECONDS = 600.0")
    own = tmp_path / "nodes" / "x02.json"
    (tmp_path / "nodes").mkdir()
    until(lambda: own.exists() and json.loads(own.read_text())["checks"], "its own word")
    assert child.poll() is None and json.loads(own.read_text())["end"] is None
    other = {
        "node": "x01",
        "launch": 1,
        "checks": [{"name": "fans", "result": "bad", "why": "slow"}],
    }
    (tmp_path / "nodes" / "x01.json").write_text(json.dumps(other))
    assert child.wait(timeout=300) == EXIT_BAD_NODE
    assert {report.node for report in read_reports(tmp_path, 1) if report.bad_checks} == {
        "x01",
        "x02",
    }


def test_a_killed_torchrun_is_recorded(tmp_path):
    assert node_agent(tmp_path, "import os; os.kill(os.getpid(), 9)").wait(timeout=300) == 137
    assert first_failure(tmp_path) == "x02: torchrun was ended by SIGKILL"


def test_usr1_to_the_whole_step_leaves_torchrun_alone(tmp_path):
    child = node_agent(tmp_path, "import os; os.kill(os.getpid(), 10); print('alive')")
    assert "alive" in child.communicate(timeout=300)[0]
    assert child.returncode == 0


def test_without_a_folder_a_stop_request_becomes_a_signal(tmp_path):
    worker = "import signal, sys, time; signal.signal(10, lambda *_: sys.exit(0)); print('up'); time.sleep(60); sys.exit(5)"
    child = node_agent(
        tmp_path,
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-u', '-c', {worker!r}]))",
        "def full(path, who): raise OSError(28, 'No space left on device')\n        node.request_stop = full",
    )
    assert said_by(child) == "up\n"
    child.send_signal(signal.SIGUSR1)
    assert "No space left" in child.communicate(timeout=300)[0]
    assert child.returncode == 0


def test_an_agent_without_its_controller_ends_the_workers(tmp_path):
    child = node_agent(
        tmp_path, "import time; print('up'); time.sleep(600)",
        'import os; os.environ["TR11_CONTROLLER_PID"] = "1"',
    )  # fmt: skip
    child.communicate(timeout=300)
    assert child.returncode == 1


def test_torchrun_does_not_outlive_a_killed_agent(tmp_path):
    child = node_agent(tmp_path, "import os, time; print(os.getpid()); time.sleep(600)")
    pid = int(said_by(child))
    child.kill()
    child.wait()
    until(lambda: is_gone(pid), "the end of torchrun")
    child.stdout.close()


# Both install the trainer's handlers, and then hang where Python never runs again: rank 0 in C with
# the interpreter's lock held, as in an operation between ranks; rank 1 stopped by the kernel.
# NCCL's watchdog ends rank 0 by SIGABRT.
WORKER = """
import ctypes, os, signal, subprocess, sys
from contextlib import suppress
from pathlib import Path
from trainer.control.lifecycle import SignalFlag

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
SignalFlag().install()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
program = "while test ! -s $1/pid-1; do :; done; kill -ABRT $2"
subprocess.Popen(["sh", "-c", program, "sh", str(folder), str(os.getpid())])
ctypes.PyDLL(None).sleep(600)
"""


def test_workers_that_hear_no_signal_are_ended_and_named(tmp_path: Path) -> None:
    card = {
        "slurm": {"gpus_per_node": 0},
        "resilience": {"end_within_seconds": 4, "skip_checks": []},
    }
    (tmp_path / "card.json").write_text(json.dumps(card))
    (tmp_path / "worker.py").write_text(WORKER)
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tr11ops.agent import node
        launcher = [sys.executable, "-u", "-m", "trainer.control.launcher", "--nnodes=1", "--nproc-per-node=2",
                    "--master-port=0", "--max-restarts=0", {str(tmp_path / "worker.py")!r}, {str(tmp_path)!r}]
        node.NodeTask.command = property(lambda self: launcher)
        folder = Path({str(tmp_path)!r})
        sys.exit(node.run(node.NodeTask(folder, folder / "card.json", "7", 1, node.NodePlaces(1, 0, 2, "127.0.0.1", 1))))
    """)
    environment = {**os.environ, "TR11_NODE_NAME": "x01", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    shown, _ = child.communicate(timeout=300)
    assert child.returncode != 0, shown
    assert (tmp_path / "failures" / "killed-0-x01.json").exists(), shown
    death = json.loads((tmp_path / "failures" / "killed-0-x01.json").read_text())
    assert (death["rank"], death["host"], death["launch"]) == (0, "x01", 1) and "SIGABRT" in death[
        "error"
    ]
    assert "a worker failed, but the others stay: ending them" in shown
    workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    until(lambda: all(map(is_gone, workers)), "the end of both workers")


@pytest.mark.parametrize(("gpus", "tensor"), [(0, 2), (8, 1), (8, 4)])
def test_what_workers_get_unless_it_is_set(gpus: int, tensor: int) -> None:
    attempt, temporary = Path("/run/state/attempts/7"), Path("/node")
    found = worker_defaults({}, attempt, 2, temporary, gpus=gpus, tensor=tensor)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert found[name].startswith("/node/")
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in found) == (gpus > 0 and tensor > 1)
    if gpus:
        assert (
            found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
            and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        )
        assert (
            found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{attempt}/flight-recorder/launch-2-rank-"
        )
        renamed = worker_defaults(
            {}, attempt, 2, temporary, gpus=gpus, tensor=tensor, torch="2.13.0+cpu"
        )
        assert {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"} < set(renamed)
        assert set(found) - set(renamed) == {
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        }
    assert "CUDA_LAUNCH_BLOCKING" not in found
    assert worker_defaults(found, attempt, 2, temporary, gpus=gpus, tensor=tensor) == {}


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert prepare_caches(tmp_path)
    assert caches_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    caches_folder(tmp_path).chmod(0o777)
    assert prepare_caches(tmp_path)
    assert caches_folder(tmp_path).stat().st_mode & 0o022 == 0


def test_another_users_folder_or_a_link_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anyone may have made it before, and code is loaded from it."""
    place = caches_folder(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    assert not prepare_caches(tmp_path)
    place.unlink()
    place.mkdir()
    monkeypatch.setattr(worker_environment.os, "geteuid", lambda: os.getuid() + 1)
    caches_folder(tmp_path).mkdir()  # made by who we no more are
    assert not prepare_caches(tmp_path)


def test_what_was_not_used_for_a_day_goes_where_it_has_grown_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_environment, "MOST_BYTES", 250)
    folder = caches_folder(tmp_path) / "inductor"
    folder.mkdir(parents=True)
    for name, days in (("oldest", 9), ("old", 5), ("new", 0), ("newer", 0)):
        (folder / name).write_bytes(bytes(100))
        then = time.time() - days * 86400
        os.utime(folder / name, (then, then))
    assert prepare_caches(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["new", "newer"]
    monkeypatch.setattr(worker_environment, "MOST_BYTES", 50)
    assert prepare_caches(tmp_path)  # what may be in use stays
    assert len(list(folder.iterdir())) == 2
