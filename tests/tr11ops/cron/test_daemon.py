"""The daemon: goes on where another was killed, ends after the running job, and two of them start a
round once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.cron.looking import state_of
from tests.tr11ops.cron.rounds import job, place, run_directory
from tests.waiting import until
from tr11ops.cron import daemon as module
from tr11ops.cron.daemon import Daemon, RecordTrigger
from tr11ops.cron.jobs import Every, PeriodicJob
from tr11ops.rundir.attempts import of_failure
from tr11ops.rundir.claims import ClaimFolder
from tr11ops.rundir.cron_records import PeriodicJobState, write_job

NOW = 1_795_289_822.25
STATE = PeriodicJobState("pulse", "daemon", "login1", NOW, None, 0, "", 3600.0, 1, 0, NOW)


def start(folder: Path, seconds: float, script: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.tr11ops.cron.rounds",
        "daemon",
        str(folder),
        str(seconds),
        script,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()  # from then on it obeys signals
    if first != "ready\n":
        process.kill()
        pytest.fail(first + process.communicate()[0])
    return process


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# ----------------------------------------------------------------------------- when it fires
def test_the_first_firing_follows_the_record() -> None:
    never = RecordTrigger(Every(3600), lambda: None)
    assert never.get_next_fire_time(None, moment(NOW)) == moment(NOW)
    ran = RecordTrigger(Every(3600), lambda: NOW - 60)
    assert ran.get_next_fire_time(None, moment(NOW)) == moment(1_795_291_200)
    missed = RecordTrigger(Every(3600), lambda: NOW - 1e6)
    assert missed.get_next_fire_time(None, moment(NOW)) == moment(NOW)


def test_a_record_that_cannot_be_read_is_tried_again() -> None:
    def broken() -> float:
        raise OSError(5, "Input/output error")

    found = RecordTrigger(Every(3600), broken).get_next_fire_time(None, moment(NOW))
    assert found == moment(NOW + module.AGAIN_SECONDS)


@settings(deadline=None)
@given(st.floats(0, 1e7), st.sampled_from([1.0, 60.0, 3600.0]))
def test_after_a_long_sleep_it_fires_once(asleep: float, period: float) -> None:
    trigger = RecordTrigger(Every(period), lambda: None)
    following = trigger.get_next_fire_time(moment(NOW), moment(NOW + asleep)).timestamp()
    assert NOW + asleep < following <= NOW + asleep + 1.1 * period + 1e-3
    assert following % period == 0


# ----------------------------------------------------------------------------- real processes
def test_two_daemons_start_each_round_once_and_a_third_goes_on(tmp_path: Path) -> None:
    script = "mkdir busy || echo two at once >> wrong; echo x >> runs; sleep 0.05; rmdir busy"
    began = time.time()
    daemons: list[subprocess.Popen[str]] = []
    try:
        daemons += [start(tmp_path, 0.3, script), start(tmp_path, 0.3, script)]
        until(lambda: lines(tmp_path / "runs") >= 3)
        daemons[0].kill()
        daemons[0].wait()
        before = lines(tmp_path / "runs")
        until(lambda: lines(tmp_path / "runs") >= before + 2)
        daemons.append(start(tmp_path, 0.3, script))
        until(lambda: lines(tmp_path / "runs") >= before + 4)
        for process in daemons[1:]:
            process.send_signal(signal.SIGTERM)
        for process in daemons[1:]:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and out.endswith("ended\n")
    finally:
        for process in daemons:
            process.kill()
            process.wait()
    points = (time.time() - began) / 0.3 + 2
    state = state_of(tmp_path)
    # each of its own; of the killed daemon's last one, the record may be all there is
    assert lines(tmp_path / "runs") <= state.runs <= min(points, lines(tmp_path / "runs") + 1)
    assert state.ended is not None
    assert not (tmp_path / "wrong").exists()


def test_a_signal_waits_for_the_running_job_and_starts_no_other(tmp_path: Path) -> None:
    process = start(
        tmp_path, 3600, "touch started; while [ ! -e go ]; do sleep 0.02; done; touch done"
    )
    try:
        until((tmp_path / "started").exists)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        (tmp_path / "go").touch()
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "done").exists() and state_of(tmp_path).exit_code == 0
    claim = ClaimFolder(run_directory(tmp_path), "pulse").newest()
    assert claim is not None and not claim.held


def test_a_second_signal_ends_the_job_too(tmp_path: Path) -> None:
    process = start(tmp_path, 3600, "touch started; sleep 600")
    try:
        until((tmp_path / "started").exists)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.communicate()
    assert state_of(tmp_path).message == "it was ended with what ran it"


# ---------------------------------------------------------------------------- what changes under it
def run_daemon_until(there: Daemon, condition: object) -> None:
    import threading

    thread = threading.Thread(target=there.run)
    thread.start()
    try:
        until(condition)  # type: ignore[arg-type]
    finally:
        there.stop()
        thread.join(300)
    assert not thread.is_alive()


def test_a_changed_card_changes_the_jobs_a_broken_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    said: list[str] = []
    answers: list[object] = [
        ValueError("the card is not TOML"),
        (job("pulse"), job("digest")),
        None,
    ]

    def reload() -> tuple[PeriodicJob, ...] | None:
        answer = answers.pop(0) if len(answers) > 1 else None
        if isinstance(answer, ValueError):
            raise answer
        return answer  # type: ignore[return-value]

    there = Daemon(place(tmp_path, "true"), (job("pulse"),), said.append, reload)
    record = run_directory(tmp_path).paths.state / "cron" / "digest.json"
    run_daemon_until(there, record.exists)
    # it was not started again when the jobs were set up again
    assert state_of(tmp_path, "pulse").runs == 1
    assert any("not TOML" in line for line in said) and "the card has changed" in said


def test_a_clock_that_is_set_back_by_hours_starts_the_job_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """APScheduler alone would wait for a time of the old clock."""
    monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    said: list[str] = []
    offset = [0.0]
    there = Daemon(
        place(tmp_path, "true", clock=lambda: NOW + offset[0]), (job("pulse"),), said.append
    )
    over: list[
        object
    ] = []  # rounds that the scheduler no longer counts as running: before, the next one is left out
    there._scheduler.add_listener(over.append, EVENT_JOB_EXECUTED)

    class Now(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(NOW + offset[0], UTC)

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Now)
    monkeypatch.setattr(
        module,
        "time",
        type("Clock", (), {"time": lambda: NOW + offset[0], "monotonic": lambda: 0.0}),
    )

    def set_back_after_the_first_round() -> bool:
        record = run_directory(tmp_path).paths.state / "cron" / "pulse.json"
        if over and not offset[0]:
            offset[0] = -5 * 3600.0
        return record.exists() and state_of(tmp_path).runs == 2

    run_daemon_until(there, set_back_after_the_first_round)
    assert "the clock was set" in said


# ---------------------------------------------------------------------------- a look that comes early
def test_an_attempt_that_ends_is_looked_at_before_the_next_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run went down, and no one was told of it for almost five minutes."""
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    directory = run_directory(tmp_path)
    attempt = directory.paths.attempt("12")
    offset = [0.0]
    rounds: list[int] = []
    there = Daemon(
        place(tmp_path, "true", clock=lambda: time.time() + offset[0]),
        (job(watches=True), job("digest")),
        lambda text: rounds.append(state_of(tmp_path).runs) if "pulse" in text else None,
    )
    looked = there._look_early
    looks: list[int] = []
    monkeypatch.setattr(there, "_look_early", lambda job: (looked(job), looks.append(1)))

    def some_looks() -> bool:
        """After more of them than it takes to begin a round that was not to begin."""
        looks.clear()
        until(lambda: len(looks) > 20)
        return True

    def story() -> bool:
        until(lambda: rounds == [1] and state_of(tmp_path).ended is not None)
        attempt.mkdir(parents=True)
        replace(of_failure("software", 74, 50), time=time.time()).write(attempt)
        assert some_looks() and rounds == [1], "at most once a minute"
        offset[0] = 61.0
        until(lambda: rounds == [1, 2])
        assert some_looks() and rounds == [1, 2]
        offset[0] = 122.0
        assert some_looks() and rounds == [1, 2], "it looked a minute after the end"
        return True

    run_daemon_until(there, story)
    assert state_of(tmp_path, "digest").runs == 1
    assert state_of(tmp_path).interval_seconds == 3600


