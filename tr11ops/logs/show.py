"""The beginning of what is shown of a log: its last lines, or those of a time, an attempt or a range of iterations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tr11ops.base.errors import NoSuchAttempt
from tr11ops.logs.line_filter import LineFilter, LineQuery
from tr11ops.logs.reader import LogReader, line_start, tail_offset, whole_blocks
from tr11ops.logs.search import Region, attempt_regions, offset_since, step_marks, step_regions
from tr11ops.logs.skip import may_hold
from trainer.contract.record import Record

FIRST_WINDOW_BYTES = 1 << 20


class Query(Record):
    """Where to begin. `lines` from the end (None: all that was asked for). `since` in seconds since the epoch.

    `steps_since`: how many steps were logged since then, where that is known from elsewhere: a step's line has no time.
    """

    wanted: LineQuery = msgspec.field(default_factory=LineQuery)
    lines: int | None = None
    since: float | None = None
    steps_since: int | None = None

    @property
    def has_place(self) -> bool:
        return self.since is not None or self.wanted.attempt is not None or self.wanted.iterations is not None


@dataclass
class Beginning:
    """The lines to show first; afterwards `rest` is the unfinished last line, and `line_filter` goes on with it."""

    reader: LogReader
    size: int
    query: Query
    line_filter: LineFilter
    rest: bytes = b""

    def lines(self) -> Iterator[str]:
        """Raises NoSuchAttempt."""
        if self.query.has_place:
            chosen = self._through(self._regions())
        elif self.query.lines is None or self.query.wanted.is_everything:
            count = self.query.lines
            start = 0 if count is None else tail_offset(self.reader, self.size, count)
            yield from self._through([Region(start, self.size)])
            return
        else:
            chosen = self._tail(self.query.lines)
        yield from chosen if self.query.lines is None else deque(chosen, maxlen=self.query.lines)

    def _tail(self, count: int) -> Iterator[str]:
        """The last lines that the filter lets through: more and more is read until there are enough."""
        window = FIRST_WINDOW_BYTES
        while True:
            start = line_start(self.reader, max(0, self.size - window))
            self.line_filter = LineFilter(self.query.wanted)
            found = deque(self._through([Region(start, self.size)]), maxlen=count)
            if len(found) == count or start == 0:
                return iter(found)
            window *= 4

    def _regions(self) -> Sequence[Region]:
        regions: Sequence[Region] = [Region(0, self.size)]
        if self.query.wanted.attempt is not None:
            regions, launches = attempt_regions(self.reader, self.size, self.query.wanted.attempt)
            if not regions:
                raise NoSuchAttempt(launches)
        if self.query.since is not None:
            start = self._since(self.query.since)
            regions = _common(regions, [] if start is None else [Region(start, self.size)])
        if self.query.wanted.iterations is not None:
            regions = _common(regions, step_regions(self.reader, self.size, *self.query.wanted.iterations))
        return regions

    def _since(self, moment: float) -> int | None:
        """The earlier of what the stamps and the steps say."""
        found = [offset_since(self.reader, self.size, moment)]
        if self.query.steps_since:
            mark = step_marks(self.reader, self.size).back(self.query.steps_since)
            found.append(mark.offset if mark else None)
        return min((offset for offset in found if offset is not None), default=None)

    def _through(self, regions: Sequence[Region]) -> Iterator[str]:
        holds = may_hold(self.query.wanted)
        for region in regions:
            position = region.start
            for block in whole_blocks(self.reader, region.start, region.end):
                position += len(block)
                if holds is not None and self.line_filter.is_idle and not holds(block):
                    self.line_filter.pass_over(block)
                    continue
                *lines, last = block.split(b"\n")
                for line in lines:
                    yield from self.line_filter.feed(line.decode("utf-8", "replace"))
                if last and position >= self.size:
                    self.rest = last
                elif last:
                    yield from self.line_filter.feed(last.decode("utf-8", "replace"))


def _common(first: Sequence[Region], second: Sequence[Region]) -> list[Region]:
    pairs = ((max(a.start, b.start), min(a.end, b.end)) for a in first for b in second)
    return sorted((Region(start, end) for start, end in pairs if start < end), key=lambda region: region.start)
