"""The circuit breaker: how often a fault may burn a task, and what is done to the run's waiting work."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.agent.breaker import NO_VERDICT, Burned, must_hold, read_burned
from tr11ops.agent.records import AttemptVerdict, LaunchRecord, of_failure, without_restart
from tr11ops.agent.waiting import Changes, WaitingWork
from tr11ops.cluster.base import Job, JobState, Node, SchedulerError, SchedulerUnreachable
from tr11ops.rundir import RunDirectory
from trainer.contract import EXIT_HELD, RunPaths, append_line, write_json


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(RunPaths(tmp_path / "run", "small", "main"), tmp_path / "run" / "kill-switch")


# ----------------------------------------------------------------------------- counting
def burn(*faults: str) -> tuple[Burned, ...]:
    return tuple(Burned(str(number), fault) for number, fault in enumerate(faults))


def test_one_fault_burns_two_tasks_and_different_ones_four():
    assert must_hold("a", (), 2) == ""
    assert must_hold("a", burn("a"), 2) == "2 tasks were ended by the same fault without progress"
    assert must_hold("a", burn("b"), 2) == ""
    assert must_hold("a", burn("b", "a", "b"), 2) == "4 tasks in a row ended without progress"
    assert must_hold("a", (), 1) == "1 task was ended by the same fault without progress"


@given(st.lists(st.sampled_from("abc")), st.integers(1, 4))
def test_no_course_of_faults_burns_more_than_allowed(course: list[str], most: int):
    burned: list[Burned] = []
    for fault in course:
        hold = must_hold(fault, burned, most)
        burned.insert(0, Burned("", fault))
        if hold:
            break
    assert len(burned) <= 2 * most
    longest = current = 0
    for index, entry in enumerate(burned):
        current = current + 1 if index and entry.fault == burned[index - 1].fault else 1
        longest = max(longest, current)
    assert longest <= most


def verdict(directory: RunDirectory, job_id: str, order: float, **changes: object) -> None:
    folder = directory.paths.attempt(job_id)
    replace(of_failure("words", 5, 5), fault="a", job_id=job_id, **changes).write(folder)  # type: ignore[arg-type]
    os.utime(folder / "verdict.json", (order, order))


def test_the_count_ends_at_progress_at_a_good_end_and_at_a_release(directory: RunDirectory):
    assert read_burned(directory, "9") == ()
    verdict(directory, "1", 1.0)
    verdict(directory, "2", 2.0)
    assert [entry.job_id for entry in read_burned(directory, "3")] == ["2", "1"]
    assert [entry.job_id for entry in read_burned(directory, "2")] == ["1"]
    verdict(directory, "3", 3.0, reason="superseded")
    assert [entry.job_id for entry in read_burned(directory, "4")] == ["2", "1"]
    for number, changes in enumerate(({"progress": True}, {"reason": "exit-duration"}, {"held": ("7",)})):
        verdict(directory, str(10 + number), 10.0 + number, **changes)
        assert read_burned(directory, "30") == ()
    verdict(directory, "20", 20.0)
    assert [entry.job_id for entry in read_burned(directory, "30")] == ["20"]


def test_an_attempt_without_a_word_is_burned_unless_it_trained(directory: RunDirectory):
    write_json(directory.paths.attempt("4") / "attempt.json", {})
    assert read_burned(directory, "5") == (Burned("4", NO_VERDICT),)
    step = '{"kind": "step", "job_id": "4", "iteration": 3, "total_iterations": 9, "consumed_samples": 1, "consumed_tokens": 1,'
    step += ' "global_batch_size": 1, "learning_rate": 0.1, "seconds_per_iteration": 1.0, "lm_loss": 1.0,'
    append_line(directory.paths.metrics, step + ' "samples_per_second": 1.0, "tflops": 1.0}')
    assert read_burned(directory, "5") == ()


def test_records_survive_the_disk(directory: RunDirectory):
    folder = directory.paths.attempt("4")
    before = replace(without_restart(of_failure("words", 5, None)), held=("7",), blamed=("x1",), time=2.0)
    before.write(folder)
    assert AttemptVerdict.read(folder) == before
    assert (before.exit_status, before.restart) == (EXIT_HELD, False)
    LaunchRecord(1, ("x1",), 1.0).write(folder)
    assert LaunchRecord.path(folder, 1).exists()
    (folder / "verdict.json").write_text('{"reason": 1}')
    with pytest.raises(ValueError, match="not a verdict"):
        AttemptVerdict.read(folder)


# ----------------------------------------------------------------------------- the waiting work
class Queue:
    """A scheduler as far as waiting work needs one: jobs that wait, and answers that fail a given number of times."""

    name = "queue"

    def __init__(self, *jobs: Job) -> None:
        self.waiting = {job.raw_id: job for job in jobs}
        self.silent = 0
        self.known: tuple[Node, ...] = ()
        self.refuses: dict[str, bool] = {}  # job -> is it done all the same?

    def jobs(self, name: str | None = None, user: str | None = None) -> tuple[Job, ...]:
        self._answer()
        return tuple(self.waiting.values())

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        self._change(job_id, excluded=nodes)

    def hold(self, job_id: str) -> None:
        self._change(job_id, reason="JobHeldUser")

    def release(self, job_id: str) -> None:
        self._change(job_id, reason="Resources")

    def run_after(self, job_id: str, after: str) -> None:
        self._change(job_id, dependency=f"afterany:{after}(unfulfilled)")

    def _answer(self) -> None:
        if self.silent:
            self.silent -= 1
            raise SchedulerUnreachable("no answer")

    def nodes(self) -> tuple[Node, ...]:
        return self.known

    def _change(self, job_id: str, **changes: object) -> None:
        self._answer()
        for raw, job in list(self.waiting.items()):
            waits = job.state is JobState.PENDING and job_id in (job.array_id, job.raw_id)
            if waits and self.refuses.get(job_id, True):
                self.waiting[raw] = replace(job, **changes)  # type: ignore[arg-type]
        if job_id in self.refuses:
            raise SchedulerError("refused")


def job(raw: str, array: str | None, **changes: object) -> Job:
    plain = Job(raw, raw, array, None, "small", "me", JobState.PENDING)
    return replace(plain, **changes)  # type: ignore[arg-type]


def work(queue: Queue, directory: RunDirectory, said: list[str], pauses: list[float], **changes: object) -> WaitingWork:
    return WaitingWork(queue, directory, "7", said.append, pause=pauses.append, **changes)  # type: ignore[arg-type]


def test_only_this_runs_waiting_work_is_touched(directory: RunDirectory):
    mine = directory.comment("20260101-000000-0123abcd")
    queue = Queue(
        job("7", "7", excluded=("x9",)), job("8", "7", state=JobState.RUNNING), job("11", None, comment=mine),
        job("12", None), job("13", None, comment=mine.replace("@", "@f")),
    )  # fmt: skip
    said: list[str] = []
    waiting = work(queue, directory, said, [])
    assert waiting.exclude(["x1"])
    assert queue.waiting["7"].excluded == ("x1", "x9")  # what was excluded before stays so
    assert queue.waiting["11"].excluded == ("x1",)
    assert waiting.hold() == Changes(("7", "11"), ("7", "11"), True)
    assert waiting.run_after(queue, "8")
    assert [one.raw_id for one in queue.waiting.values() if one.dependency] == ["7"]
    waiting.release(["7"])
    assert [one.raw_id for one in queue.waiting.values() if one.reason == "JobHeldUser"] == ["11"]
    assert {one.raw_id for one in queue.waiting.values() if one.excluded or one.reason} == {"7", "11"}
    assert "tr11: the waiting tasks of job 7 will not use x1" in said


def test_a_silent_scheduler_is_asked_again_with_growing_pauses(directory: RunDirectory):
    queue, said, pauses = Queue(job("7", "7")), [], []
    queue.silent = 4
    assert work(queue, directory, said, pauses).hold() == Changes(("7",), ("7",), True)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    queue.silent = 10**9
    assert work(queue, directory, said, pauses, give_up=lambda: True).hold() == Changes((), (), False)
    assert "does not say what waits" in said[-1]


def test_an_answer_is_not_believed_where_the_job_shows_otherwise(directory: RunDirectory):
    # Slurm 22.05 refuses "job update not available right now" for a running task, and has held the waiting ones.
    queue, said = Queue(job("7", "7")), []
    queue.refuses = {"7": True}
    assert work(queue, directory, said, []).hold() == Changes(("7",), ("7",), True)
    queue = Queue(job("7", "7"))
    queue.refuses = {"7": False}
    assert work(queue, directory, said, []).hold() == Changes((), (), False)
    assert said[-1] == "tr11: cannot hold the waiting tasks of job 7: refused"


def test_what_a_person_holds_is_not_taken_for_a_hold_of_ours(directory: RunDirectory):
    queue, said = Queue(job("7", "7", reason="JobHeldUser")), []
    assert work(queue, directory, said, []).hold() == Changes(("7",), (), True)
    assert said == []
