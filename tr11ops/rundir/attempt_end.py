"""When an attempt ended: the one answer for status, alerts, accounts and reports. Times are seconds
since the epoch.

Someone's word of it comes first: the scheduler's, and that of the attempt's own batch script. Where
no one has said it, the attempt is dated by its last sign of life, and whoever shows that says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tr11ops.base.units import duration
from trainer.contract.record import Record

_WRITTEN_TO_THE_LAST = ("workers", "failures", "nodes", "launches")  # folders of an attempt


class AttemptEnd(Record):
    """When it ended. `is_told`: someone has said so; else it is the last moment at which it is
    known to have lived.
    """

    time: float
    is_told: bool = True

    def ago(self, now: float) -> str:
        """How long ago, in words."""
        past = f"{duration(max(0.0, now - self.time))} ago"
        if self.is_told:
            return past
        return f"last word {past}"


def told_end(scheduler: float | None, verdict: float | None) -> float | None:
    """When an attempt gave its nodes back, by the scheduler and its batch script; None where
    neither says it.
    """
    told = [moment for moment in (scheduler, verdict) if moment]
    return max(told, default=None)


def last_sign_in(attempt: Path) -> float:
    """The newest time of what the attempt itself wrote in its folder; 0 where nothing tells.

    Its workers write to their logs to the last. The folder's own time says little: others leave
    things there too.
    """
    return max(_signs_in(attempt), default=0.0)


def _signs_in(attempt: Path) -> Iterator[float]:
    for name in _WRITTEN_TO_THE_LAST:
        for place, _, files in os.walk(attempt / name):
            for file in files:
                yield _changed(Path(place, file))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
