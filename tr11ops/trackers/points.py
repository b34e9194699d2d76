"""What of `metrics.jsonl` goes to a tracker: of every iteration the numbers that count, once.

Where a stretch of the file goes back (a resume, a roll-back), what was trained again replaces what it was
trained again for. Memory is 16 bytes for each line, however long the run.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.contract.metrics_record import (
    LONGEST_LINE,
    STEP,
    VALIDATION,
    MetricsRecord,
    parse_record,
)
from trainer.contract.record import Record
from trainer.contract.state_file import open_for_reading

_NO_METRICS = frozenset({"iteration", "time", "total_iterations"})


class Point(Record):
    """The finite numbers of one iteration, by their keys in `metrics.jsonl`; those of an evaluation
    begin with the group's name: `valid/lm_loss`. `time` is in seconds since the epoch. `has_step`:
    the numbers of a training step are among them.
    """

    iteration: int
    time: float
    values: Mapping[str, float]
    has_step: bool


def _no_places() -> array[int]:
    return array("q")


@dataclass
class Course:
    """The lines of one stretch of the file that count: `iterations` rises, and `offsets` are the
    lines' places in bytes. `end` is behind the last whole line; `lowest` the first iteration that a
    step in it goes back to, None without a step.
    """

    path: Path
    end: int
    lowest: int | None = None
    iterations: array[int] = field(default_factory=_no_places)
    offsets: array[int] = field(default_factory=_no_places)

    def take(self, record: MetricsRecord, offset: int) -> None:
        """One line more; a step that was trained again cuts what was there from it on."""
        iteration = record.iteration
        if iteration is None or record.time is None:
            return
        if record.kind == STEP:
            cut = bisect_left(self.iterations, iteration)
            del self.iterations[cut:], self.offsets[cut:]
            if self.lowest is None or iteration < self.lowest:
                self.lowest = iteration
        elif record.kind != VALIDATION or (self.iterations and iteration < self.iterations[-1]):
            return
        self.iterations.append(iteration)
        self.offsets.append(offset)

    def points(self) -> Iterator[Point]:
        """Every iteration, ascending. Raises OSError."""
        waiting: list[MetricsRecord] = []
        with open_for_reading(self.path) as stream:
            for offset in self.offsets:
                stream.seek(offset)
                record = parse_record(stream.readline(LONGEST_LINE))
                if record is None:  # the file is another one since it was looked through
                    continue
                if waiting and waiting[0].iteration != record.iteration:
                    yield _point(waiting)
                    waiting = []
                waiting.append(record)
        if waiting:
            yield _point(waiting)


def course_from(path: Path, begin: int) -> Course:
    """What counts of the whole lines from the byte `begin` on. Raises OSError as the file system does.

    A file that is shorter than that is another one: it is read from its beginning.
    """
    with open_for_reading(path) as stream:
        if begin > stream.seek(0, 2):
            begin = 0
        stream.seek(begin)
        course = Course(path, begin)
        offset, is_whole = begin, True
        while line := stream.readline(LONGEST_LINE):
            ends = line.endswith(b"\n")
            if ends and is_whole and (record := parse_record(line)) is not None:
                course.take(record, offset)
            offset += len(line)
            is_whole = ends
            if ends:
                course.end = offset
    return course


def _point(records: list[MetricsRecord]) -> Point:
    values: dict[str, float] = {}
    for record in records:
        prefix = ""
        if record.kind == VALIDATION:
            prefix = f"{record.values.get('name', 'valid')}/"
        values |= {f"{prefix}{name}": number for name, number in _numbers(record)}
    return Point(
        records[0].iteration or 0,
        time=records[-1].time or 0.0,
        values=values,
        has_step=any(record.kind == STEP for record in records),
    )


def _numbers(record: MetricsRecord) -> Iterator[tuple[str, float]]:
    for name in record.values:
        if name not in _NO_METRICS and math.isfinite(number := record.number(name)):
            yield name, number
