"""The decisions about stopping are pure; the process exit is tried on real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import api

from tests.trainer.courses import card, worker_of
from trainer.contract.attempt import AttemptIdentity, ExitTime, Heartbeat, exit_code, request_stop
from trainer.contract.paths import RunPaths
from trainer.control import launcher
from trainer.control.control_signals import ControlSignals
from trainer.control.lifecycle import (
    HeartbeatWriter,
    SignalFlag,
    StopConditions,
    StopDecision,
    decide,
    look,
    write_end_marker,
    write_failure,
)

NO_SIGNS = (0, 0, 0)


def limits(
    tmp_path: Path, minutes: float | None = None, interval: int | None = None
) -> StopConditions:
    return StopConditions(tmp_path / "kill-switch", minutes, interval, start_time=1000.0)


def seen(
    tmp_path: Path, what: StopConditions, flag: SignalFlag | None = None, now: float = 1000.0
) -> tuple[int, int, int]:
    return look(what, flag or SignalFlag(), tmp_path / "stop-request.json", what.exit_time, now)


def test_nothing_there_is_nothing_seen(tmp_path):
    assert seen(tmp_path, limits(tmp_path)) == NO_SIGNS
    assert decide(NO_SIGNS, limits(tmp_path), 5, True, 1000.0) is None


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_kill_switch_of_any_kind_counts(tmp_path, make):
    make(tmp_path / "kill-switch")
    assert seen(tmp_path, limits(tmp_path)) == (1, 0, 0)


def test_a_signal_to_rank_zero_is_named(tmp_path):
    flag = SignalFlag()
    flag._handle(signal.SIGTERM, None)
    flag._handle(signal.SIGUSR1, None)  # the first one is kept
    decision = decide(seen(tmp_path, limits(tmp_path), flag), limits(tmp_path), 7, True, 1000.0)
    assert (decision.reason, decision.restart) == ("signal", True)
    assert "signal SIGTERM at iteration 7" in decision.line


def test_a_stop_request_counts_as_a_signal_and_is_kept(tmp_path):
    request = tmp_path / "stop-request.json"
    request_stop(request, "USR1 to the batch script")
    request_stop(request, "another")
    assert json.loads(request.read_text())["by"] == "USR1 to the batch script"
    assert (
        decide(seen(tmp_path, limits(tmp_path)), limits(tmp_path), 7, True, 1000.0).reason
        == "signal"
    )


def test_lines_are_the_originals(tmp_path):
    kill = decide([1, 0, 1], limits(tmp_path), 5, True, 1000.0)
    assert kill.line.startswith(
        f"[Detected kill switch at {tmp_path}/kill-switch. Exiting] datetime: "
    )
    assert kill.restart is False
    over = decide([0, 0, 1], limits(tmp_path, minutes=1.0), 5, True, 1000.0 + 90)
    assert over.line.startswith("[exiting program after 1.5 minutes] datetime: ")
    at = decide([0, 0, 0], limits(tmp_path, interval=10), 20, True, 1000.0)
    assert at.line.startswith("[exiting program at iteration 20] datetime: ")


def test_the_duration_counts_from_the_earliest_start(tmp_path):
    assert seen(tmp_path, limits(tmp_path, minutes=1.0), now=1059.0)[2] == 0
    assert seen(tmp_path, limits(tmp_path, minutes=1.0), now=1061.0)[2] == 1
    assert seen(tmp_path, limits(tmp_path), now=1e9)[2] == 0


def test_a_resume_at_a_multiple_of_the_exit_interval_trains_on(tmp_path):
    assert decide([0, 0, 0], limits(tmp_path, interval=10), 20, trained=False, now=1000.0) is None
    assert decide([0, 0, 0], limits(tmp_path, interval=10), 21, trained=True, now=1000.0) is None


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("finished", 0),
        ("kill-switch", 0),
        ("signal", 0),
        ("refused", 2),
        ("superseded", 2),
        ("error", 1),
    ],
)
def test_exit_codes(reason, code):
    assert exit_code(reason) == code


def test_a_heartbeat_comes_at_each_phase_and_once_a_second(tmp_path):
    now = [100.0]
    paths = RunPaths(tmp_path, "run", "main")
    writer = HeartbeatWriter(paths, 2, "42", clock=lambda: now[0])
    seen = []
    for phase, step in (("starting", 0.1), ("training", 0.1), ("training", 0.5), ("training", 0.6)):
        now[0] += step
        writer.beat(phase, len(seen))
        seen.append(Heartbeat.read(paths.heartbeat(2)).time)
    assert seen == pytest.approx([100.1, 100.2, 100.2, 101.3])
    assert not [path for path in paths.heartbeats.iterdir() if path.name != "2.json"]


def test_a_heartbeat_that_someone_waits_for_is_written_at_once(tmp_path):
    paths = RunPaths(tmp_path, "run", "main")
    writer = HeartbeatWriter(paths, 0, "42", clock=lambda: 100.0)
    for iteration in range(3):
        writer.beat("training", iteration, at_once=iteration == 2)
        assert Heartbeat.read(paths.heartbeat(0)).iteration == (0 if iteration < 2 else 2)


def test_a_heartbeat_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "state").write_text("a file where a folder should be")
    writer = HeartbeatWriter(RunPaths(tmp_path, "run", "main"), 0, "42")
    writer.beat("starting", 0)
    writer.beat("training", 0)
    assert capsys.readouterr().out.count("heartbeat cannot be written") == 1


def test_marker_and_failure_files(tmp_path):
    paths = RunPaths(tmp_path, "run", "main")
    attempt = AttemptIdentity("77", 2, paths.stop_request("77"))
    write_end_marker(paths, attempt, StopDecision("signal", True, "words"), 12, 10)
    value = json.loads(paths.end_marker("77").read_text())
    assert (value["reason"], value["iteration"], value["checkpoint_step"], value["launch"]) == (
        "signal",
        12,
        10,
        2,
    )
    write_failure(paths, attempt, 5, RuntimeError("boom"), 12)
    failure = json.loads((paths.attempt("77") / "failures" / "rank-5.json").read_text())
    assert failure["error"] == "RuntimeError: boom"
    assert failure["iteration"] == 12


def test_attempt_from_the_environment():
    paths = RunPaths(Path("/run"), "run", "main")
    attempt = AttemptIdentity.from_environment(
        {"TR11_JOB_ID": "8", "SLURM_JOB_ID": "9", "TR11_LAUNCH": "3"}, paths
    )
    assert attempt == AttemptIdentity("8", 3, Path("/run/state/attempts/8/stop-request.json"))
    assert AttemptIdentity.from_environment({"SLURM_JOB_ID": "9"}, paths).job_id == "9"
    assert AttemptIdentity.from_environment({}, paths).job_id == f"pid-{os.getppid()}"


def run_python(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_a_signal_before_the_slow_imports_is_remembered():
    child = run_python("""
        import os, signal, time
        from trainer.control.lifecycle import SignalFlag
        flag = SignalFlag(); flag.install()
        print("ready", flush=True)
        while flag.received is None: time.sleep(0.01)
        print(signal.Signals(flag.received).name, flush=True)
    """)
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGUSR1)
    assert child.communicate(timeout=300)[0] == "SIGUSR1\n"
    assert child.returncode == 0


@pytest.mark.parametrize("close", ["lambda: time.sleep(3600)", "lambda: 1 / 0", "lambda: None"])
def test_the_process_ends_whatever_hangs(close):
    child = run_python(f"""
        import threading, time
        from trainer.control.lifecycle import exit_process
        threading.Thread(target=time.sleep, args=(3600,)).start()  # a library's thread that never ends
        exit_process(3, {close}, patience_seconds=0.5)
    """)
    child.communicate(timeout=300)
    assert child.returncode == 3


def test_a_clock_set_back_does_not_silence_the_heartbeat(tmp_path):
    now = [100_000.0]
    paths = RunPaths(tmp_path, "run", "main")
    writer = HeartbeatWriter(paths, 0, "7", clock=lambda: now[0])
    writer.beat("training", 1)
    now[0] = 96_400.0
    writer.beat("training", 2)
    assert Heartbeat.read(paths.heartbeat(0)).iteration == 2


def test_a_receipt_is_written_at_once_and_kept(tmp_path):
    paths = RunPaths(tmp_path, "run", "main")
    writer = HeartbeatWriter(paths, 3, "7", clock=lambda: 50.0)
    writer.beat("training", 4)
    writer.acknowledge(0)  # made by hand: there is nothing to acknowledge
    assert Heartbeat.read(paths.heartbeat(3)).request == 0
    writer.acknowledge(77)
    beat = Heartbeat.read(paths.heartbeat(3))
    assert (beat.request, beat.phase, beat.iteration) == (77, "training", 4)
    writer.beat("saving", 4)
    assert Heartbeat.read(paths.heartbeat(3)).request == 77


def test_a_full_disk_under_the_log_ends_nothing():
    child = run_python("""
        import os, sys
        from trainer.control.lifecycle import exit_process; from trainer.contract.attempt import tell
        full = open("/dev/full", "w")
        os.dup2(full.fileno(), 1); os.dup2(full.fileno(), 2)
        tell("lost"); tell("lost too", sys.stderr)
        exit_process(3, lambda: 1 / 0)
    """)
    assert child.wait(timeout=300) == 3


# ----------------------------------------------------------------------------- exit time
# A trainer leaves by the limit of its job as that is now: earlier or later than its card says, or
# by no clock at all.

START = 1000.0


class Attempt:
    """The control signals of one attempt of one rank, whose card has it leave after ten minutes."""

    def __init__(self, folder: Path) -> None:
        config = card(folder, run={"exit_duration_minutes": 10.0})
        self.paths, self.now = config.paths, START
        worker = worker_of(config, "7", rank=0)
        worker.clock = self.clock
        self.signals = ControlSignals(worker, StopConditions.of(config, START), list)

    def clock(self) -> float:
        return self.now

    def leaves_at(self, now: float) -> bool:
        self.now = now
        decision = self.signals.agree(5, trained=True).decision
        assert decision is None or (decision.reason, decision.restart, decision.save) == (
            "exit-duration",
            True,
            True,
        )
        return decision is not None

    def tell(self, time: float | None) -> None:
        ExitTime(time, "a test").write(self.paths.exit_time("7"))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def test_without_a_word_the_card_counts(attempt: Attempt) -> None:
    assert not attempt.leaves_at(START + 599)
    assert attempt.leaves_at(START + 601)


def test_a_shortened_limit_is_heard(attempt: Attempt) -> None:
    assert not attempt.leaves_at(START + 100)
    attempt.tell(START + 150)
    assert not attempt.leaves_at(START + 149)
    assert attempt.leaves_at(START + 155)


def test_a_longer_limit_and_none_are_used(attempt: Attempt) -> None:
    attempt.tell(START + 5000)
    assert not attempt.leaves_at(START + 4999)
    attempt.tell(None)
    assert not attempt.leaves_at(START + 10**7)


@pytest.mark.parametrize("text", ["", "{", '{"time": "soon"}', '{"why": "no time"}'])
def test_what_cannot_be_read_changes_nothing(attempt: Attempt, text: str) -> None:
    attempt.tell(START + 200)
    assert not attempt.leaves_at(START + 100)
    attempt.paths.exit_time("7").write_text(text)
    assert not attempt.leaves_at(START + 190)
    assert attempt.leaves_at(START + 205)


# ----------------------------------------------------------------------------- launcher
# torchrun as the node agent starts it.


def test_a_store_that_left_first_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of node 0 has the store, and may be gone when another agent asks whether all have
    ended.
    """

    def barrier(**_: Any) -> None:
        raise DistNetworkError("failed to recv, got 0 bytes")

    agent: Any = SimpleNamespace(
        _worker_group=SimpleNamespace(state="SUCCEEDED", group_world_size=2),
        _exit_barrier_timeout=300,
        _store=None,
    )
    monkeypatch.setattr(api.store_util, "barrier", barrier)
    monkeypatch.setattr(launcher, "main", lambda _: api.SimpleElasticAgent._exit_barrier(agent))
    for kept in (launcher.PContext, "close"), (launcher.DefaultLogsSpecs, "reify"):
        monkeypatch.setattr(*kept, getattr(*kept))
    caplog.set_level("INFO", api.logger.name)
    monkeypatch.setattr(api.logger, "propagate", True)
    assert launcher.run([]) == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_taken_port_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torchrun of node 0 listens itself, before there is any worker: no worker can tell of it."""
    for kept in (launcher.PContext, "close"), (launcher.DefaultLogsSpecs, "reify"):
        monkeypatch.setattr(*kept, getattr(*kept))
    monkeypatch.setenv("TR11_NODE_NAME", "iam01")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = ["--nnodes=2", "--node-rank=0", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        port = f"--master-port={taken.getsockname()[1]}"
        assert launcher.run([*places, port, "--max-restarts=0", "-m", "trainer"]) == 1
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("tr11: ")]
    assert (
        line.startswith("tr11: the launcher on iam01 failed: DistNetworkError: ")
        and "EADDRINUSE" in line
    )
    assert "Traceback" not in said
