"""One round: on record before and after, ended in time, its output bounded, never two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cron.looking import state_of
from tests.tr11ops.cron.rounds import job, place, run_directory
from tests.waiting import until
from tr11ops.cluster.local_records import mark
from tr11ops.cron.output import HEAD_BYTES, LARGEST_LOG_BYTES, TAIL_BYTES
from tr11ops.cron.runner import CUT_OFF, failure, run_due, run_job
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.cron_records import PeriodicJobState, job_file, read_job, write_job
from tr11ops.rundir.fallback import VARIABLE

NOW = 1_795_289_822.25
HOUR = 3600.0


class Clock:
    def __init__(self, now: float = NOW):
        self.now = now

    def __call__(self) -> float:
        return self.now


def log_of(folder: Path, name: str = "pulse") -> str:
    return (run_directory(folder).paths.state / "cron" / f"{name}.log").read_text()


# ----------------------------------------------------------------------------- what a round leaves
def test_a_round_is_on_record_and_comes_once_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    there = place(tmp_path, "echo hello; echo x >> runs", clock=clock)
    assert [done.result for done in run_due(there, (job(),))] == ["ran"]
    state = state_of(tmp_path)
    assert (state.started, state.exit_code, state.runs, state.failures_in_a_row) == (NOW, 0, 1, 0)
    assert (
        state.next_due == 1_795_291_200.0 and state.interval_seconds == HOUR and state.way == "once"
    )
    assert state.ended is not None and state.ended >= NOW
    assert "hello" in log_of(tmp_path)
    assert run_due(there, (job(),)) == ()
    clock.now = state.next_due
    assert [done.result for done in run_due(there, (job(),))] == ["ran"]
    clock.now += 100 * HOUR  # a hundred rounds were missed
    assert [done.result for done in run_due(there, (job(),))] == ["ran"]
    assert run_due(there, (job(),)) == ()
    clock.now -= 5 * HOUR  # the clock is set back
    assert [done.result for done in run_due(there, (job(),))] == ["ran"]
    assert (tmp_path / "runs").read_text() == "x\n" * 4 and state_of(tmp_path).runs == 4


@pytest.mark.parametrize(
    ("script", "answers", "words", "code"),
    [
        ("echo PULSE: down; exit 1", {0, 1}, "", 1),
        ("echo PULSE: down; echo 'tr11: no one is told'; exit 1", {0, 1}, "", 1),
        (
            "echo 'tr11: the run has no directory'; exit 1",
            {0, 1},
            "exit code 1: the run has no directory",
            1,
        ),
        ("exit 1", {0, 1}, "it said nothing", 1),
        (
            "echo PULSE: x; echo 'tr11: an error of tr11 itself: KeyError: 7'; exit 1",
            {0, 1},
            "KeyError",
            1,
        ),
        (
            "echo PULSE: x; echo 'tr11: /run: No space left on device'; exit 1",
            {0, 1},
            "No space left",
            1,
        ),
        (
            "echo 'Traceback (most recent call last):'; echo 'ValueError: y'; exit 1",
            {0, 1},
            "it broke",
            1,
        ),
        ("echo no such option; exit 2", {0, 1}, "exit code 2: no such option", 2),
        ("echo unknown; exit 3", {0, 1}, "exit code 3: unknown", 3),
        ("echo unknown; exit 3", {0, 1, 3}, "", 3),
        ("kill -9 $$", {0, 1}, "signal 9 ended it", -9),
        ("exec /nowhere/tr11", {0, 1}, "exit code 127", 127),
    ],
)
def test_what_counts_as_a_failure(
    tmp_path: Path, script: str, answers: set[int], words: str, code: int
) -> None:
    done = run_job(place(tmp_path, script), job(answers=frozenset(answers)))
    state = state_of(tmp_path)
    assert state.exit_code == code
    assert done.result == ("failed" if words else "ran")
    assert words in state.message and bool(words) == bool(state.message) == bool(
        state.failures_in_a_row
    )


def test_failures_are_counted_until_one_round_does_its_work(tmp_path: Path) -> None:
    clock, bad = Clock(), "echo oops; exit 2"
    for count in (1, 2, 3):
        run_job(place(tmp_path, bad, clock=clock), job())
        assert state_of(tmp_path).failures_in_a_row == count
        clock.now += HOUR
    run_job(place(tmp_path, "true", clock=clock), job())
    assert state_of(tmp_path).failures_in_a_row == 0 and state_of(tmp_path).message == ""


def test_a_round_ends_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > child; trap '' TERM; while :; do sleep 0.1; done"
    from tr11ops.cron import runner

    before = runner.GRACE_SECONDS
    runner.GRACE_SECONDS = 0.3
    try:
        done = run_job(place(tmp_path, script), job(timeout=3.0))  # its start is sooner
    finally:
        runner.GRACE_SECONDS = before
    assert done.result == "failed" and "time-out" in state_of(tmp_path).message
    pid = int((tmp_path / "child").read_text())
    until(lambda: mark(pid).start == "gone")


def test_what_a_job_leaves_behind_is_ended(tmp_path: Path) -> None:
    run_job(place(tmp_path, "sleep 600 & echo $! > child"), job())
    assert state_of(tmp_path).exit_code == 0
    until(lambda: mark(int((tmp_path / "child").read_text())).start == "gone")


def test_a_directory_that_is_not_there_is_watched_from_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What watches runs when due, is recorded here, and makes nothing in the directory's place; the
    rest waits.
    """
    away = tmp_path / "machine"
    away.mkdir()
    monkeypatch.setenv(VARIABLE, str(away))
    clock = Clock()
    there = replace(
        place(tmp_path, "echo x >> runs", clock=clock), why_not_there=lambda: "it is not mounted"
    )
    root = run_directory(tmp_path).root
    root.rmdir()
    jobs = (job("pulse", watches=True), job("backup"))
    watched, other = run_due(there, jobs)
    assert (watched.name, watched.result) == (
        "pulse",
        "ran",
    ) and "it is not mounted: recorded in" in watched.why
    assert (other.result, other.why) == (
        "not recorded",
        "nothing is run that cannot be recorded: it is not mounted",
    )
    assert not root.exists() and (tmp_path / "runs").read_text() == "x\n"
    assert "pulse" not in {done.name for done in run_due(there, jobs)}, (
        "it is not due again at once"
    )
    clock.now += HOUR
    assert [done.result for done in run_due(there, (jobs[0],))] == ["ran"]
    assert not root.exists() and (tmp_path / "runs").read_text() == "x\nx\n"


