"""The run's clock: its file system stamps every sign of life, so ages are judged by that clock, not
by this machine's.

Also the times that a node wrote into the run directory are taken to it, where the node's clock is
wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause
from tr11ops.cluster.base import SchedulerClock
from tr11ops.observe.observations import ClockReading
from tr11ops.observe.snapshot import Attempt, Step
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EndMarker, Heartbeat
from trainer.contract.files import file_system_time
from trainer.contract.record import Record

BEATS_STAMPED = 8  # heartbeats whose stamps are looked at; they come from as many nodes
FILE_SYSTEM, SCHEDULER = "the file system's", "the scheduler's"


class Moment(Record):
    """Now, by the run's clock (seconds since the epoch).

    `ahead`: how far this machine's clock is ahead of it (behind: below zero), 0.0 within the bound,
    Unknown where it could be compared with nothing. `against`: whose clock it was compared with.
    """

    time: float
    ahead: Observed[float] = 0.0
    against: str = FILE_SYSTEM


# ----------------------------------------------------------------------------- this machine's clock
def moment_of(directory: RunDirectory, bound: float, scheduler: object = None) -> Moment:
    """The moment of a look. Clocks that differ by less than `bound` seconds are taken to agree.

    Files that are written all the time tell it while the run is alive. Else the file system is
    asked, by a file that is gone at once; where nothing may be written, the scheduler.
    """
    now = time.time()
    newest = _newest_stamp(directory)
    if newest is None or abs(now - newest) <= bound:
        return Moment(now)  # nothing here has an age, or what has is young
    try:
        before, stamped = file_system_time(directory.paths.state)
        ahead, against = before - stamped, FILE_SYSTEM
    except OSError as error:
        told = _scheduler_time(scheduler)
        if told is not None:
            ahead, against = now - told, SCHEDULER
        elif newest > now:
            ahead, against = now - newest, FILE_SYSTEM
        else:
            return Moment(
                now, Unknown(f"this machine's clock could be compared with none: {cause(error)}")
            )
    if abs(ahead) <= bound:
        return Moment(now)
    return Moment(now - ahead, ahead, against)


def _newest_stamp(directory: RunDirectory) -> float | None:
    """The newest of the stamps of the files that a living run writes all the time."""
    paths = directory.paths
    files = [paths.metrics, paths.main_log]
    try:
        with os.scandir(paths.heartbeats) as entries:
            for entry, _ in zip(entries, range(BEATS_STAMPED), strict=False):
                files.append(Path(entry.path))
    except OSError:
        pass
    stamps = []
    for path in files:
        try:
            stamps.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(stamps, default=None)


def _scheduler_time(scheduler: object) -> float | None:
    if not isinstance(scheduler, SchedulerClock):
        return None
    try:
        return scheduler.clock()
    except (SchedulerError, OSError, ValueError):
        return None


# ----------------------------------------------------------------------------- the nodes' clocks
def skews(clocks: Iterable[ClockReading], bound: float) -> dict[str, float]:
    """How far each host's clock is ahead of the file system's (behind: below zero), where it is
    beyond `bound` seconds.

    A file may have been written slowly: the host's best file counts.
    """
    best: dict[str, float] = {}
    for entry in clocks:
        ahead = entry.written - entry.stamped
        if entry.host not in best or abs(ahead) < abs(best[entry.host]):
            best[entry.host] = ahead
    return {host: ahead for host, ahead in best.items() if abs(ahead) > bound}


def corrected_beats(
    beats: tuple[Heartbeat, ...], ahead: dict[str, float], living: frozenset[str]
) -> tuple[Heartbeat, ...]:
    """Heartbeats in the run's clock. Only those of `living` attempts: files that were copied have
    the copy's stamps.
    """
    if not ahead:
        return beats
    return tuple(
        replace(beat, time=beat.time - ahead[beat.host])
        if beat.host in ahead and beat.job_id in living
        else beat
        for beat in beats
    )


def corrected_steps(
    steps: tuple[Step, ...],
    beats: Iterable[Heartbeat],
    ahead: dict[str, float],
    living: frozenset[str],
) -> tuple[Step, ...]:
    """Steps in the run's clock: the last rank of an attempt has written them."""
    if not ahead:
        return steps
    writers = {
        beat.job_id: beat.host
        for beat in sorted(beats, key=lambda beat: beat.rank)
        if beat.job_id in living
    }
    wrong = {job: ahead[host] for job, host in writers.items() if host in ahead}
    return tuple(
        replace(step, time=step.time - wrong[step.job_id])
        if step.time is not None and step.job_id in wrong
        else step
        for step in steps
    )


def corrected_attempts(
    attempts: tuple[Attempt, ...], ahead: dict[str, float], living: frozenset[str]
) -> tuple[Attempt, ...]:
    """End markers of living attempts in the run's clock."""
    return tuple(
        _corrected_end(attempt, ahead) if attempt.job_id in living else attempt
        for attempt in attempts
    )


def _corrected_end(attempt: Attempt, ahead: dict[str, float]) -> Attempt:
    end = attempt.end
    if not isinstance(end, EndMarker) or end.host not in ahead:
        return attempt
    moment = end.time - ahead[end.host]
    return replace(attempt, changed=moment, end=replace(end, time=moment))