@pytest.mark.parametrize(
    ("end", "started", "is_early"),
    [
        (None, -200.0, False),
        (-3.0, -200.0, False),  # its job has still to leave the queue
        (-6.0, -200.0, True),
        (-6.0, -30.0, False),  # at most once a minute
        (-70.0, -61.0, True),  # the job may have left only then
        (-200.0, -100.0, False),
        (3600.0, -200.0, False),  # the file system's clock is ahead
    ],
)
def test_when_it_looks_early(
    tmp_path: Path, end: float | None, started: float, is_early: bool
) -> None:
    there = place(tmp_path, "true", clock=lambda: NOW)
    write_job(there.directory, replace(STATE, started=NOW + started, ended=NOW + started))
    if end is not None:
        for name in ("11", "12"):
            folder = there.directory.paths.attempt(name)
            folder.mkdir(parents=True)
            replace(of_failure("software", 74, 50), time=NOW + end).write(folder)
    begun: list[str] = []
    looking = Daemon(there, (), print)
    looking._scheduler.add_job = lambda *_, id, **__: begun.append(id)
    looking._look_early(job(watches=True))
    assert begun == (["early look"] if is_early else [])
    write_job(there.directory, replace(STATE, started=NOW + started))
    looking._look_early(job(watches=True))
    assert len(begun) == is_early, "one that runs is waited for"
