"""When the job of a plain command goes back into the queue: the rules, and real commands under a scheduler
that is played.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.waiting import until
from tr11ops.base.errors import Refusal, SchedulerError, SchedulerUnreachable, WrongUsage
from tr11ops.cluster.base import Job, JobState
from tr11ops.queue import requeue_run
from tr11ops.queue.requeue import (
    JobStart,
    RequeueRequest,
    StartStore,
    StopCause,
    job_around,
    newest_change,
    require_usable,
    why_not,
)
from tr11ops.queue.requeue_run import GuardedCommand

NOW = 1_000_000.0
JOB = Job(
    "12_3", "14", "12", 3, "train", "ana", JobState.RUNNING,
    end_time=NOW + 3600, time_limit_seconds=7200, may_requeue=True,
)  # fmt: skip
START = JobStart("12_3", 0, NOW - 3600, "n1", StopCause.LIMIT)
BACK = JobStart("12_3", 0, NOW, "n1", StopCause.LIMIT, progressed=False, requeued=True)
REQUEST = RequeueRequest(("true",), Path("state"), progress=Path("ckpt"))


# ----------------------------------------------------------------------------- the rule
@pytest.mark.parametrize(
    "job,start,past,said",
    [
        (JOB, START, (), ""),
        (JOB, replace(START, asked=StopCause.WARNED), (), ""),
        (None, START, (), "does not know the job"),
        (replace(JOB, state=JobState.COMPLETING), START, (), "it is COMPLETING: it was cancelled"),
        (replace(JOB, state=JobState.PENDING), START, (), "put back already"),
        (replace(JOB, may_requeue=False), START, (), "may not be put back"),
        (JOB, replace(START, asked=StopCause.TERMINATED), (), "a person ended it"),
        (JOB, replace(START, asked=StopCause.INTERRUPTED), (), "a person ended it"),
        (replace(JOB, preempt_time=NOW), replace(START, asked=StopCause.TERMINATED), (), ""),
        (replace(JOB, end_time=NOW + 350), replace(START, asked=StopCause.TERMINATED), (), ""),
        (JOB, START, (BACK,), ""),
        (JOB, replace(START, progressed=False), (), ""),
        (JOB, replace(START, progressed=False), (BACK,), "makes no progress"),
        (JOB, replace(START, progressed=True), (BACK,), ""),
        (JOB, replace(START, progressed=False), (BACK, replace(BACK, progressed=True)), ""),
        (JOB, replace(START, progressed=False), (replace(BACK, progressed=None),), ""),
        # a start that was cut short by a lost node tells nothing
        (
            JOB,
            replace(START, progressed=False),
            (BACK, replace(BACK, requeued=False)),
            "no progress",
        ),
        (JOB, START, (replace(BACK, progressed=True),) * 50, "50 times already, which is --max"),
    ],
)
def test_when_a_job_goes_back(
    job: Job | None, start: JobStart, past: tuple[JobStart, ...], said: str
) -> None:
    found = why_not(job, start, past, REQUEST, NOW)
    assert (said in found) if said else (found == "")


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"may_requeue": False}, "job 12_3 may not be put back into the queue"),
        ({"time_limit_seconds": None}, "has no time limit"),
        ({"end_time": NOW + 305}, "--before 5 min: job 12_3 ends in 5 min 5 s"),
    ],
)
def test_a_job_that_cannot_be_put_back_is_refused_at_its_start(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(WrongUsage, match=said):
        require_usable(replace(JOB, **changes), REQUEST, NOW)
    assert require_usable(JOB, REQUEST, NOW) == NOW + 3600


def test_a_job_is_named_as_its_own_task() -> None:
    """The last task of an array has the array's number, by which Slurm would put back them all."""
    task = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert job_around({**task, "SLURM_RESTART_COUNT": "2"}) == ("12_3", 2)
    assert job_around({"SLURM_JOB_ID": "12"}) == ("12", 0)
    for of_a_script in ("-5", "4294967291", ""):  # as Slurm 26.05 says it
        assert job_around({**task, "SLURM_STEP_ID": of_a_script}) == ("12_3", 0)
    for environment, said in (
        ({}, "SLURM_JOB_ID is not set"),
        ({**task, "TR11_SCHEDULER": "local"}, "the embedded scheduler"),
        ({**task, "SLURM_STEP_ID": "0"}, "inside a step of srun"),
    ):
        with pytest.raises(WrongUsage, match=said):
            job_around(environment)


