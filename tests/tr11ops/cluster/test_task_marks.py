"""An array whose tasks are runs of their own: each task is shown as a job of its own, with its
run's comment.
"""

from __future__ import annotations

from pathlib import Path

from tr11ops.cluster.arrays import array_comment, is_cell, tasks_apart
from tr11ops.cluster.base import Job, JobState
from tr11ops.observe.jobs import Ownership
from tr11ops.rundir.paths import RunDirectory, new_tag, parse_comment
from trainer.contract.paths import RunPaths


def directory(root: str) -> RunDirectory:
    return RunDirectory(RunPaths(Path(root), "study", "main"), Path(root) / "kill-switch")


FIRST, SECOND, THIRD = (directory(f"/runs/{name}") for name in "abc")
TAGS = [new_tag(1.7e9) for _ in range(3)]
COMMENT = array_comment(
    {
        number: f"{TAGS[number - 1]}@{run.mark}"
        for number, run in enumerate((FIRST, SECOND, THIRD), 1)
    },
    "site words",
)


def job(
    state: JobState,
    task: int | None = None,
    raw: str = "12",
    waiting: tuple[int, ...] = (),
    **more: object,
) -> Job:
    name = f"12_{task}" if task is not None else "12_[2-3]"
    return Job(
        name, raw, "12", task, "study", "me", state, pending_tasks=waiting, comment=COMMENT, **more
    )  # type: ignore[arg-type]


def test_waiting_tasks_are_jobs_of_their_own() -> None:
    [second, third] = tasks_apart([job(JobState.PENDING, waiting=(2, 3), output="/out/%a.out")])
    assert [(one.job_id, one.raw_id, one.array_id, one.pending_tasks) for one in (second, third)] == [
        ("12_2", "12_2", None, ()), ("12_3", "12_3", None, ()),
    ]  # fmt: skip
    assert parse_comment(second.comment) == (TAGS[1], SECOND.mark) and second.comment.endswith(
        "site words"
    )
    assert third.output == "/out/3.out" and is_cell(third.comment)


def test_a_started_task_keeps_its_own_number() -> None:
    [running] = tasks_apart([job(JobState.RUNNING, 1, "14", nodes=("n1",))])
    assert (running.job_id, running.raw_id, running.array_id) == ("12_1", "14", None)
    # Slurm gives the last task the array's number
    [last] = tasks_apart([job(JobState.RUNNING, 3, "12", nodes=("n1",))])
    assert (last.job_id, last.raw_id) == ("12_3", "12")


def test_tasks_cancelled_before_they_began_are_apart() -> None:
    assert [one.job_id for one in tasks_apart([job(JobState.CANCELLED)])] == ["12_2", "12_3"]


def test_other_arrays_stay_as_they_are() -> None:
    plain = Job(
        "9_[1-3]",
        "9",
        "9",
        None,
        "x",
        "me",
        JobState.PENDING,
        pending_tasks=(1, 2, 3),
        comment="tr11:no mark",
    )
    single = Job("7", "7", None, None, "x", "me", JobState.RUNNING, comment=COMMENT)
    stranger = job(JobState.PENDING, 9)
    assert tasks_apart([plain, single]) == (plain, single)
    # a task that the comment does not name is no one's
    assert not is_cell(tasks_apart([stranger])[0].comment)


def test_each_run_owns_its_task_and_no_other() -> None:
    jobs = tasks_apart(
        [job(JobState.RUNNING, 1, "14", nodes=("n1",)), job(JobState.PENDING, waiting=(2, 3))]
    )
    for index, run in enumerate((FIRST, SECOND, THIRD)):
        ours, namesakes = Ownership(run).split(jobs)
        assert [one.job_id for one in ours] == [f"12_{index + 1}"] and namesakes == ()
    assert Ownership(directory("/runs/d")).split(jobs) == ((), ())
