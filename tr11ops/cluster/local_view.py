"""How the embedded scheduler's records read as the protocol's `Job`s. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from tr11ops.cluster.arrays import NO_TASK, format_ranges
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.cluster.local_machine import LocalNode, local_nodes, look_at_gpus
from tr11ops.cluster.local_records import (
    PARTITION,
    Dropped,
    LocalSettings,
    LocalSubmission,
    TaskRecord,
    WaitingTask,
    waiting_groups,
)

HELD = "JobHeldUser"


def output_path(submission: LocalSubmission, task: TaskRecord | None = None) -> str:
    """The output file with Slurm's patterns (%x %j %A %a %N %u %%, with a width as in %5a)
    replaced.

    Without a task, the patterns that only a started task can fill stay as they are.
    """
    values: dict[str, str | int] = {
        "x": submission.request.name,
        "A": submission.job_id,
        "u": submission.user,
        "%": "%",
    }
    if not submission.is_array:
        values |= {"j": submission.job_id, "a": NO_TASK}
    if task is not None:
        values |= {
            "j": task.raw_id,
            "a": NO_TASK if task.task_id is None else task.task_id,
            "N": task.nodes[0],
        }

    def replaced(match: re.Match[str]) -> str:
        width = match[1]
        value = values.get(match[2], match[0])
        if width and isinstance(value, int):
            return str(value).zfill(min(int(width), 10))
        return str(value)

    file = re.sub(r"%([0-9]*)([xjAaNu%])", replaced, submission.request.output)
    return os.path.join(submission.request.working_directory, file)  # noqa: PTH118  a Path costs ten times as much


def _common(submission: LocalSubmission) -> dict[str, Any]:
    request = submission.request
    return {
        "array_id": str(submission.job_id) if submission.is_array else None,
        "name": request.name,
        "user": submission.user,
        "partition": PARTITION,
        "node_count": request.nodes,
        "submit_time": submission.submit_time,
        "time_limit_seconds": request.time_limit_seconds,
        "comment": request.comment,
        "working_directory": str(request.working_directory),
    }


def _display_id(submission: LocalSubmission, task_ids: tuple[int | None, ...]) -> str:
    numbers = [number for number in task_ids if number is not None]
    if not submission.is_array:
        return str(submission.job_id)
    if len(numbers) == 1:
        return f"{submission.job_id}_{numbers[0]}"
    throttle = ""
    if submission.throttle:
        throttle = f"%{submission.throttle}"
    return f"{submission.job_id}_[{format_ranges(numbers)}{throttle}]"


def waiting_job(submission: LocalSubmission, group: tuple[WaitingTask, ...]) -> Job:
    """The Job for waiting tasks that share their hold and exclusions. `group` must not be empty."""
    first = group[0]
    numbers = tuple(task.task_id for task in group if task.task_id is not None)
    return Job(
        job_id=_display_id(submission, tuple(task.task_id for task in group)),
        raw_id=str(submission.job_id),
        task_id=numbers[0] if len(numbers) == 1 else None,
        state=JobState.PENDING,
        # the supervisor's word may be old
        reason=HELD if first.held else submission.reason.replace(HELD, "None"),
        dependency=submission.request.dependency or "",
        excluded=first.excluded,
        pending_tasks=numbers,
        output=output_path(submission),
        **_common(submission),
    )


def task_job(submission: LocalSubmission, task: TaskRecord) -> Job:
    """The Job for one started task."""
    return Job(
        job_id=_display_id(submission, (task.task_id,)),
        raw_id=str(task.raw_id),
        task_id=task.task_id,
        state=task.state,
        reason=task.reason,
        nodes=task.nodes,
        start_time=task.start_time,
        end_time=task.end_time,
        exit_code=task.exit_code,
        exit_signal=task.exit_signal,
        output=output_path(submission, task),
        **_common(submission),
    )


def dropped_job(submission: LocalSubmission, dropped: Dropped) -> Job:
    """The Job for tasks that were cancelled before they started."""
    numbers = tuple(number for number in dropped.task_ids if number is not None)
    return Job(
        job_id=_display_id(submission, dropped.task_ids),
        raw_id=str(submission.job_id),
        task_id=numbers[0] if len(numbers) == 1 else None,
        state=JobState.CANCELLED,
        end_time=dropped.time,
        output=output_path(submission),
        **_common(submission),
    )


def submission_jobs(submission: LocalSubmission) -> tuple[Job, ...]:
    """Every Job of a submission: waiting tasks in groups, started tasks one by one, dropped tasks
    in groups.
    """
    return (
        *(
            waiting_job(submission, tuple(group))
            for group in waiting_groups(submission.waiting).values()
        ),
        *(task_job(submission, task) for task in submission.tasks),
        *(dropped_job(submission, dropped) for dropped in submission.dropped),
    )


def find_job(submission: LocalSubmission, task_id: int | None) -> Job | None:
    """One task of an array; without `task_id` the job itself, or of an array what matters most now:
    its waiting tasks, else its newest started task, else the tasks dropped last."""
    for waiting in submission.waiting:
        if task_id is not None and waiting.task_id == task_id:
            return waiting_job(submission, (waiting,))
    for task in reversed(submission.tasks):
        if task_id is not None and task.task_id == task_id:
            return task_job(submission, task)
    for dropped in submission.dropped:
        if task_id is not None and task_id in dropped.task_ids:
            return dropped_job(submission, Dropped((task_id,), dropped.time))
    if task_id is None:
        jobs = submission_jobs(submission)
    else:
        jobs = ()
    if jobs and jobs[0].state is JobState.PENDING:
        return jobs[0]
    if submission.tasks and task_id is None:
        return task_job(submission, submission.tasks[-1])
    if jobs:
        return jobs[0]
    return None


def node_view(node: LocalNode, active: Sequence[LocalSubmission]) -> Node:
    """One node, as the jobs of these submissions leave it."""
    jobs = [one.request for one in active for task in one.running if node.name in task.nodes]
    state = "idle"
    if jobs:
        is_full = node.is_simulated or sum(request.cpus_per_task for request in jobs) >= node.cpus
        state = "allocated" if is_full else "mixed"
    kinds = {gpu.name for gpu in node.gpus}
    return Node(
        name=node.name,
        states=frozenset({state}),
        cpus=node.cpus,
        gpus=node.gpu_count,
        memory_megabytes=node.memory_megabytes,
        partitions=(PARTITION,),
        gpu_kind=kinds.pop() if len(kinds) == 1 else "",
        gpu_memory_megabytes=min((gpu.memory_megabytes for gpu in node.gpus), default=0),
        gpu_fault=node.gpu_fault,
    )


def this_machine() -> Node:
    """This machine as a node, with the GPUs that it has now, whatever runs on it."""
    return node_view(local_nodes(LocalSettings(), look_at_gpus())[0], ())
