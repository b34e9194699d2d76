"""A training that tells of no step for long before its time was up. Pure.

It may have hung, and the limit only ended that; or its log was cut. The verdict stays, what is odd
is said, and it is less sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec.structs import replace

from tr11ops.base.units import duration
from tr11ops.diagnose.lines import time_of
from tr11ops.diagnose.sighting import LogLaunch, Sighting, TrainingStep
from tr11ops.diagnose.signature import FaultClass, Restart, Role

FEWEST_STEPS = 3
SHORTEST = timedelta(minutes=30)  # an evaluation or a save may take so long
USUAL_STEPS = 20  # times what a step took
ZONES = timedelta(minutes=30)  # clocks of two zones differ by a multiple of it
FEWEST_IDLE = 3  # reports in a row of an engine that has nothing to do
_ENGINE_IDLE: Final = "engine-idle"
_IDLE: Final = "what generates for the training had nothing to do any more: it hung before"
MOST: Final = 0.85  # the most for such an end


def with_silence(stop: Sighting | None, launch: LogLaunch) -> Sighting | None:
    """An end at the time limit, with what is odd of it where the last step was long before; else
    what was given.
    """
    if (
        stop is None
        or stop.signature.role is not Role.STOP
        or stop.signature.fault is not FaultClass.SLURM_TIME_LIMIT
    ):
        return stop
    if _has_idle_engine(launch):
        signature = replace(
            stop.signature,
            confidence=min(stop.signature.confidence, MOST),
            helps=Restart.UNKNOWN,
            meaning=f"{stop.signature.meaning}; {_IDLE}",
        )
        return replace(stop, signature=signature)
    silent = _silent_before(stop.origin.time, launch.steps)
    if silent is None:
        return stop
    silence = (
        f"no step came for {duration(silent.total_seconds())} before: a hang, or a log that was cut"
    )
    signature = replace(
        stop.signature,
        confidence=min(stop.signature.confidence, MOST),
        meaning=f"{stop.signature.meaning}; {silence}",
    )
    return replace(stop, signature=signature)


def _has_idle_engine(launch: LogLaunch) -> bool:
    """Whether the engine that generates for the training reported again and again, after the last step, that
    it has nothing to do.
    """
    last = launch.progress
    if last is None:
        return False
    idle = [
        one
        for one in launch.sightings
        if one.signature.id == _ENGINE_IDLE
        and one.file == launch.file
        and one.line_number > last.line_number
    ]
    return len(idle) >= FEWEST_IDLE


def has_gone_silent(launches: Sequence[LogLaunch]) -> bool:
    """Whether a line of a log was said long after the last step of all: no one knows then whether
    the training still runs.
    """
    steps = max((launch.steps for launch in launches), key=len, default=())
    return any(_silent_before(launch.last_time, steps) is not None for launch in launches)


def _silent_before(time: str | None, steps: Sequence[TrainingStep]) -> timedelta | None:
    """How long no step had come at that time; None where that is usual, or not known."""
    times = [said for step in steps if (said := _time_of(step)) is not None]
    end = _as_time(time)
    if end is None or len(times) < FEWEST_STEPS:
        return None
    silent = end - times[-1]
    usual = _usual(times)
    if silent < max(SHORTEST, USUAL_STEPS * usual) or _may_be_another_zone(silent, usual):
        return None
    return silent


def _usual(times: Sequence[datetime]) -> timedelta:
    return timedelta(
        seconds=median((later - earlier).total_seconds() for earlier, later in pairwise(times))
    )


def _may_be_another_zone(silent: timedelta, usual: timedelta) -> bool:
    """Whether the two clocks may be of different time zones, and the last step right before the
    end.
    """
    beyond = silent % ZONES
    return beyond <= max(2 * usual, timedelta(minutes=2))


def _time_of(step: TrainingStep) -> datetime | None:
    return _as_time(time_of(step.text))


def _as_time(time: str | None) -> datetime | None:
    """The time of a line, in a leap year, as lines need not name theirs."""
    if time is None:
        return None
    try:
        return datetime.fromisoformat(f"2000-{time[:14]}")
    except ValueError:
        return None
