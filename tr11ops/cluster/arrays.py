"""Task numbers of an array as Slurm writes them: "1-10%1", "0-8:4", "1,3,5-7". One reader, one
writer. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tr11ops.base.errors import ArraySyntaxError
from trainer.contract.record import Record

LARGEST_ARRAY_INDEX = 4_000_000  # Slurm's MaxArraySize cannot be configured beyond this
MOST_ARRAY_TASKS = 10_000  # of one submission
# Slurm's "none": a file's name has it for the task of a job that is no array's
NO_TASK = 0xFFFFFFFE
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


class ArraySpec(Record):
    """An array as it is submitted: sorted `indices`, of which `throttle` may run at once (None: no
    limit).

    `step` is that of a single range, 1 for any other array.
    """

    text: str  # what the scheduler is given, "1-10%1"
    indices: tuple[int, ...]
    throttle: int | None = None
    step: int = 1

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.indices)


def parse_array(text: str) -> ArraySpec:
    """Read what `--array` takes: `1-10%1`, `0-15:4`, `1,3,5-7`. A task that is named twice counts
    once, as in Slurm.

    Raises ArraySyntaxError for other syntax, for an empty range, an index that Slurm cannot have,
    too many tasks.
    """
    body, percent, limit = text.strip().partition("%")
    if percent and not (re.fullmatch(r"[0-9]{1,9}", limit) and int(limit) > 0):
        raise ArraySyntaxError("the number after % must be 1 or more", "use 1-10%1")
    ranges = [_strict_range(part) for part in body.split(",")]
    named = sum(map(len, ranges))
    if named > MOST_ARRAY_TASKS or max(found[-1] for found in ranges) > LARGEST_ARRAY_INDEX:
        raise ArraySyntaxError(
            f"has more than {MOST_ARRAY_TASKS} tasks, or an index above {LARGEST_ARRAY_INDEX}"
        )
    indices = sorted({number for found in ranges for number in found})
    step = ranges[0].step if len(ranges) == 1 else 1
    return ArraySpec(text.strip(), tuple(indices), int(limit) if percent else None, step)


def task_numbers(text: str) -> tuple[int, ...]:
    """The tasks that the queue shows: "4-10%1", "[1,3,7-9]". What cannot be read of it is left out."""
    numbers: list[int] = []
    for part in _parts(text):
        numbers.extend((_range(part) or range(0))[: LARGEST_ARRAY_INDEX + 1 - len(numbers)])
    return tuple(numbers)


def named_tasks(text: str) -> tuple[int, ...] | None:
    """The tasks that a job's name means: "7", "[4-10%1]"; None where any of it cannot be read."""
    ranges = [_range(part) for part in _parts(text)]
    if not all(ranges) or sum(len(found or ()) for found in ranges) > LARGEST_ARRAY_INDEX + 1:
        return None
    return task_numbers(text)


def _parts(text: str) -> list[str]:
    return text.partition("%")[0].strip("[]").split(",")


def format_ranges(numbers: Iterable[int]) -> str:
    """`1,2,3,7` as people write it: "1-3,7". The numbers must be sorted."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _range(part: str) -> range | None:
    """One number or range; None for other text, and empty for a range that runs backwards or has no
    step.
    """
    match = _RANGE.fullmatch(part)
    if match is None:
        return None
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if step:
        return range(first, last + 1, step)
    return range(0)


def _strict_range(part: str) -> range:
    found = _range(part)
    if found is None:
        raise ArraySyntaxError("is not an array: a range such as 1-10, or numbers with commas")
    if not found:
        first, last, *_ = (*re.split("[-:]", part), "")
        turned = int(last) < int(first)
        raise ArraySyntaxError(
            f"the range {part} is empty", f"use {last}-{first}" if turned else f"use {first}-{last}"
        )
    return found
