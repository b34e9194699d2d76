"""The circuit breaker: how often a fault may burn a task, and what is done to the run's queued jobs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tr11ops.agent.queues import Queue, job
from tr11ops.agent.breaker import NO_VERDICT, Burned, must_hold, read_burned
from tr11ops.cluster.base import JobState
from tr11ops.queue.queued_jobs import PendingChanges, PendingJobs
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord, of_failure, without_restart
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.end_marker import EXIT_HELD
from trainer.contract.files import append_line, write_json
from trainer.contract.paths import RunPaths


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


def test_the_count_ends_at_progress_a_good_end_and_a_release(directory: RunDirectory):
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


# ----------------------------------------------------------------------------- the queued jobs


def work(queue: Queue, directory: RunDirectory, said: list[str], pauses: list[float], **changes: object) -> PendingJobs:
    return PendingJobs(queue, directory, "7", said.append, pause=pauses.append, **changes)  # type: ignore[arg-type]


def test_only_this_runs_queued_jobs_is_touched(directory: RunDirectory):
    mine = directory.comment("20260101-000000-0123abcd")
    queue = Queue(
        job("7", "7"), job("8", "7", state=JobState.RUNNING), job("11", None, comment=mine),
        job("12", None), job("13", None, comment=mine.replace("@", "@f")),
    )  # fmt: skip
    said: list[str] = []
    waiting = work(queue, directory, said, [])
    assert waiting.hold() == PendingChanges(("7", "11"), ("7", "11"), True)
    assert waiting.run_after(queue, "8")
    assert [one.raw_id for one in queue.waiting.values() if one.dependency] == ["7"]
    waiting.release(["7"])
    assert [one.raw_id for one in queue.waiting.values() if one.reason == "JobHeldUser"] == ["11"]
    assert {one.raw_id for one in queue.waiting.values() if one.reason} == {"7", "11"}


def test_a_silent_scheduler_is_asked_again_with_growing_pauses(directory: RunDirectory):
    queue, said, pauses = Queue(job("7", "7")), [], []
    queue.silent = 4
    assert work(queue, directory, said, pauses).hold() == PendingChanges(("7",), ("7",), True)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    queue.silent = 10**9
    assert work(queue, directory, said, pauses, give_up=lambda: True).hold() == PendingChanges((), (), False)
    assert "does not list the queued jobs" in said[-1]


def test_an_answer_is_not_believed_against_the_job(directory: RunDirectory):
    # Slurm 22.05 refuses "job update not available right now" for a running task, and has held the waiting ones.
    queue, said = Queue(job("7", "7")), []
    queue.refuses = {"7": True}
    assert work(queue, directory, said, []).hold() == PendingChanges(("7",), ("7",), True)
    queue = Queue(job("7", "7"))
    queue.refuses = {"7": False}
    assert work(queue, directory, said, []).hold() == PendingChanges((), (), False)
    assert said[-1] == "tr11: cannot hold the waiting tasks of job 7: refused"


@pytest.mark.parametrize("verb", ["hold", "release"])
def test_silence_is_never_taken_for_a_yes(directory: RunDirectory, verb: str):
    queue, said = Queue(job("7", "7", reason="" if verb == "hold" else "JobHeldUser")), []

    def fall_silent(job_id: str) -> None:
        queue.silent = 10**9
        queue.jobs()

    setattr(queue, verb, fall_silent)
    waiting = work(queue, directory, said, [], give_up=lambda: True)
    done = waiting.hold() if verb == "hold" else waiting.release(["7"])
    assert done == PendingChanges((), (), False)
    assert said[-1] == f"tr11: cannot {verb} the waiting tasks of job 7: no answer"


def test_what_a_person_holds_is_not_taken_for_a_hold_of_ours(directory: RunDirectory):
    queue, said = Queue(job("7", "7", reason="JobHeldUser")), []
    assert work(queue, directory, said, []).hold() == PendingChanges(("7",), (), True)
    assert said == []


def test_a_persons_part_of_an_array_is_not_held_nor_released(directory: RunDirectory):
    queue, said = Queue(job("7", "7", pending_tasks=(3, 4)), job("9", "7", task_id=5, reason="JobHeldUser")), []
    queue.waiting["7"] = replace(queue.waiting["7"], job_id="7_[3-4]")
    waiting = work(queue, directory, said, [])
    assert waiting.hold() == PendingChanges(("7_[3-4]",), ("7_[3-4]",), True)
    assert [one.reason for one in queue.waiting.values()] == ["JobHeldUser", "JobHeldUser"]
    waiting.release(["7_[3-4]"])
    assert [one.reason for one in queue.waiting.values()] == ["Resources", "JobHeldUser"]
    assert said == [
        "tr11: the waiting tasks of job 7_[3-4] are held",
        "tr11: the waiting tasks of job 7_[3-4] are released",
    ]
    queue.refuses = {"7_[3-4]": True}  # refused in words, done in deed
    assert waiting.hold() == PendingChanges(("7_[3-4]",), ("7_[3-4]",), True)
