"""Times and ranges as people type them, and how many steps `metrics.jsonl` has since a time."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path

from tr11ops.logs.reader import FileReader, whole_lines
from tr11ops.logs.search import LEAF_BYTES, Marks
from trainer.state_file import descriptor_of

_AGO = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(s|m|min|h|d|w)(?: ago)?")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604_800}
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")
_RANGE = re.compile(r"(\d{1,15})?:(\d{1,15})?|(\d{1,15})")
_METRICS_TIME = re.compile(rb'"time": ?(\d{1,12}(?:\.\d+)?)')
LAST_ITERATION = 10**15
MOST_RANKS = 100_000


def since(text: str, now: float) -> float:
    """Seconds since the epoch for `2h`, `3d ago`, `14:30`, `2022-05-01`, `2022-05-01 14:30`, ISO with a zone.

    Times without a zone are of this machine; a clock time is the last such moment before `now`. Raises ValueError.
    """
    words = text.strip()
    if ago := _AGO.fullmatch(words):
        return now - float(ago[1]) * _UNITS[ago[2]]
    try:
        if clock := _CLOCK.fullmatch(words):
            today = datetime.datetime.fromtimestamp(now)
            then = today.replace(hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0)
            return (then if then <= today else then - datetime.timedelta(days=1)).timestamp()
        return datetime.datetime.fromisoformat(words).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError("is no time: give 2h, 30min, 3d, 14:30, 2022-05-01 or 2022-05-01T14:30") from None


def iterations(text: str) -> tuple[int, int]:
    """First and last of `100:200`, `100:`, `:200`, `100`. Raises ValueError."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or text.strip() == ":":
        raise ValueError("is no range of iterations: give 100:200, 100:, :200 or 100")
    if match[3]:
        return int(match[3]), int(match[3])
    first, last = int(match[1] or 0), int(match[2] or LAST_ITERATION)
    if first > last:
        raise ValueError("is an empty range: the first iteration comes first")
    return first, last


def numbers(text: str) -> frozenset[int]:
    """`0`, `0,8`, `0-7,16` as a set. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first > MOST_RANKS:
            raise ValueError("is no list of ranks: give 0, 0,8 or 0-7")
        found |= set(range(first, last + 1))
    return frozenset(found)


def steps_since(metrics: Path, moment: float) -> int | None:
    """How many step records `metrics.jsonl` has from `moment` on; None where it cannot be read."""
    try:
        descriptor = descriptor_of(metrics)
    except OSError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        reader = FileReader(descriptor)
        marks = Marks(reader, size, _METRICS_TIME, lambda match: float(match[1]))
        low, high = 0, size
        while high - low > LEAF_BYTES:
            middle = (low + high) // 2
            mark = marks.next(middle)
            low, high = (low, middle) if mark is None or mark.value >= moment else (middle, high)
        return sum(_is_step_since(line, moment) for line in whole_lines(reader, low, size))
    finally:
        os.close(descriptor)


def _is_step_since(line: bytes, moment: float) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.get("kind", "step") != "step":
        return False
    time = value.get("time")
    return isinstance(time, int | float) and time >= moment