def test_one_call_has_a_start_of_the_job(tmp_path: Path) -> None:
    store = StartStore(tmp_path / "state" / "12_3")
    store.claim(START)
    with pytest.raises(
        WrongUsage, match=r"has a `tr11 requeue` already .since .* on n1.: one in a"
    ):
        store.claim(replace(START, began=START.began + 1))
    store.claim(replace(START, number=1))
    store.claim(replace(START, number=10))
    (store.folder / "start-2.json").write_text("{")  # cut by a full disk
    (store.folder / "notes.txt").write_text("x")
    assert [start.number for start in store.past(10)] == [0, 1]
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"--state: .*; name another folder"):
        StartStore(tmp_path / "file" / "12_3").claim(START)


def test_a_record_is_whole_as_soon_as_it_is_seen(tmp_path: Path) -> None:
    """A reader at any moment of a claim finds nothing, or all of it."""
    store = StartStore(tmp_path / "12_3")
    is_over = threading.Event()
    seen: list[str] = []

    def read_on() -> None:
        while not is_over.is_set():
            seen.extend(path.read_text() for path in store.folder.glob("start-*.json"))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        try:
            for number in range(100):
                store.claim(replace(START, number=number))
                until(lambda: seen, pause=0.001)
        finally:
            is_over.set()
        reading.result()
    assert all(json.loads(text)["job"] == START.job for text in seen)


def test_progress_is_the_newest_change_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    assert newest_change(None) is None and newest_change(folder) == 0.0
    (folder / "step-1").mkdir(parents=True)
    model = folder / "step-1" / "model"
    model.touch()
    os.utime(model, (NOW + 5e9, NOW + 5e9))
    assert newest_change(folder) == NOW + 5e9
    assert newest_change(model / "below") is None, "it cannot be looked at"


# ----------------------------------------------------------------------------- real commands
class Played:
    """A Slurm whose job ends `left` seconds after the command has begun, and how it answers."""

    def __init__(self, began: Path) -> None:
        self.seen = replace(JOB, end_time=time.time() + 3600)
        self.began, self.left = began, 40.0
        self.requeued: list[str] = []
        self.refusals: list[SchedulerError] = []
        self.silences = 0  # so many questions get no answer, once the command was asked to stop

    def job(self, job_id: str) -> Job | None:
        if self.silences and (self.began.parent / "heard").exists():
            self.silences -= 1
            raise SchedulerUnreachable("squeue did not answer")
        if self.began.exists():
            self.seen = replace(self.seen, end_time=time.time() + self.left)
        return self.seen

    def requeue(self, job_id: str, *, as_submitted: bool) -> None:
        assert as_submitted
        if self.refusals:
            raise self.refusals.pop(0)
        self.requeued.append(job_id)
        self.seen = replace(self.seen, state=JobState.PENDING)


class Bench:
    """One command in a folder."""

    def __init__(self, folder: Path, slurm: Played) -> None:
        self.folder, self.slurm = folder, slurm
        self.said: list[str] = []

    def run(self, code: str, number: int = 0, left: float = 3600, **changes: object) -> int:
        """Run a Python program as the job's command; `left` seconds are, as far as it knows."""
        request = RequeueRequest(
            (sys.executable, "-c", code), self.folder / "state", before=self.before
        )
        guarded = GuardedCommand(
            replace(request, **changes),
            start=replace(START, number=number, asked=None),
            limit=time.time() + left,
            store=StartStore(self.folder / "state"),
            scheduler=self.slurm,
            tell=self.said.append,
        )
        return guarded.run()

    before = 50.0

    def again(self) -> None:
        """The job has started again."""
        for name in ("began", "heard"):
            (self.folder / name).unlink(missing_ok=True)
        self.slurm.seen = replace(
            self.slurm.seen, state=JobState.RUNNING, end_time=time.time() + 3600
        )

    def record(self, number: int = 0) -> dict[str, object]:
        found: dict[str, object] = json.loads(
            (self.folder / "state" / f"start-{number}.json").read_text()
        )
        return found