def test_little_time_left_is_left_for_the_next_round(tmp_path: Path) -> None:
    there = replace(place(tmp_path, "true"), seconds_left=lambda: 20.0)
    assert run_job(there, job(timeout=900)).result == "no time"
    assert read_job(run_directory(tmp_path), "pulse") is None


def test_a_round_by_hand_does_not_hide_what_runs_the_job(tmp_path: Path) -> None:
    run_job(place(tmp_path, "true", way="hand"), job(), forced=True)
    assert state_of(tmp_path).way == "hand"
    run_job(place(tmp_path, "true", way="crontab"), job(), forced=True)
    run_job(place(tmp_path, "true", way="hand"), job(), forced=True)
    assert (state_of(tmp_path).way, state_of(tmp_path).runs) == ("crontab", 3)


# ----------------------------------------------------------------------------- output
def test_a_flood_of_output_is_bounded_and_its_end_is_kept(tmp_path: Path) -> None:
    run_job(place(tmp_path, "yes 0123456789 | head -c 30000000; echo; echo the end; exit 2"), job())
    text = log_of(tmp_path)
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 1000
    assert "bytes left out" in text and "the end" in text
    assert state_of(tmp_path).message == "exit code 2: the end"


def test_the_log_is_rotated(tmp_path: Path) -> None:
    path = run_directory(tmp_path).paths.state / "cron" / "pulse.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (LARGEST_LOG_BYTES + 1))
    run_job(place(tmp_path, "echo new"), job())
    assert path.with_name("pulse.log.1").stat().st_size == LARGEST_LOG_BYTES + 1
    assert path.stat().st_size < 1000


