"""Ranges as people type them, and how many steps `metrics.jsonl` has since a time."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tr11ops.logs.reader import FileReader, whole_lines
from tr11ops.logs.search import Marks
from trainer.contract.metrics_record import parse_record
from trainer.contract.state_file import descriptor_of

_RANGE = re.compile(r"(\d{1,15})?[:-](\d{1,15})?|(\d{1,15})")
_METRICS_TIME = re.compile(rb'"time": ?(\d{1,12}(?:\.\d+)?)')
LAST_ITERATION = 10**15
TAIL_BYTES = 64 << 10  # more than any record has
MOST_RANKS = 100_000


def iterations(text: str) -> tuple[int, int]:
    """First and last of `100-200`, `100-`, `-200`, `100`; a colon does as well. Raises ValueError."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or text.strip() in {":", "-"}:
        raise ValueError("is no range of iterations: give 100-200, 100-, -200 or 100")
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
        if match:
            first, last = (int(match[1]), int(match[2] or match[1]))
        else:
            first, last = (1, 0)
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
        tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        size -= len(tail) - 1 - tail.rfind(b"\n")  # the last line is being written
        reader = FileReader(descriptor)
        start = Marks(reader, size, _METRICS_TIME, lambda match: float(match[1])).place_before(
            moment
        )
        return sum(_is_step_since(line, moment) for line in whole_lines(reader, start, size))
    finally:
        os.close(descriptor)


def _is_step_since(line: bytes, moment: float) -> bool:
    record = parse_record(line)
    return (
        record is not None and record.is_step and record.time is not None and record.time >= moment
    )
