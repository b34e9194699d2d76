"""What changes queued jobs by name: "12" is a whole job or array, "12_5" and "12_[4-10]" are tasks
of one. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import replace

from tr11ops.cluster.arrays import format_ranges, named_tasks
from tr11ops.cluster.base import Job

_PART = re.compile(r"(.+)_([0-9]{1,7}|\[[0-9,:%-]+\])")


def array_number(job: Job) -> str:
    """The number that stands for a job's whole submission."""
    return job.array_id or job.raw_id


def names_of(chosen: Iterable[Job], left: Iterable[Job]) -> tuple[str, ...]:
    """Names for the chosen waiting jobs that leave out those in `left`: one for each array or
    single job.

    An array goes by its number where nothing of it is left out; else its chosen tasks are named.
    """
    apart = {array_number(job) for job in left}
    tasks: dict[str, set[int]] = {}
    for job in chosen:
        tasks.setdefault(array_number(job), set()).update(tasks_of(job))
    return tuple(
        _name(number, found if number in apart else set()) for number, found in tasks.items()
    )


def split(job: Job, names: Iterable[str]) -> tuple[Job | None, Job | None]:
    """The part of a waiting job that these names cover, and the part that they do not; None for
    nothing.
    """
    tasks, covered = set(tasks_of(job)), set[int]()
    for name in names:
        number, meant = _read(name)
        if number != array_number(job):
            continue
        if meant is None:
            return job, None
        covered |= tasks & meant
    if not covered:
        return None, job
    if covered == tasks:
        return (job, None)
    return (_only(job, covered), _only(job, tasks - covered))


def covered(name: str, jobs: Iterable[Job]) -> tuple[Job, ...]:
    """What of these waiting jobs a name covers."""
    return tuple(part for job in jobs if (part := split(job, (name,))[0]) is not None)


def covers(name: str, job: Job) -> bool:
    """Whether a name covers a waiting job, or some tasks of it."""
    return split(job, (name,))[0] is not None


def without(names: Iterable[str], gone: Iterable[str]) -> tuple[str, ...]:
    """The names less what `gone` covers. A whole array of which a part is gone is gone: what is
    left has no name.
    """
    lost: dict[str, set[int] | None] = {}
    for number, tasks in map(_read, gone):
        before = lost.get(number, set())
        if before is None or tasks is None:
            lost[number] = None
        else:
            lost[number] = before | tasks
    found = []
    for name in names:
        number, tasks = _read(name)
        taken = lost.get(number, set())
        if taken == set():
            found.append(name)
        elif tasks is not None and taken is not None and tasks - taken:
            found.append(_name(number, tasks - taken))
    return tuple(found)


def not_repeated(names: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    """The names less what `more` names again. A whole array stays whole where `more` names some
    tasks of it.
    """
    again = tuple(more)
    whole = {number for number, tasks in map(_read, again) if tasks is None}
    found: list[str] = []
    for name in names:
        number, tasks = _read(name)
        if tasks is None and number not in whole:
            found.append(name)
        else:
            found += without((name,), again)
    return tuple(found)


def tasks_of(job: Job) -> tuple[int, ...]:
    """The waiting tasks that a job stands for; none for a job that is no array's."""
    return job.pending_tasks or (() if job.task_id is None else (job.task_id,))


def _name(number: str, tasks: set[int]) -> str:
    if not tasks:
        return number
    if len(tasks) == 1:
        return f"{number}_{min(tasks)}"
    return f"{number}_[{format_ranges(sorted(tasks))}]"


def _only(job: Job, tasks: set[int]) -> Job:
    name, single = _name(array_number(job), tasks), min(tasks) if len(tasks) == 1 else None
    return replace(job, job_id=name, task_id=single, pending_tasks=tuple(sorted(tasks)))


def _read(name: str) -> tuple[str, set[int] | None]:
    """The number and the tasks (None: all) that a name means; what is no part is a number, that of
    no job perhaps.
    """
    match = _PART.fullmatch(name)
    tasks = None
    if match:
        tasks = named_tasks(match[2])
    if match is None or tasks is None:
        return (name, None)
    return (match[1], set(tasks))