def test_hostile_output_stays_one_clean_line(tmp_path: Path) -> None:
    run_job(place(tmp_path, r"printf 'a\033[31mred\000\377\n%0500d\n' 1; exit 2"), job())
    message = state_of(tmp_path).message
    assert message.isprintable() and len(message) < 300


def test_a_log_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    path = run_directory(tmp_path).paths.state / "cron" / "pulse.log"
    path.mkdir(parents=True)
    done = run_job(place(tmp_path, "echo x"), job())
    assert done.result == "ran" and "its output was not kept" in done.why


# ----------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": 5}'])
def test_a_record_of_garbage_is_replaced_by_a_round(tmp_path: Path, content: bytes) -> None:
    there = place(tmp_path, "true")
    path = job_file(there.directory, "pulse")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert [done.result for done in run_due(there, (job(),))] == ["ran"]
    assert state_of(tmp_path).runs == 1


def test_nothing_runs_that_cannot_be_recorded(tmp_path: Path) -> None:
    there = place(tmp_path, "echo x >> runs")
    (there.directory.paths.state).write_text("a file where a folder belongs")
    done = run_due(there, (job(),))
    assert [one.result for one in done] == ["not recorded"]
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_gone_is_a_failed_round(tmp_path: Path) -> None:
    done = run_job(replace(place(tmp_path, "true"), folder=tmp_path / "gone"), job())
    assert done.result == "failed" and "cannot be started" in state_of(tmp_path).message
    assert state_of(tmp_path).exit_code == 127


def test_a_signal_ends_the_job_and_is_recorded(tmp_path: Path) -> None:
    there = place(tmp_path, "touch started; sleep 600")
    thread = threading.Thread(target=run_job, args=(there, job()))
    thread.start()
    until((tmp_path / "started").exists)
    there.must_end.set()
    thread.join(300)
    assert not thread.is_alive()
    assert state_of(tmp_path).message == "it was ended with what ran it"


# ----------------------------------------------------------------------------- one at a time
def test_a_second_start_is_skipped_and_noted(tmp_path: Path) -> None:
    there = place(tmp_path, "touch started; while [ ! -e go ]; do sleep 0.02; done")
    thread = threading.Thread(target=run_job, args=(there, job()))
    thread.start()
    until((tmp_path / "started").exists)
    second = run_job(place(tmp_path, "touch second", way="hand"), job(), forced=True)
    (tmp_path / "go").touch()
    thread.join(300)
    assert second.result == "running" and f"process {os.getpid()}" in second.why
    assert not (tmp_path / "second").exists()
    assert "not started by hand" in log_of(tmp_path)
    assert state_of(tmp_path).runs == 1 and state_of(tmp_path).exit_code == 0


def other_host(now: float, seconds: float, **changes: object) -> Claim:
    claim = Claim.of_this_process(now, seconds)
    return replace(
        claim, host="elsewhere", process=replace(claim.process, boot="another"), **changes
    )  # type: ignore[arg-type]


def test_a_claim_of_another_host_holds_until_its_time_is_over(tmp_path: Path) -> None:
    clock = Clock()
    there = place(tmp_path, "true", clock=clock)
    folder = ClaimFolder(there.directory, "pulse")
    assert folder.take(other_host(NOW, 900), None) is not None
    assert run_job(there, job()).result == "running"
    clock.now = NOW + 901
    assert run_job(there, job()).result == "ran"


def test_a_claim_from_the_future_does_not_stop_a_job_for_years(tmp_path: Path) -> None:
    there = place(tmp_path, "true", clock=Clock())
    ClaimFolder(there.directory, "pulse").take(other_host(NOW + 1e8, 900), None)
    assert run_job(there, job()).result == "ran"


def test_a_claim_that_cannot_be_read_holds_for_a_while(tmp_path: Path) -> None:
    there = place(tmp_path, "true")
    folder = ClaimFolder(there.directory, "pulse")
    folder.path.mkdir(parents=True)
    (folder.path / "1.json").write_text("{")
    assert run_job(there, job()).result == "running"
    os.utime(folder.path / "1.json", (1, 1))
    assert run_job(there, job()).result == "ran"


