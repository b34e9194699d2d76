"""The two small languages of Slurm's command line that a run card speaks: time limits and array specifications."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from trainer.config import CardError, Problem

LARGEST_ARRAY_INDEX = 4_000_000  # Slurm's MaxArraySize cannot be configured beyond this
LARGEST_ARRAY = 10_000

_TIME_FORMS = (
    re.compile(r"(?P<minutes>\d{1,9})"),
    re.compile(r"(?P<minutes>\d{1,9}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<hours>\d{1,9}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<days>\d{1,9})-(?P<hours>\d{1,2})(?::(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?)?"),
)
_UNIT_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_UNIT_WORDS = {
    "days": ("d", "day", "days"),
    "hours": ("h", "hr", "hrs", "hour", "hours"),
    "minutes": ("m", "min", "mins", "minute", "minutes"),
    "seconds": ("s", "sec", "secs", "second", "seconds"),
}
TIME_LIMIT_RULE = "a time limit is MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


def parse_time_limit(text: str) -> int:
    """Seconds of a Slurm time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Raises ValueError for anything else, for zero, and for `infinite`, which no array task may have.
    """
    for form in _TIME_FORMS:
        match = form.fullmatch(text.strip()) if text.isascii() else None
        if match:
            seconds = sum(_UNIT_SECONDS[unit] * int(value) for unit, value in match.groupdict().items() if value)
            if seconds == 0:
                raise ValueError("a time limit must be above zero")
            return seconds
    raise ValueError(TIME_LIMIT_RULE)


def suggested_time_limit(text: str) -> str | None:
    """What a span as people write it (20h, 2 days, 1h30m, 90 min) is as a time limit; None for anything else."""
    parts = re.findall(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]+)", text.strip().lower()) if len(text) <= 60 else []
    plain = re.sub(r"[\s,]+|and", "", text.lower())
    seconds = 0.0
    for number, word in parts:
        unit = next((unit for unit in _UNIT_SECONDS if word in _UNIT_WORDS[unit]), None)
        if unit is None:
            return None
        seconds += float(number) * _UNIT_SECONDS[unit]
    if plain != "".join(number + word for number, word in parts) or seconds < 1:
        return None
    return format_time_limit(round(seconds))


def checked_time_limit(text: str) -> str:
    """A time limit as it is. Raises pydantic's error for what is none, with the way to write it."""
    try:
        parse_time_limit(text)
    except ValueError as error:
        fix = f'write "{suggested_time_limit(text) or "100:00:00"}"'
        raise PydanticCustomError("time_limit", "{rule}", {"rule": str(error), "fix": fix}) from None
    return text


TimeLimit = Annotated[str, AfterValidator(checked_time_limit)]


def format_time_limit(seconds: int) -> str:
    """`seconds` as Slurm reads it, HH:MM:SS (hours may exceed 24)."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


@dataclass(frozen=True)
class ArraySpec:
    """An array of attempts: `indices` in the order of the tasks, of which `limit` may run at once."""

    text: str  # what Slurm is given, "1-10%1"
    indices: tuple[int, ...]
    limit: int = 1

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.indices)


def parse_array(text: str) -> ArraySpec:
    """Read `1-10`, `1-10%1`, `3`, `0,2,5-9:2`; without `%` one task at a time is meant, and `%1` is appended.

    Raises CardError for other syntax, empty or repeated ranges, indices that Slurm cannot have, and any throttle
    but 1: two tasks of one array would train on the same checkpoints.
    """

    def refuse(rule: str, fix: str) -> CardError:
        return CardError("command line", [Problem("--array", text, rule, fix)])

    body, percent, throttle = text.strip().partition("%")
    if percent and throttle != "1":
        raise refuse("must run one task at a time, or two tasks train on the same checkpoints", f"use {body}%1")
    indices: list[int] = []
    for part in body.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        if match is None:
            raise refuse("is not an array: a range such as 1-10, or numbers with commas", "use 1-10")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step == 0:
            raise refuse(f"the range {part} is empty", f"use {last}-{first}" if step else f"use {first}-{last}")
        if last > LARGEST_ARRAY_INDEX or (last - first) // step >= LARGEST_ARRAY:
            raise refuse(f"has more than {LARGEST_ARRAY} tasks, or an index above {LARGEST_ARRAY_INDEX}", "use 1-10")
        indices += range(first, last + 1, step)
        if len(indices) > LARGEST_ARRAY:
            raise refuse(f"has more than {LARGEST_ARRAY} tasks", "use 1-10")
    if len(set(indices)) != len(indices):
        raise refuse("names a task twice", "give ranges that do not overlap")
    return ArraySpec(f"{body}%1", tuple(sorted(indices)))
