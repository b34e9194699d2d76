"""Axes: from values to places between 0 and 1, and the values at which an axis is labelled. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, tzinfo

from trainer.contract.record import Record

NICE = (1.0, 2.0, 5.0, 10.0)
MINUTE = 60.0
HOUR = 3600.0
DAY = 86400.0
MOST_TIMES = 7
TIME_STEPS = (
    *(seconds * 1.0 for seconds in (1, 2, 5, 10, 15, 30)),
    *(minutes * MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * HOUR for hours in (1, 2, 3, 6, 12)),
    *(days * DAY for days in (1, 2, 5, 7, 14, 30, 60, 90, 180, 365, 1825, 18250)),
)


class Scale(Record):
    """An axis from `low` to `high`; a logarithmic one has both above zero."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, from_zero: bool = False) -> Scale:
        """The axis that shows all values which can be shown, with a little room; 0 to 1 where there
        is none.
        """
        shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        if not shown:
            if log:
                return cls(0.1, 1.0, True)
            return cls(0.0, 1.0)
        low = min(shown)
        high = max(shown)
        if log:
            if high > low:
                factor = (high / low) ** 0.04
            else:
                factor = 1.1
            return cls(low / factor, high * factor, True)
        room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(0.0 if from_zero and low >= 0 else low - room, high + room)

    def at(self, value: float) -> float | None:
        """Where the value stands, 0 at `low` and 1 at `high`; None where it cannot be shown."""
        if not math.isfinite(value) or (self.is_log and value <= 0):
            return None
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the axis, at most `most` or so."""
        if self.is_log:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            for choice in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
                found = [
                    digit * 10.0**power for power in range(first, last + 1) for digit in choice
                ]
                found = [value for value in found if self.low <= value <= self.high]
                if 2 <= len(found) <= most + 1:
                    return found
            if len(found) > most:
                return found[:: math.ceil(len(found) / most)]
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(nice * power for nice in NICE if nice * power >= raw * 0.999)
        first_step = math.ceil(self.low / step - 1e-9)
        return [
            count * step for count in range(first_step, math.floor(self.high / step + 1e-9) + 1)
        ]


def time_ticks(low: float, high: float, zone: tzinfo) -> list[tuple[float, str]]:
    """Round moments of the zone's clock between two times, each with its label."""
    step = next((step for step in TIME_STEPS if (high - low) / step <= MOST_TIMES), TIME_STEPS[-1])
    offset = datetime.fromtimestamp(low, tz=zone).utcoffset()
    if offset is None:
        shift = 0.0
    else:
        shift = offset.total_seconds()
    if step >= DAY:
        pattern = "%Y-%m-%d"
    elif step >= MINUTE:
        pattern = "%m-%d %H:%M"
    else:
        pattern = "%H:%M:%S"
    first = math.ceil((low + shift) / step)
    moments = (
        count * step - shift for count in range(first, math.floor((high + shift) / step) + 1)
    )
    return [
        (moment, datetime.fromtimestamp(moment, tz=zone).strftime(pattern)) for moment in moments
    ]


def time_title(zone: tzinfo) -> str:
    """What an axis with `time_ticks` shows."""
    return f"time ({zone})"
