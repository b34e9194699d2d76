"""Which sightings of a log are of another job, another day, or another start than the one that is judged. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tr11ops.diagnose.order import STRONG, is_before, is_lost_gpu
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import FaultClass, Role

DAYS = 1
SECOND = len("MM-DD HH:MM:SS")
_JOBS_NUMBER = re.compile(r"(?<!\d)\d{3,9}(?!\d)")
ORDERED_ENDS = frozenset({FaultClass.SLURM_TIME_LIMIT, FaultClass.SLURM_PREEMPTED})
_ENDS_OF_JOBS = ORDERED_ENDS | {FaultClass.SLURM_NODE_FAIL, FaultClass.SLURM_USER_CANCEL}
_OF_SUBMISSIONS = frozenset({FaultClass.SLURM_SUBMIT, FaultClass.SLURM_AUTH})
_SUBMITS = re.compile(r"\b(?:sbatch|bsub|qsub)\b|[Jj]ob submission failed|SUBMIT_BATCH_JOB")
FAILED = frozenset({Role.CAUSE, Role.SYMPTOM, Role.DEATH})


def is_of_an_earlier_job(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether it is how a job before ended, in the log of one that was never accepted."""
    if one.signature.fault not in _ENDS_OF_JOBS:
        return False
    refused = [other for other in left if is_refusal(other) and is_before(one, other)]
    if one.progress is None:
        return any(other.progress is None for other in refused)
    is_order = one.signature.role is Role.STOP and one.signature.fault in ORDERED_ENDS
    is_quoted = one.text[:1].isspace()  # by who submits the next one
    return is_order and is_quoted and bool(refused)


def ended_the_job_before(
    one: Sighting, left: Sequence[Sighting], ends: Mapping[str, str | None]
) -> bool:
    """Whether it is how the scheduler ended a job, and the log of the next one goes on until a
    program fails in it.
    """
    if one.signature.fault not in ORDERED_ENDS or one.signature.role is not Role.STOP:
        return False
    began_later = {
        file for file, end in ends.items() if file != one.file and _is_after(end, one.origin.time)
    }
    failed = [
        other
        for other in left
        if other.raised is not None
        and (
            (other.file in began_later and other.progress is None)
            or _is_of_a_later_job(other.file, one.file)
        )
    ]
    return any(
        other.signature.role is Role.CAUSE and other.signature.confidence >= STRONG
        for other in failed
    )


def comes_of_a_stuck_start(
    one: Sighting, left: Sequence[Sighting], launches: Sequence[LogLaunch]
) -> bool:
    """Whether it is the end of the time of a job that had made no step, and another log tells of a
    fault on a line without a time, above one that was said before.
    """
    is_limit = (
        one.signature.fault is FaultClass.SLURM_TIME_LIMIT and one.signature.role is Role.STOP
    )
    if not is_limit or any(launch.progress is not None for launch in launches):
        return False
    timed = {
        launch.file: launch.last_timed_line
        for launch in launches
        if launch.file != one.file and _is_after(one.time, launch.last_time)
    }
    return any(
        other.signature.role is Role.CAUSE
        and other.signature.confidence >= STRONG
        and not (other.is_mild or other.is_retried)
        and other.time is None
        and other.line_number < timed.get(other.file, 0)
        for other in left
    )


def _is_after(end: str | None, time: str | None) -> bool:
    return end is not None and time is not None and end[:SECOND] > time[:SECOND]


def _is_of_a_later_job(file: str, other: str) -> bool:
    """Whether two logs are of jobs, by names that differ in nothing but a job's number, and the first
    one's is higher.
    """
    names = [Path(one).name for one in (file, other)]
    numbers = [_JOBS_NUMBER.findall(name) for name in names]
    shapes = {_JOBS_NUMBER.sub("#", name) for name in names}
    return len(shapes) == 1 and [*map(int, numbers[0])] > [*map(int, numbers[1])]


def is_of_an_earlier_day(one: Sighting, left: Sequence[Sighting], end: str | None) -> bool:
    """Whether a log without steps, as a kernel's, went on for days after this line, and another
    tells of a failure.

    A GPU that had an error two weeks ago, and a program that fails today, have nothing to do with
    each other.
    """
    time = one.origin.time
    if end is None or time is None or one.signature.role not in FAILED:
        return False
    failed = any(
        other.file != one.file and other.signature.role in FAILED and not other.is_mild
        for other in left
    )
    return failed and _day(end) - _day(time) > DAYS


def _day(time: str) -> int:
    """The day of a time `MM-DD ...`, as one of a year in which each month has 31."""
    return 31 * int(time[:2]) + int(time[3:5])


def is_refusal(one: Sighting) -> bool:
    """Whether the scheduler did not take a job."""
    return _SUBMITS.search(one.text) is not None and one.signature.fault in _OF_SUBMISSIONS


def is_of_another_job(one: Sighting, end: Sighting) -> bool:
    """Whether a GPU was lost in one log, and another log without times tells of a clean end: a GPU that is
    broken is none the better for it.
    """
    return one.file != end.file and None in (one.time, end.time) and is_lost_gpu(one)
