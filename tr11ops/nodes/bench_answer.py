"""What one node's measurements said: its samples, read from the lines `NAME VALUE UNIT` of a probe.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from statistics import median

from msgspec import field

from trainer.contract.record import Record

_SAMPLE = re.compile(
    r"(?P<name>[a-z][a-z0-9-]{0,23})(?:@(?P<part>[\w.-]{1,40}))? (?P<value>\S+)(?: (?P<unit>[\w/%]{1,12}))?"
)
HARDWARE = "hardware "
# of a pair, and one partner that is well says that this node is; else the worst
BEST_PART_COUNTS = ("all-reduce",)
LONGEST_WHY = 200
MOST_SAMPLES = 1000  # of one part


class NodeAnswer(Record):
    """A node's samples: measurement -> part -> values, larger is faster. `why`: what kept it from
    measuring all.
    """

    node: str
    hardware: str = ""
    samples: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    def value(self, name: str) -> float | None:
        """The speed of one measurement: the median of the samples, of the part that counts. None:
        not measured.
        """
        parts = [median(values) for values in self.samples.get(name, {}).values()]
        if not parts:
            return None
        if name in BEST_PART_COUNTS:
            return max(parts)
        return min(parts)

    def counted_samples(self, name: str) -> tuple[float, ...]:
        """The samples of the part that counts."""
        found = self.value(name)
        return next(
            (own for own in self.samples.get(name, {}).values() if median(own) == found), ()
        )


def read_answer(node: str, lines: Iterable[str], why: str = "") -> NodeAnswer:
    """The answer in a probe's lines. What is no sample is skipped; values must be finite and above
    zero.
    """
    hardware, units = "", dict[str, str]()
    samples: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        text = line.strip()
        if text.startswith(HARDWARE):
            hardware = text.removeprefix(HARDWARE)[:LONGEST_WHY]
        elif (sample := _sample(text)) is not None:
            name, part, value, unit = sample
            own = samples.setdefault(name, {}).setdefault(part, [])
            own += [value] if len(own) < MOST_SAMPLES else []
            units[name] = unit
    frozen = {
        name: {part: tuple(own) for part, own in parts.items()} for name, parts in samples.items()
    }
    return NodeAnswer(node, hardware, frozen, units, why[:LONGEST_WHY])


def is_sample(line: str) -> bool:
    """Whether a line is part of an answer, not a program's other words."""
    return line.startswith(HARDWARE) or _sample(line.strip()) is not None


def _sample(text: str) -> tuple[str, str, float, str] | None:
    """Name, part, value and unit; None for what is no sample."""
    found = _SAMPLE.fullmatch(text)
    try:
        if found:
            value = float(found["value"])
        else:
            value = math.nan
    except ValueError:
        return None
    if found is None or not math.isfinite(value) or value <= 0:
        return None
    return found["name"], found["part"] or "", value, found["unit"] or ""
