"""Finding a place in a log of any size with few reads: by iteration, by time, by attempt.

Iterations rise along a log but for restarts, which go back; so a plain bisection is not enough. A
part of the log is passed over only if no step in it can be in the range: between two known places,
an iteration cannot lie further away than the part has room for lines of steps. Where iterations
jump ahead and back again within one part, unseen from both its ends, it may be missed; no restart
does that.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tr11ops.dialects.reading import dialect_in, iteration_of
from tr11ops.dialects.table import dialect_named
from tr11ops.logs.lines import ATTEMPT_BYTES, ATTEMPT_WORDS, STAMP_BYTES, moment
from tr11ops.logs.reader import BLOCK_BYTES, LONGEST_LINE_BYTES, LogReader, whole_blocks
from trainer.contract.record import Record

LEAF_BYTES = 256 << 10  # parts that are not divided any further
SHORTEST_STEP_LINE = 60  # where no line of a step was seen whole
LARGEST_BLOCK_BYTES = 4 << 20
SAMPLE_BYTES = 256 << 10  # in which a log shows its dialect
USUAL = "megatron"  # the dialect of our own logs, which may be large
NEWLINE = ord("\n")


class LineMark(Record):
    """A line that says where it is: the offset of its beginning, and its iteration or its time."""

    offset: int
    value: float


class Region(Record):
    """Part of a log: bytes [start, end)."""

    start: int
    end: int


def step_marks(reader: LogReader, size: int) -> Marks:
    """The lines of steps, in the dialect of the log's last ones, or of its first."""
    samples = [
        reader.read(max(0, size - SAMPLE_BYTES), SAMPLE_BYTES),
        reader.read(0, min(size, SAMPLE_BYTES)),
    ]
    found = next(
        (dialect for sample in samples if (dialect := dialect_in(sample)) is not None), None
    )
    dialect = found or dialect_named(USUAL)
    return Marks(
        reader,
        size,
        dialect.step_bytes,
        _plain_step_value if dialect.name == USUAL else _step_value,
    )


def _plain_step_value(match: re.Match[bytes]) -> float | None:
    return float(match["iteration"])


def _step_value(match: re.Match[bytes]) -> float | None:
    """The line is read as all readers of it do: its number may be that of a step of an epoch."""
    block = match.string
    start = block.rfind(b"\n", 0, match.start()) + 1
    end = block.find(b"\n", match.end())
    found = iteration_of(block[start : end if end >= 0 else len(block)].decode("utf-8", "replace"))
    if found is None:
        return None
    return float(found)


def stamp_value(match: re.Match[bytes]) -> float | None:
    return moment(match[0])


@dataclass
class Marks:
    """The marked lines of the first `size` bytes, looked up as needed; what was read once is not
    read again.
    """

    reader: LogReader
    size: int
    pattern: re.Pattern[bytes]
    value: Callable[[re.Match[bytes]], float | None]

    def __post_init__(self) -> None:
        # looked from, found at, value; found at size: nothing there
        self._known: list[tuple[int, int, float]] = []
        self.shortest: int | None = None  # bytes of the shortest marked line that was read so far

    def next(self, offset: int) -> LineMark | None:
        """The first marked line that begins at or after `offset`."""
        at = bisect_right(self._known, (offset, self.size + 1, 0.0)) - 1
        if at >= 0 and self._known[at][1] >= offset:
            _, found, value = self._known[at]
            if found < self.size:
                return LineMark(found, value)
            return None
        later = None
        if at + 1 < len(self._known):
            later = self._known[at + 1]
        if later is None:
            end = self.size
        else:
            end = min(self.size, later[0] + BLOCK_BYTES)
        mark = next(self._from(offset, end), None)
        if mark is None and later is not None and later[1] < self.size:
            mark = LineMark(later[1], later[2])  # what lies behind was looked through before
        insort(
            self._known, (offset, mark.offset if mark else self.size, mark.value if mark else 0.0)
        )
        return mark

    def last(self) -> LineMark | None:
        """The last marked line."""
        return self.back(1)

    def around(self, offset: int) -> list[LineMark]:
        """The marked lines in the block at `offset`."""
        end = min(self.size, offset + LEAF_BYTES)
        return [mark for mark in self._from(offset, end) if mark.offset < end]

    def first_outside(self, offset: int, low: float, high: float) -> LineMark | None:
        """The first marked line at or after `offset` whose value is not between `low` and `high`."""
        return next((mark for mark in self._from(offset) if not low <= mark.value <= high), None)

    def back(self, count: int) -> LineMark | None:
        """The `count`-th marked line from the end; the first one where there are fewer."""
        window = BLOCK_BYTES
        while True:
            start = max(0, self.size - window)
            found = list(self._from(start))
            if len(found) >= count or start == 0:
                if found:
                    return found[-min(count, len(found))]
                return None
            window *= 4

    def place_before(self, value: float) -> int:
        """Where values rise, a place before all lines of at least this value, and within LEAF_BYTES
        of the first.
        """
        low = 0
        high = self.size
        while high - low > LEAF_BYTES:
            middle = (low + high) // 2
            mark = self.next(middle)
            if mark is None or mark.value >= value:
                high = middle
            else:
                low = middle
        return low

    def _from(self, offset: int, end: int | None = None) -> Iterator[LineMark]:
        """Marked lines from `offset` on, in order. Reads ahead in blocks that grow."""
        limit = self.size if end is None else end
        position = max(0, offset - 1)
        at_line = offset <= 0
        rest = b""
        length = BLOCK_BYTES // 4
        while position < limit and (
            block := self.reader.read(position, min(length, limit - position))
        ):
            data = rest + block
            base = position - len(rest)
            position += len(block)
            length = min(2 * length, LARGEST_BLOCK_BYTES)
            if not at_line:
                cut = data.find(b"\n")
                if cut < 0:
                    rest = b""
                    continue
                data, base, at_line = data[cut + 1 :], base + cut + 1, True
            if position >= limit:
                whole = len(data)
            else:
                whole = data.rfind(b"\n") + 1
            yield from self._marks(data[:whole], base)
            rest = data[whole:]
            if len(rest) > LONGEST_LINE_BYTES:
                rest = b""
                at_line = False

    def _marks(self, data: bytes, base: int) -> Iterator[LineMark]:
        last_line = -1
        for match in self.pattern.finditer(data):
            start = data.rfind(b"\n", 0, match.start()) + 1
            value = None
            if start != last_line:
                value = self.value(match)
            if value is not None:
                last_line = start
                end = data.find(b"\n", match.end())
                if end >= 0:
                    self.shortest = min(self.shortest or end - start, end - start)
                yield LineMark(base + start, value)


