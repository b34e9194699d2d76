"""The two small languages of Slurm's command line that a run card speaks: time limits and array
specifications.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from tr11ops.base.errors import ArraySyntaxError
from tr11ops.base.units import format_time_limit
from tr11ops.cluster.arrays import ArraySpec, parse_array, task_numbers
from trainer.config.card import CardError, Problem

_TIME_FORMS = (
    re.compile(r"(?P<minutes>\d{1,9})"),
    re.compile(r"(?P<minutes>\d{1,9}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<hours>\d{1,9}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"),
    re.compile(
        r"(?P<days>\d{1,9})-(?P<hours>\d{1,2})(?::(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?)?"
    ),
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
        match = None
        if text.isascii():
            match = form.fullmatch(text.strip())
        if match:
            seconds = sum(
                _UNIT_SECONDS[unit] * int(value)
                for unit, value in match.groupdict().items()
                if value
            )
            if seconds == 0:
                raise ValueError("a time limit must be above zero")
            return seconds
    raise ValueError(TIME_LIMIT_RULE)


def suggested_time_limit(text: str) -> str | None:
    """What a span as people write it (20h, 2 days, 1h30m, 90 min) is as a time limit; None for
    anything else.
    """
    if len(text) <= 60:
        parts = re.findall(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]+)", text.strip().lower())
    else:
        parts = []
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
        raise PydanticCustomError(
            "time_limit", "{rule}", {"rule": str(error), "fix": fix}
        ) from None
    return text


TimeLimit = Annotated[str, AfterValidator(checked_time_limit)]


def parse_attempts(text: str) -> ArraySpec:
    """Read `--array` of a launch: `1-10`, `1-10%1`, `3`, `0,2,5-9:2`. `%1`, one task at a time, is
    appended.

    Raises CardError for what is no array, for a task that is named twice, and for any throttle but
    1: two tasks of one array would train on the same checkpoints.
    """

    def refuse(rule: str, fix: str) -> CardError:
        return CardError("command line", [Problem("--array", text, rule, fix)])

    body, percent, throttle = text.strip().partition("%")
    if percent and throttle != "1":
        raise refuse(
            "must run one task at a time, or two tasks train on the same checkpoints",
            f"use {body}%1",
        )
    try:
        array = parse_array(f"{body}%1")
    except ArraySyntaxError as error:
        raise refuse(error.rule, error.fix) from None
    if len(task_numbers(body)) != len(array):
        raise refuse("names a task twice", "give ranges that do not overlap")
    return array