def test_a_pipe_in_place_of_a_claim_holds_no_one_up(tmp_path: Path) -> None:
    there = place(tmp_path, "true")
    folder = ClaimFolder(there.directory, "pulse")
    folder.path.mkdir(parents=True)
    os.mkfifo(folder.path / "1.json")
    assert run_job(there, job()).result == "running"


def test_of_many_claims_one_succeeds(tmp_path: Path) -> None:
    folder = ClaimFolder(run_directory(tmp_path), "pulse")
    for _ in range(5):
        after, gate, won = folder.newest(), threading.Barrier(8), []

        def claim(
            after: Claim | None = after, gate: threading.Barrier = gate, won: list[Claim] = won
        ) -> None:
            gate.wait()
            made = folder.take(Claim.of_this_process(NOW, 60), after)
            if made is not None:
                won.append(made)

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and folder.newest() == won[0]
    assert len(list(folder.path.iterdir())) <= 5


def test_a_file_system_without_hard_links_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert run_job(place(tmp_path, "true"), job()).result == "ran"
    folder = ClaimFolder(run_directory(tmp_path), "pulse")
    newest = folder.newest()
    assert newest is not None and not newest.held
    assert folder.take(Claim.of_this_process(NOW, 60), None) is None  # epoch 1 is taken


def test_a_killed_owner_is_replaced_once_its_job_is_over(tmp_path: Path) -> None:
    """kill -9 of what runs a job: the job itself goes on, so the next round waits for it; then the
    record says so.
    """
    script = "touch started; while [ ! -e go ]; do sleep 0.02; done; echo done >> ends"
    command = ["once", str(tmp_path), "3600", script]
    runner = subprocess.Popen([sys.executable, "-m", "tests.tr11ops.cron.rounds", *command])
    try:
        until((tmp_path / "started").exists)
    finally:
        runner.kill()
        runner.wait()
    assert state_of(tmp_path).is_running
    assert run_job(place(tmp_path, "true"), job(), forced=True).result == "running"
    (tmp_path / "go").touch()
    until((tmp_path / "ends").exists)
    until(lambda: not ClaimFolder(run_directory(tmp_path), "pulse").newest().is_living(time.time()))  # type: ignore[union-attr]
    assert run_due(place(tmp_path, "true"), (job(),)) == ()  # a round is started at most once
    slow = place(tmp_path, "cat run/state/cron/pulse.json > during; exit 2")
    assert run_job(slow, job(), forced=True).result == "failed"
    assert CUT_OFF in (tmp_path / "during").read_text()
    assert state_of(tmp_path).failures_in_a_row == 2 and state_of(tmp_path).runs == 2


def test_what_a_killed_owner_left_ends_at_its_time_limit(tmp_path: Path) -> None:
    there = place(tmp_path, "echo x >> runs")
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    gone = subprocess.Popen(["true"])
    owner = mark(gone.pid)
    gone.wait()
    claim = replace(
        Claim.of_this_process(time.time() - 100, 50), process=owner, child=mark(left.pid)
    )
    ClaimFolder(there.directory, "pulse").take(claim, None)
    write_job(
        there.directory,
        PeriodicJobState("pulse", "once", "h", 1.0, None, None, "", HOUR, 1, 0, 2.0),
    )
    assert run_job(there, job()).result == "ran"
    assert left.wait(300) == -signal.SIGTERM
    assert state_of(tmp_path).runs == 2


def test_a_job_whose_claim_never_named_it_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full between the start of the child and its claim: the gate stays shut."""
    there = place(tmp_path, "touch ran")

    def full(self: ClaimFolder, claim: Claim) -> None:
        raise OSError(28, "No space left on device", str(self.path))

    monkeypatch.setattr(ClaimFolder, "write", full)
    assert run_job(there, job()).result == "not recorded"
    assert not (tmp_path / "ran").exists()


def test_the_last_line_says_why() -> None:
    assert (
        failure(job(), 0, "time", ["still copying"], 90.0)
        == "it was ended after its time-out of 1 min 30 s: still copying"
    )
