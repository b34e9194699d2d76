"""Arrays whose tasks are runs of their own: which run a task is, written in the one comment that an
array has. Pure.

    tr11-tasks:1=TAG@MARK,2=TAG@MARK [the card's comment]

A scheduler has one name and one comment for an array. Each task of such an array is shown as a job
of its own, with the comment that its run would have had, so that it belongs to that run for every
command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from tr11ops.cluster.arrays import named_tasks
from tr11ops.cluster.base import Job, JobState

COMMENT_PREFIX = "tr11:"  # begins the comment of every job of a run
LONGEST_COMMENT = 1024  # characters that Slurm takes
CELL = "tr11-cell"  # a word in the comment of such a task: its namesakes are known to be other runs
_MARKS = re.compile(r"tr11-tasks:(\d+=[^\s,=]+(?:,\d+=[^\s,=]+)*)(?: (.*))?", re.DOTALL)


def array_comment(marks: Mapping[int, str], more: str = "") -> str:
    """The comment of an array whose task `number` is the run that `marks[number]` names:
    `TAG@MARK`.
    """
    named = ",".join(f"{number}={mark}" for number, mark in sorted(marks.items()))
    return f"tr11-tasks:{named}{f' {more}' if more else ''}"


def tasks_apart(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs, with each task of such an array as a job of its own; all others as they are."""
    return tuple(one for job in jobs for one in _apart(job))


def task_apart(job: Job) -> Job:
    """The same of one job; what stands for several of its tasks stays as it is."""
    apart = tasks_apart((job,))
    if len(apart) == 1:
        return apart[0]
    return job


def is_cell(comment: str) -> bool:
    """Whether it is the comment of such a task, as `tasks_apart` shows it."""
    return CELL in comment.split()


def _apart(job: Job) -> Iterator[Job]:
    match = None
    if job.array_id is not None:
        match = _MARKS.fullmatch(job.comment)
    if match:
        numbers = _numbers(job)
    else:
        numbers = ()
    if match is None or not numbers:
        yield job
        return
    marks = {
        int(number): mark
        for number, _, mark in (part.partition("=") for part in match[1].split(","))
    }
    is_started = bool(job.nodes) or (job.state.is_active and len(numbers) == 1)
    for number in numbers:
        name = f"{job.array_id}_{number}"
        words = (
            (f"{COMMENT_PREFIX}{marks[number]}", CELL, match[2])
            if number in marks
            else (job.comment,)
        )
        yield replace(
            job,
            job_id=name,
            raw_id=job.raw_id if is_started and job.state is not JobState.PENDING else name,
            array_id=None,
            task_id=None,
            pending_tasks=(),
            comment=" ".join(filter(None, words)),
            output=job.output.replace("%a", str(number)),
        )


def _numbers(job: Job) -> tuple[int, ...]:
    """The tasks that a job stands for; a cancelled part of an array has them in its name alone."""
    if job.task_id is not None:
        return (job.task_id,)
    return job.pending_tasks or named_tasks(job.job_id.partition("_")[2]) or ()
