"""When a periodic job is due: points on the wall clock, so that rounds never drift. Pure; `now` is
an argument.
"""

from __future__ import annotations

import math
from datetime import datetime, time, timedelta
from typing import TypeAlias
from zoneinfo import ZoneInfo

from trainer.contract.record import Record

LARGEST_SLACK_SECONDS = 30.0
LARGEST_TOLERANCE_SECONDS = 600.0
DAY_SECONDS = 86_400.0


class Every(Record):
    """At whole multiples of so many seconds since the epoch: every hour is at minute 0."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a job cannot run every {self.seconds!r} s")

    @property
    def period_seconds(self) -> float:
        return self.seconds

    def after(self, moment: float) -> float:
        """The first point later than `moment`."""
        count = math.floor(moment / self.seconds) + 1
        while count * self.seconds <= moment:  # the division was rounded
            count += 1
        return count * self.seconds

    def __str__(self) -> str:
        if self.seconds == 3600:
            return "hourly"
        for unit, name in ((DAY_SECONDS, "d"), (3600.0, "h"), (60.0, "min")):
            if self.seconds >= unit and self.seconds % unit == 0:
                return f"every {self.seconds / unit:.0f} {name}"
        return f"every {self.seconds:g} s"


class Daily(Record):
    """Each day at a time of day, "HH:MM", in a time zone. On the day that lacks it: as late as if
    the clock had stood.

    Raises ValueError for a zone that this machine does not know.
    """

    time: str
    zone: str

    def __post_init__(self) -> None:
        self._zone()

    @property
    def period_seconds(self) -> float:
        return DAY_SECONDS

    def after(self, moment: float) -> float:
        """The first point later than `moment`."""
        zone = self._zone()
        hour, minute = map(int, self.time.split(":"))
        day = datetime.fromtimestamp(moment, zone).date() - timedelta(days=1)
        while True:
            found = datetime.combine(day, time(hour, minute), zone).timestamp()
            if found > moment:
                return found
            day += timedelta(days=1)

    def _zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError):
            raise ValueError(
                f"{self.zone!r} is not a time zone; use a name such as Europe/Paris or UTC"
            ) from None

    def __str__(self) -> str:
        return f"daily {self.time} {self.zone}"


Schedule: TypeAlias = Every | Daily


def slack(schedule: Schedule) -> float:
    """How much before its point a round may start, in seconds: the scheduler's clock may be ahead
    of this node's.
    """
    return min(LARGEST_SLACK_SECONDS, schedule.period_seconds / 10)


def next_due(schedule: Schedule, started: float | None, now: float) -> float:
    """When the next round is due after one that started at `started`; `now` for a job that never
    ran.

    The result may be past: rounds that were missed are one round, not many. A start in the future
    (beyond what two machines' clocks may differ) means that the clock was set back: waiting for it
    could take years, so it is due now.
    """
    if started is None or started > now + min(schedule.period_seconds, LARGEST_TOLERANCE_SECONDS):
        return now
    return schedule.after(started + slack(schedule))


def is_due(schedule: Schedule, started: float | None, now: float) -> bool:
    """Whether a round should start now, after one that started at `started`."""
    return next_due(schedule, started, now) <= now + slack(schedule)
