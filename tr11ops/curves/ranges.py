"""A part of a training's course: from one place to another, each in iterations, samples or tokens.
Pure.
"""

from __future__ import annotations

import re
from typing import Literal

from trainer.contract.documents import document
from trainer.contract.record import Record

CurveUnit = Literal["iterations", "samples", "tokens"]
EXAMPLES = "1200, 3Msamples or 50Btokens"
_PLACE = re.compile(r"(\d+(?:\.\d+)?) ?([kMBT]?) ?(iterations?|samples?|tokens?)?")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # as screens show large counts


class CurvePlace(Record):
    """A place on a course: so many iterations done, or samples or tokens consumed."""

    value: float
    unit: CurveUnit = "iterations"

    def __str__(self) -> str:
        if self.unit == "iterations":
            return f"iteration {self.value:,.0f}"
        return f"{self.value:,.0f} {self.unit}"

    @classmethod
    def of(cls, text: str) -> CurvePlace:
        """The place that a person means: a number of iterations, or with a unit, e.g. `3Msamples`,
        `50 B tokens`.

        Raises ValueError for anything else.
        """
        match = _PLACE.fullmatch(text.strip())
        if match is None or len(text) > 40:
            raise ValueError(f"{text[:40]!r} is no place in a training; write it like {EXAMPLES}")
        unit = match[3] or "iterations"
        return cls(float(match[1]) * _FACTORS[match[2]], _UNITS[unit.removesuffix("s")])


_UNITS: dict[str, CurveUnit] = {"iteration": "iterations", "sample": "samples", "token": "tokens"}


class CurveRange(Record):
    """The steps from `first` to `last`, both included; None: from the begin, to the end."""

    first: CurvePlace | None = None
    last: CurvePlace | None = None

    def has(self, iteration: int, samples: float, tokens: float) -> bool:
        """Whether a step after which so much was done lies in it."""
        done: dict[CurveUnit, float] = {
            "iterations": iteration,
            "samples": samples,
            "tokens": tokens,
        }
        if self.first is not None and done[self.first.unit] < self.first.value:
            return False
        return self.last is None or done[self.last.unit] <= self.last.value

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.first is None and self.last is None

    def __str__(self) -> str:
        """In words; "" for all of a course."""
        if self.first is None:
            begin = ""
        else:
            begin = f"from {self.first}"
        if self.last is None:
            end = ""
        else:
            end = f"to {self.last}"
        return " ".join(filter(None, (begin, end)))

    def document(self) -> dict[str, object]:
        """As JSON values; null where it is open."""
        ends = {"from": self.first, "to": self.last}
        return {name: None if place is None else document(place) for name, place in ends.items()}


WHOLE = CurveRange()


def range_of(first: CurvePlace | None, last: CurvePlace | None) -> CurveRange:
    """Both ends together. Raises ValueError where the second is before the first."""
    if (
        first is not None
        and last is not None
        and first.unit == last.unit
        and last.value < first.value
    ):
        raise ValueError(f"{last} is before {first}")
    return CurveRange(first, last)
