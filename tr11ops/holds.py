"""Waiting work that tr11 holds: kept on record, so that only what tr11 has held is ever released by it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tr11ops.agent.records import AttemptVerdict
from tr11ops.cluster.base import Job, JobState, Scheduler, SchedulerError, SchedulerUnreachable
from tr11ops.detect.signs import is_held
from tr11ops.evidence import cause, observed
from tr11ops.launch.queue import array_number
from tr11ops.reserve import with_reserve
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import known
from trainer.contract import read_json, write_json

HOLDS_SCHEMA = 1


@dataclass(frozen=True)
class Held:
    """What came of holding, or releasing, waiting work: `done` are numbers of jobs and arrays, `refused` say why.

    `unrecorded`: why it is not on record, so that `tr11 resume` will not release it; "" when it is.
    """

    done: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    unrecorded: str = ""


def may_steer(job: Job, user: str) -> bool:
    """Whether the scheduler lets `user` hold or cancel a job: its owner may, and root."""
    return job.user in {"", user} or os.geteuid() == 0


def to_hold(queued: Iterable[Job], user: str) -> tuple[tuple[str, ...], tuple[Job, ...]]:
    """Numbers of waiting arrays and jobs that `user` may hold and that are not held yet; and those of others."""
    free = [job for job in queued if not is_held(job)]
    mine = tuple(dict.fromkeys(array_number(job) for job in free if may_steer(job, user)))
    return mine, tuple(job for job in free if not may_steer(job, user))


def hold(
    directory: RunDirectory,
    numbers: Iterable[str],
    scheduler: Scheduler,
    who: str,
    why: str,
    must_record: bool = True,
) -> Held:
    """Hold waiting work and put it on record first: a record too many releases nothing that somebody else holds.

    Raises OSError when it cannot be recorded, unless it shall be held all the same.
    """
    wanted = tuple(numbers)
    unrecorded = ""
    if wanted:
        try:
            record_holds(directory, wanted, who, why)
        except OSError as error:
            if must_record:
                raise
            unrecorded = cause(error)
    return replace(_each(wanted, scheduler.hold, scheduler, True), unrecorded=unrecorded)


def record_holds(directory: RunDirectory, numbers: Iterable[str], who: str, why: str, switch: str = "") -> None:
    """Put holds on record; `switch`: the kill switch or pause that a controller held them for. Raises OSError."""
    wanted = tuple(numbers)
    records = [entry for entry in _read(directory) if entry["job"] not in wanted]
    more = {"switch": switch} if switch else {}
    fresh = [{"job": number, "who": who, "time": time.time(), "why": why, **more} for number in wanted]
    _write(directory, [*records, *fresh])


def forget_holds(directory: RunDirectory, numbers: Iterable[str]) -> None:
    """Take what was released off the record. Raises OSError."""
    gone = set(numbers)
    if gone and _path(directory).exists():
        _write(directory, [entry for entry in _read(directory) if entry["job"] not in gone])


def held_by_tr11(directory: RunDirectory) -> frozenset[str]:
    """Numbers of jobs and arrays that tr11 has held: by a command, or by the run's own controller."""
    commands = {str(entry["job"]) for entry in _read(directory)}
    controllers: set[str] = set()
    for job_id in known(observed(directory.attempt_ids), []):
        folder = directory.paths.attempt(job_id)
        verdict = known(observed(lambda folder=folder: AttemptVerdict.read(folder)), None)  # type: ignore[misc]
        controllers |= set(verdict.held) if verdict is not None else set()
    return frozenset(commands | controllers)


def release(directory: RunDirectory, numbers: Iterable[str], scheduler: Scheduler) -> Held:
    """Release what was held, and take it off the record."""
    result = _each(tuple(numbers), scheduler.release, scheduler, False)
    forget_holds(directory, result.done)
    return result


def _write(directory: RunDirectory, entries: list[dict[str, Any]]) -> None:
    value = {"schema": HOLDS_SCHEMA, "holds": entries}
    with_reserve(directory, lambda: write_json(_path(directory), value))


def _each(numbers: tuple[str, ...], change: Callable[[str], None], scheduler: Scheduler, held: bool) -> Held:
    """A refusal is not believed where the queue shows otherwise: Slurm may answer so for a task that has ended."""
    done: list[str] = []
    refused: list[tuple[str, str]] = []
    for number in numbers:
        try:
            change(number)
            done.append(number)
        except SchedulerError as error:
            if not isinstance(error, SchedulerUnreachable) and _is_so(scheduler, number, held):
                done.append(number)
            else:
                refused.append((number, cause(error)))
    return Held(tuple(done), tuple(refused))


def _is_so(scheduler: Scheduler, number: str, held: bool) -> bool:
    """Whether work of this number waits, and all that waits is held, or none of it."""
    try:
        jobs = scheduler.jobs()
    except SchedulerError:
        return False
    waiting = [job for job in jobs if job.state is JobState.PENDING and number in {array_number(job), job.raw_id}]
    return bool(waiting) and all(is_held(job) is held for job in waiting)


def _path(directory: RunDirectory) -> Path:
    return directory.paths.requests / "holds.json"


def _read(directory: RunDirectory) -> list[dict[str, Any]]:
    value = known(observed(lambda: read_json(_path(directory))), None) or {}
    entries = value.get("holds", [])
    return [entry for entry in entries if isinstance(entry, dict) and "job" in entry]