# ----------------------------------------------------------------------------- by iteration
def step_regions(reader: LogReader, size: int, first: int, last: int) -> list[Region]:
    """The parts of the log that hold every step from `first` to `last`, and what follows each, to
    the next other step.

    A part may hold other steps too, so the lines have to be looked at one by one.
    """
    marks = step_marks(reader, size)
    newest = marks.last()
    if newest is None:
        return []
    density = _density(marks, newest)
    waiting = [Region(0, size)]
    found = list[Region]()
    while waiting:
        part = waiting.pop()
        begin = marks.next(part.start)
        if begin is None or begin.offset >= part.end:
            continue
        end = marks.next(part.end) or newest
        slack = (part.end - part.start) * density
        low = max(0.0, min(begin.value, end.value) - slack)
        high = max(begin.value, end.value) + slack
        if low > last or high < first:
            continue
        if (first <= low and high <= last) or part.end - part.start <= LEAF_BYTES:
            found.append(Region(begin.offset, part.end))
            continue
        middle = (part.start + part.end) // 2
        waiting += [Region(middle, part.end), Region(part.start, middle)]
    joined = _joined(found)
    ends = [marks.first_outside(region.end, first, last) for region in joined]
    return _joined(
        [
            Region(part.start, end.offset if end else size)
            for part, end in zip(joined, ends, strict=True)
        ]
    )


def _density(marks: Marks, newest: LineMark) -> float:
    """Iterations that one byte of the log can advance by at most: steps a line, and the shortest
    line of a step.
    """
    samples = [marks.around(0), marks.around(max(0, newest.offset - LEAF_BYTES // 2))]
    rises = [
        after.value - before.value
        for sample in samples
        for before, after in pairwise(sample)
        if after.value > before.value
    ]
    # others have fewer digits
    if marks.shortest:
        shortest = 0.75 * marks.shortest
    else:
        shortest = SHORTEST_STEP_LINE
    return (median(rises) if rises else 100.0) / shortest


def _joined(regions: list[Region]) -> list[Region]:
    joined: list[Region] = []
    for region in regions:
        if joined and region.start <= joined[-1].end:
            joined[-1] = Region(joined[-1].start, max(joined[-1].end, region.end))
        else:
            joined.append(region)
    return joined


# ----------------------------------------------------------------------------- by time
def offset_since(reader: LogReader, size: int, time: float) -> int | None:
    """The first line that carries a time at or after `time`; None where there is none.

    Stamps rise along a log; where they do not (two clocks), one of the places where they pass
    `time` is found.
    """
    marks = Marks(reader, size, STAMP_BYTES, stamp_value)
    mark = marks.next(marks.place_before(time))
    while mark is not None and mark.value < time:
        mark = marks.next(mark.offset + 1)
    if mark:
        return mark.offset
    return None


# ----------------------------------------------------------------------------- by attempt
def attempt_regions(reader: LogReader, size: int, attempt: str) -> tuple[list[Region], int]:
    """What one attempt wrote into a main log, and how many launches of any attempt the log tells
    of.

    Reads the whole log: nothing else says where an attempt begins.
    """
    regions: list[Region] = []
    launches = 0
    begun = -1
    for offset, name in _launches(reader, size):
        launches += 1
        if begun >= 0 and name != attempt:
            regions.append(Region(begun, offset))
            begun = -1
        elif begun < 0 and name == attempt:
            begun = offset
    if begun >= 0:
        regions.append(Region(begun, size))
    return regions, launches


def _launches(reader: LogReader, size: int) -> Iterator[tuple[int, str]]:
    position = 0
    for block in whole_blocks(reader, 0, size):
        at = block.find(ATTEMPT_WORDS)
        while at >= 0:
            match = ATTEMPT_BYTES.match(block, at)
            if match and (at == 0 or block[at - 1] == NEWLINE):
                yield position + at, match[1].decode("utf-8", "replace")
            at = block.find(ATTEMPT_WORDS, at + 1)
        position += len(block)
