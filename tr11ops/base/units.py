"""Numbers and times as people read and type them: durations, sizes, rates, counts, points of time.

What programs read has forms of its own: log lines (`watchdog/log_lines`), Slurm's time limits
(`runcard/slurm_syntax`), JSON (`iso_time`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, tzinfo

from trainer.contract.record import LARGEST_NUMBER
from trainer.contract.units import size

# Points and lengths of time as people type them, for every option that takes one.

_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(s|m|min|h|d|w)?", re.IGNORECASE)
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604_800}
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")


def span_seconds(text: str, unit: str | None = "s") -> float:
    """Seconds of `90s`, `30m` or `30min`, `2h`, `1.5d`, `2w`; a bare number is in `unit` (None: it
    is refused).

    Raises ValueError.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None or not (match[2] or unit):
        raise ValueError("is no length of time; write 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[(match[2] or unit or "s").lower()]


def since(text: str, now: float) -> float:
    """Seconds since the epoch for `2h`, `3d ago`, `14:30`, `2022-05-01`, `2022-05-01 14:30`, ISO
    with a zone.

    Times without a zone are of this machine; a clock time is the last such moment before `now`.
    Raises ValueError.
    """
    words = text.strip()
    try:
        return now - span_seconds(words.removesuffix(" ago"), None)
    except ValueError:
        pass
    try:
        if clock := _CLOCK.fullmatch(words):
            today = datetime.fromtimestamp(now)
            then = today.replace(
                hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0
            )
            return (then if then <= today else then - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(words).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "is no time; write 12h, 90min, 3d, 14:30, 2022-05-01 or 2022-05-01T14:30"
        ) from None


__all__ = [
    "bytes_of",
    "counted",
    "duration",
    "finite",
    "first_few",
    "iso_time",
    "node_time",
    "number_in",
    "quantity",
    "rough_duration",
    "size",
    "timestamp",
]

DAY = "%Y-%m-%d"
MINUTE = f"{DAY} %H:%M"
ZONED = f"{MINUTE} %Z"
LEAST_NODE_HOURS = 2.0  # of all nodes together; less is shown in seconds
NEAR = "%m-%d %H:%M"  # where the year says nothing


def duration(seconds: float) -> str:
    """Two units at most: `42 s`, `3 min 20 s`, `5 h 07 min`, `12 d 3 h`."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def rough_duration(seconds: float) -> str:
    """The larger of its units alone, for narrow columns and what is known roughly: `42 s`, `3 min`,
    `5 h`, `12 d`.
    """
    return " ".join(duration(seconds).split()[:2])


def timestamp(time: float, zone: tzinfo | None, form: str = ZONED) -> str:
    """A point of time in `zone`, or in local time; "never" for one that no calendar holds."""
    try:
        return datetime.fromtimestamp(time, tz=zone).astimezone(zone).strftime(form).rstrip()
    except (ValueError, OverflowError, OSError):
        return "never"


def counted(count: float, noun: str, nouns: str = "") -> str:
    """A count with its noun, whose plural takes an s where none is given: `1 step`, `3.5 days`,
    `12,800 samples`.
    """
    if count == int(count):
        number = f"{int(count):,}"
    else:
        number = f"{count:g}"
    return f"{number} {noun if count == 1 else nouns or f'{noun}s'}"


def first_few(words: Iterable[object], most: int = 4) -> str:
    """Words with commas between them, and how many were left out: `n1, n2 and 3 more`."""
    found = [str(word) for word in words]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def node_time(*hours: float) -> str:
    """Node-hours, node-seconds where these would be next to none: `12.5 node-hours`; two as `3 of
    950 node-seconds`.
    """
    if max(hours) < LEAST_NODE_HOURS:
        return " of ".join(f"{3600 * each:,.0f}" for each in hours) + " node-seconds"
    return " of ".join(f"{each:,.1f}" for each in hours) + " node-hours"


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP]?)(i?)B")


def bytes_of(text: str) -> int:
    """Bytes of a size as a run card writes it: `400 TiB` in powers of 1024, `1.5TB` in powers of
    1000, `512B`.

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text[:40]!r} is not a size, e.g. 400 TiB or 1.5TB")
    factor: int = (1024 if match[3] else 1000) ** " KMGTP".index(match[2] or " ")
    return round(float(match[1]) * factor)


def quantity(count: float) -> str:
    """A large count in three or four digits: `950`, `12.3 k`, `47.8 M`, `97.8 B`."""
    if count < 10_000:
        return f"{count:.0f}"
    for unit in ("k", "M", "B"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} T"


def finite(value: float) -> float | None:
    """The number where JSON can hold it; None for infinities and what is no number."""
    if math.isfinite(value):
        return value
    return None


def number_in(value: object) -> float | None:
    """The number that a file holds; None for anything else (JSON as Python reads it knows NaN, and
    integers of any length).
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < LARGEST_NUMBER
    ):
        return None
    return float(value)


def iso_time(moment: float | None) -> str | None:
    """ISO 8601 in UTC, to the second; None for a time that is not known or that no calendar holds."""
    if moment is None:
        return None
    try:
        return datetime.fromtimestamp(moment, tz=UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def format_time_limit(seconds: int) -> str:
    """`seconds` as Slurm reads it, HH:MM:SS (hours may exceed 24)."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
