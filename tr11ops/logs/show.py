"""What is shown of a log: its last lines, or those of a time, an attempt or a range of iterations;
and what is written from then on, across rotations, cuts and new attempts.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tr11ops.base.errors import NoSuchAttempt
from tr11ops.logs.line_filter import LineFeed, LineFilter, LineQuery
from tr11ops.logs.lines import INFO
from tr11ops.logs.reader import (
    BLOCK_BYTES,
    FileReader,
    LogReader,
    line_start,
    tail_offset,
    whole_blocks,
    whole_lines,
)
from tr11ops.logs.search import (
    Marks,
    Region,
    attempt_regions,
    offset_since,
    step_marks,
    step_regions,
)
from trainer.contract.metrics_record import parse_record
from trainer.contract.record import Record
from trainer.contract.state_file import descriptor_of

# Ranges as people type them, and how many steps `metrics.jsonl` has since a time.

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
    first = int(match[1] or 0)
    last = int(match[2] or LAST_ITERATION)
    if first > last:
        raise ValueError("is an empty range: the first iteration comes first")
    return first, last


def numbers(text: str) -> frozenset[int]:
    """`0`, `0,8`, `0-7,16` as a set. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if match:
            first = int(match[1])
            last = int(match[2] or match[1])
        else:
            first = 1
            last = 0
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


# Passing over whole blocks of a log that hold no wanted line: asked of a block before it is cut
# into lines.

# Every line that `lines.severity` finds worse than INFO holds one of these words, or is a step
# without a loss.
SEVERE_WORDS = (
    b"WARN",
    b"ERROR",
    b"CRITICAL",
    b"FATAL",
    b"Error",
    b"Exception",
    b"Interrupt",
    b"Warning: ",
    b"error:",
    b"failed",
    b"CUDA error",
    b"Segmentation",
    b"terminate called",
    b"Bus error",
    b"***ALERT",
    b"Unable to find latest",
    b"could not find the metadata",
    b"OVERFLOW!",
    b"Connection refused",
    b"No space left",
    b"quota exceeded",
    b"compute capability",
    b"is not equal to",
    b"is not divisible",
    b"uncorrectable ECC",
    b"Traceback",
    b"unhandled system error",
)
# Each begins with a plain word, which is sought first. What is no finite loss, in any dialect of
# `dialects/steps.toml`.
_NO_NUMBER = (
    rb"[^\s\d,|]{0,24}\s{0,8}['\"]?(?:np\.float\d+\(|tensor\()?[-+]?(?:[nN][aA][nN]|[iI][nN][fF])"
)
_WITHOUT_LOSS = (
    re.compile(rb"consumed samples(?![^\n]*\blm loss: *[-+]?\d)"),
    re.compile(rb"elapsed time per iteration(?![^\n]*\blm loss: *[-+]?\d)"),
    re.compile(rb"loss" + _NO_NUMBER),
    re.compile(rb"Loss" + _NO_NUMBER),
    re.compile(rb"LOSS" + _NO_NUMBER),
)
# What looks around itself, or does not go back, may fail in a block where it matches in a line of
# it.
_LOOKS_AROUND = re.compile(r"\\[AZBb]|\(\?(?:[!>=(]|<[!=])|[*+?}]\+")


def may_hold(wanted: LineQuery) -> Callable[[bytes], bool] | None:
    """Whether a block of whole lines may hold a wanted line; None where every block has to be
    looked at.
    """
    if wanted.iterations is not None or wanted.attempt is not None:
        return None
    is_severe = None
    if wanted.level is not None and wanted.level > INFO:
        is_severe = _may_be_severe
    if wanted.pattern is None:
        matches = None
    else:
        matches = _may_match(wanted.pattern)
    if is_severe is None or matches is None:
        return is_severe or matches
    severe = is_severe
    match = matches
    return lambda block: match(block) and severe(block)


def _may_be_severe(block: bytes) -> bool:
    return any(word in block for word in SEVERE_WORDS) or any(
        pattern.search(block) for pattern in _WITHOUT_LOSS
    )


def _may_match(pattern: re.Pattern[str]) -> Callable[[bytes], bool] | None:
    if _LOOKS_AROUND.search(pattern.pattern):
        return None
    several = re.compile(pattern.pattern, pattern.flags | re.MULTILINE)

    def match(block: bytes) -> bool:
        if b"\x1b" in block or b"\r" in block or b"\x00" in block:
            return True  # what is searched is the line without its escapes
        return several.search(block.decode("utf-8", "replace")) is not None

    return match