WAITS = """
import pathlib, signal, sys, time
def leave(number, _):
    pathlib.Path("heard").write_text(signal.Signals(number).name)
    sys.exit(0)
for name in ("TERM", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), leave)
pathlib.Path("began").touch()
time.sleep(600)
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requeue_run, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(requeue_run, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(requeue_run, "LOOK_SECONDS", 0.1)
    return Bench(tmp_path, Played(tmp_path / "began"))


def signalled(bench: Bench, name: str) -> threading.Thread:
    """Send this process a signal once the command runs."""

    def send() -> None:
        until((bench.folder / "began").exists)
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_at_the_limit_it_is_asked_and_put_back_once(bench: Bench) -> None:
    assert bench.run(WAITS, signal="USR1") == 1
    assert bench.slurm.requeued == ["12_3"] and (bench.folder / "heard").read_text() == "SIGUSR1"
    found = bench.record()
    assert (found["asked"], found["status"], found["requeued"]) == ("limit", 0, True)


def test_a_command_that_ends_by_itself_is_not_put_back(bench: Bench) -> None:
    assert bench.run("import sys; sys.exit(7)") == 7
    assert bench.run("import os; os.kill(os.getpid(), 9)", 1) == 137
    assert not bench.slurm.requeued and bench.record()["asked"] is None


def test_one_that_does_not_stop_is_put_back_in_time(bench: Bench) -> None:
    bench.slurm.left = 2.0
    code = WAITS.replace("sys.exit(0)", "time.sleep(600)")
    assert bench.run(code) == 1 and bench.slurm.requeued == ["12_3"]
    assert any("has not stopped" in line for line in bench.said)


def test_a_limit_that_was_moved_counts(bench: Bench) -> None:
    """Asked of Slurm again before the command is asked to stop."""
    bench.slurm.left = 3600.0
    code = WAITS.replace("600", "1")
    assert bench.run(code, left=10) == 0 and not bench.slurm.requeued
    assert bench.said == [] and not (bench.folder / "heard").exists()


def test_a_silent_scheduler_is_asked_again(bench: Bench) -> None:
    """It is put back once Slurm answers, and not without its word on how the job is."""
    bench.slurm.silences = 3
    assert bench.run(WAITS) == 1 and bench.slurm.requeued == ["12_3"]
    assert bench.slurm.silences == 0
    bench.again()
    bench.slurm.silences, bench.slurm.left = 1000, 1.0
    assert bench.run(WAITS, 1) == 3 and bench.slurm.requeued == ["12_3"]
    assert "does not answer" in str(bench.record(1)["why"])


@pytest.mark.parametrize("name,heard", [("USR1", "SIGTERM"), ("TERM", "SIGTERM")])
def test_a_signal_before_the_limit(bench: Bench, name: str, heard: str) -> None:
    """A warning is the limit's; a TERM far from it, of a job that runs on, is a person's."""
    thread = signalled(bench, name)
    bench.slurm.left = 3600.0
    code = bench.run(WAITS)
    thread.join()
    assert (bench.folder / "heard").read_text() == heard
    assert code == 1 and bench.slurm.requeued == (["12_3"] if name == "USR1" else [])


def test_what_scancel_ended_is_not_put_back(bench: Bench) -> None:
    bench.slurm.seen = replace(bench.slurm.seen, state=JobState.COMPLETING)
    thread = signalled(bench, "TERM")
    assert bench.run(WAITS, signal="USR1") == 1
    thread.join()
    assert (bench.folder / "heard").read_text() == "SIGTERM", "as the job was, not to be saved for"
    assert not bench.slurm.requeued and "cancelled" in str(bench.record()["why"])


def test_a_preempted_job_is_put_back(bench: Bench) -> None:
    bench.slurm.left = 3600.0
    bench.slurm.seen = replace(bench.slurm.seen, preempt_time=time.time())
    thread = signalled(bench, "TERM")
    assert bench.run(WAITS, signal="USR1") == 1
    thread.join()
    assert (bench.folder / "heard").read_text() == "SIGUSR1" and bench.slurm.requeued == ["12_3"]


def test_without_progress_it_is_put_back_once_more_and_no_oftener(bench: Bench) -> None:
    (bench.folder / "ckpt").mkdir()
    for number, is_back in ((0, True), (1, False)):
        bench.again()
        assert bench.run(WAITS, number, progress=Path("ckpt")) == 1
        assert bench.record(number)["requeued"] is is_back
    assert bench.slurm.requeued == ["12_3"] and "no progress" in bench.said[-1]


def test_nothing_is_left_to_do_once_its_file_is_there(bench: Bench) -> None:
    code = WAITS.replace('"heard").write', '"done").write')
    assert bench.run(code, finished=Path("done")) == 0
    assert not bench.slurm.requeued and "nothing is left to do" in bench.said[-1]


def test_a_lost_answer_puts_it_back_once(bench: Bench) -> None:
    """Slurm is silent, is asked again, and refuses what is not its own."""
    bench.slurm.refusals = [SchedulerUnreachable("scontrol did not answer")]
    assert bench.run(WAITS) == 1 and bench.slurm.requeued == ["12_3"]
    bench.again()
    bench.slurm.refusals = [SchedulerError("Requested operation is presently disabled")]
    assert bench.run(WAITS, 1) == 1
    assert bench.slurm.requeued == ["12_3"] and bench.record(1)["requeued"] is False
    assert "presently disabled" in bench.said[-1]


def test_a_command_that_cannot_be_started_says_so(bench: Bench) -> None:
    with pytest.raises(Refusal, match="absent: No such file") as caught:
        bench.run("", command=("absent",))
    assert caught.value.exit_code == 127
