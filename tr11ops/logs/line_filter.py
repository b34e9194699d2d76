"""Which lines of a log are shown: by severity, by what they say, by iteration; with the lines
around them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tr11ops.dialects.reading import iteration_of
from tr11ops.logs.lines import (
    ATTEMPT,
    ERROR,
    PREFIX,
    PULSE,
    START,
    TRACEBACK,
    body,
    plain,
    severity,
)
from tr11ops.logs.reader import LONGEST_LINE_BYTES
from trainer.contract.record import Record

SEPARATOR = "--"
_CHAINED = ("The above exception", "During handling of the above exception")


class LineQuery(Record):
    """What a person asked for.

    `level` is a number of `lines.LEVELS`; `iterations` are first and last, both included; `attempt`
    is a job id.
    """

    level: int | None = None
    pattern: re.Pattern[str] | None = None
    context: int = 0
    pulse: bool = True
    iterations: tuple[int, int] | None = None
    attempt: str | None = None

    @property
    def is_everything(self) -> bool:
        return self == LineQuery(context=self.context)

    @property
    def searches(self) -> bool:
        """Whether few lines of many may be meant, so that the end of the log alone says little."""
        return self.level is not None or self.pattern is not None


@dataclass
class LineFeed:
    """Cuts what comes of a log into lines, and gives those that a sieve lets through; an unfinished
    last one waits.
    """

    line_filter: LineFilter
    rest: bytes = b""

    def take(self, data: bytes) -> Iterator[str]:
        """The wanted lines of the next bytes. A line that is too long comes in pieces."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            yield from self.line_filter.feed(line.decode("utf-8", "replace"))
        if len(self.rest) > LONGEST_LINE_BYTES:
            yield from self.unfinished()

    def unfinished(self) -> Iterator[str]:
        """A last line that has no end yet; it is given once."""
        rest, self.rest = self.rest, b""
        if rest:
            yield from self.line_filter.feed(rest.decode("utf-8", "replace"))


class LineFilter:
    """Lets the wanted lines of one log through, in order. Each log has a filter of its own."""

    def __init__(self, wanted: LineQuery) -> None:
        self._wanted = wanted
        self._iteration: int | None = None
        self._attempt: str | None = None
        self._tracebacks: set[str] = set()  # prefixes of the processes that are printing one
        self._before: deque[str] = deque(maxlen=max(0, wanted.context))
        self._after = 0
        self._passed_over = False
        self._shown = False

    @property
    def is_idle(self) -> bool:
        """Whether what comes next is judged for itself alone: no traceback goes on, no lines of
        context are due.
        """
        return not self._tracebacks and self._after == 0

    def pass_over(self, block: bytes) -> None:
        """Take note of whole lines that are known to hold none that is wanted; the last ones may be
        its context.
        """
        context = self._wanted.context
        if context:
            lines = block.split(b"\n")[:-1]
            self._passed_over = self._passed_over or len(lines) > context
            for line in lines[-context:]:
                text = line.decode("utf-8", "replace")
                if self._is_in_place(text, plain(text)):
                    self._put_aside(text)

    def feed(self, line: str) -> Iterator[str]:
        """The lines that this one lets through: none, itself, or itself after those that came
        before it.
        """
        if self._wanted.is_everything:
            yield line
            return
        text = plain(line)
        if not self._is_in_place(line, text):
            return
        is_severe = self._is_severe(text)  # asked in any case: it follows the tracebacks
        pattern = self._wanted.pattern
        if is_severe and (pattern is None or pattern.search(text)):
            if self._wanted.context and self._shown and self._passed_over:
                yield SEPARATOR
            yield from self._before
            self._before.clear()
            self._after = self._wanted.context
            self._passed_over = False
            self._shown = True
            yield line
        elif self._after > 0:
            self._after -= 1
            yield line
        else:
            self._put_aside(line)

    def _put_aside(self, line: str) -> None:
        """Remember a line as the context of one that may come."""
        self._passed_over = self._passed_over or len(self._before) == self._before.maxlen
        self._before.append(line)

    def _is_in_place(self, line: str, text: str) -> bool:
        """Whether a line is of a wanted attempt and iteration (one without is of the last step
        before it).

        `text` is what a terminal shows of it.
        """
        if match := ATTEMPT.match(text):
            self._attempt = match[1]
        if self._wanted.attempt is not None and self._attempt != self._wanted.attempt:
            return False
        if not self._wanted.pulse and PULSE.match(text):
            return False
        wanted = self._wanted.iterations
        if wanted is None:
            return True
        iteration = iteration_of(line)
        if iteration is not None:
            self._iteration = iteration
        elif START.match(text):
            # a restart: what it prints before its first step is of no iteration
            self._iteration = None
        return self._iteration is not None and wanted[0] <= self._iteration <= wanted[1]

    def _is_severe(self, text: str) -> bool:
        level = self._wanted.level
        if level is None:
            return True
        prefix = PREFIX.match(text)
        process = prefix[0] if prefix else ""
        said = body(text)
        if TRACEBACK in said or said.startswith(_CHAINED):
            self._tracebacks.add(process)
            return level <= ERROR
        if process in self._tracebacks:
            if said[:1].isspace() or not said:
                return level <= ERROR
            self._tracebacks.discard(process)  # this is its last line, that names the exception
            return level <= max(ERROR, severity(text))
        return severity(text) >= level