FIRST_WINDOW_BYTES = 1 << 20
# a file that is followed: not there now, or its server is just coming back
NOT_NOW = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN})


class Query(Record):
    """Where to begin. `lines` from the end (None: all that was asked for). `since` in seconds since
    the epoch.

    `steps_since`: how many steps were logged since then, where that is known from elsewhere: a
    step's line has no time.
    """

    wanted: LineQuery = LineQuery()
    lines: int | None = None
    since: float | None = None
    steps_since: int | None = None

    @property
    def has_place(self) -> bool:
        return (
            self.since is not None
            or self.wanted.attempt is not None
            or self.wanted.iterations is not None
        )


@dataclass
class Beginning:
    """The lines to show first; afterwards `rest` is the unfinished last line, and `line_filter`
    goes on with it.
    """

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
            if count is None:
                start = 0
            else:
                start = tail_offset(self.reader, self.size, count)
            yield from self._through([Region(start, self.size)])
            return
        else:
            chosen = self._tail(self.query.lines)
        yield from chosen if self.query.lines is None else deque(chosen, maxlen=self.query.lines)

    def _tail(self, count: int) -> Iterator[str]:
        """The last lines that the filter lets through: more and more is read until there are
        enough.
        """
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
            regions = _common(
                regions, step_regions(self.reader, self.size, *self.query.wanted.iterations)
            )
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
    return sorted(
        (Region(start, end) for start, end in pairs if start < end), key=lambda region: region.start
    )


# ---------------------------------------------------------------- following


class LogSource(Record):
    """One log to read. `label` goes before each line when several are read at once."""

    label: str
    path: Path


@dataclass
class Follower:
    """Gives the lines of one file that a query asks for, whatever happens to the file."""

    path: Path
    query: Query = field(default_factory=Query)
    _offset: int = field(default=0, init=False)
    _identity: tuple[int, int] | None = field(default=None, init=False)
    _feed: LineFeed = field(init=False)

    def __post_init__(self) -> None:
        self._feed = LineFeed(LineFilter(self.query.wanted))

    def begin(self) -> Iterator[str]:
        """What is there now. Nothing while there is no file. Raises NoSuchAttempt, and OSError as
        the file system.
        """
        try:
            descriptor = descriptor_of(self.path)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            self._identity = (status.st_dev, status.st_ino)
            self._offset = status.st_size
            beginning = Beginning(
                FileReader(descriptor), status.st_size, self.query, self._feed.line_filter
            )
            yield from beginning.lines()
            self._feed = LineFeed(beginning.line_filter, beginning.rest)
        finally:
            os.close(descriptor)

    def more(self) -> Iterator[str]:
        """Lines that came since. A file that was replaced or cut is read from its beginning."""
        try:
            descriptor = descriptor_of(self.path)
        except OSError as error:
            if error.errno in NOT_NOW:
                return
            raise
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                yield from self.unfinished()
                self._identity = identity
                self._offset = 0
                self._feed = LineFeed(LineFilter(self.query.wanted))
            while block := os.pread(descriptor, BLOCK_BYTES, self._offset):
                self._offset += len(block)
                yield from self._feed.take(block)
        finally:
            os.close(descriptor)

    def unfinished(self) -> Iterator[str]:
        """A last line that has no end yet; it is given once."""
        return self._feed.unfinished()


def follow(
    sources: Callable[[], Sequence[LogSource]], query: Query, pause: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """(label, line) of all sources: what the query says of each that is there now, then what comes.

    `sources` is asked again in each round: what is new is read from its beginning. Ends when
    `pause` returns False. Lines are decoded as UTF-8, with a sign in the place of what is not.
    Raises NoSuchAttempt.
    """
    followers = {source: Follower(source.path, query) for source in sources()}
    for source, follower in followers.items():
        for line in follower.begin():
            yield source.label, line
    while pause():
        for source in sources():
            follower = followers.setdefault(source, Follower(source.path, query))
            for line in follower.more():
                yield source.label, line
    for source, follower in followers.items():
        for line in follower.unfinished():
            yield source.label, line
