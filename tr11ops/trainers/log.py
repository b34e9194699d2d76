"""What a log says in a dialect: its steps, marks and ends.

A log has millions of lines of steps, and only the first and the last are wanted; so it is read in
blocks, and of each block the lines are looked at from its end until a step was found, and in between
only those that a mark or an end fits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tr11ops.dialects.dialect import Dialect, Ending, Mark, dialect_named, names
from tr11ops.dialects.reading import StepNumbers, dialect_in, step_of, total_in, trainer_in
from trainer.contract.record import Record

_BREAK = re.compile(rb"[\r\n]+")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_LONGEST = 64 << 10  # bytes of a line that are looked at
_TRIES = (
    400  # lines from the end of a block in which its last step and its last loss are looked for
)
_DIGITS = re.compile(r"\d{1,15}")


class StepLine(Record):
    """A line of a step. `iteration`: steps done with it, as the trainer's checkpoints count; None
    where the line only tells of numbers. `words`: the dialect of steps that it is in.
    """

    words: str
    iteration: int | None
    total: int | None
    loss: float | None


class LogReading(Record):
    """What one log says. `first`, `last`: the steps done with the first and the last line of one;
    `total`: the training's last step; `loss`: the newest.

    `resumed_at`: the steps done when it began, by its own word; None where it does not say.
    `marks`: how often each was seen. `ending`: what its last line of an end means, `ending_line`
    that line. `words`: the step dialects that its steps were in.
    """

    lines: int = 0
    first: int | None = None
    last: int | None = None
    total: int | None = None
    loss: float | None = None
    resumed_at: int | None = None
    marks: Mapping[Mark, int] = {}
    ending: Ending | None = None
    ending_line: str = ""
    words: tuple[str, ...] = ()


def dialect_of_log(head: bytes) -> Dialect | None:
    """The shipped dialect that the begin of a log is in; None where it does not tell."""
    found = {trainer_in(head)}
    step = dialect_in(head)
    if step is not None:
        found.add(step.name)
    for name in names():
        if found & {name, dialect_named(name).steps}:
            return dialect_named(name)
    return None


def lines_of(blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of a file that is read in blocks, a list for each: a carriage return ends one too,
    as a bar that is drawn again has no other end. The last one needs no end.
    """
    rest = b""
    for block in blocks:
        *whole, rest = _BREAK.split(rest + block)
        yield whole
        rest = rest[-_LONGEST:]
    if rest:
        yield [rest]


class TrainerLogReader:
    """Reads a log block by block. `dialect`: that of its trainer."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._step = _steps_of(dialect)
        self._first: int | None = None
        self._last: int | None = None
        self._loss: float | None = None
        self._total: int | None = None
        self._lines = 0
        self._resumed_at: int | None = None
        self._marks: Counter[Mark] = Counter()
        self._end: tuple[Ending | None, str] = (None, "")
        self._words: dict[str, None] = {}
        patterns = [
            pattern.pattern for _, pattern in (*dialect.mark_patterns, *dialect.end_patterns)
        ]
        self._any = re.compile("|".join(f"(?:{_unnamed(text)})" for text in patterns) or r"(?!)")

    def read(self, blocks: Iterable[Sequence[bytes]]) -> LogReading:
        """All lines, and what they say."""
        for lines in blocks:
            self._lines += len(lines)
            looked_at = [line[:_LONGEST] for line in lines]
            self._read_steps(looked_at)
            self._read_marks(looked_at)
        ending, ending_line = self._end
        return LogReading(
            lines=self._lines,
            first=self._first,
            last=self._last,
            total=self._total,
            loss=self._loss,
            resumed_at=self._resumed_at,
            marks=dict(self._marks),
            ending=ending,
            ending_line=ending_line,
            words=tuple(self._words),
        )

    def _read_steps(self, lines: Sequence[bytes]) -> None:
        if self._first is None:
            for line in lines:
                found = self._step(line)
                if found is not None and found.iteration is not None:
                    self._first = found.iteration
                    break
                self._total = self._total or total_in(line)
        last, loss = None, None
        for line in lines[: -_TRIES - 1 : -1]:
            found = self._step(line)
            if found is None:
                continue
            self._words[found.words] = None
            if last is None and found.iteration is not None:
                last = found.iteration
                self._total = found.total or self._total
            if loss is None:
                loss = found.loss
            if last is not None and loss is not None:
                break
        if last is not None:
            self._last = last
        if loss is not None:
            self._loss = loss

    def _read_marks(self, lines: Sequence[bytes]) -> None:
        text = _COLOUR.sub("", b"\n".join(lines).decode("utf-8", "replace"))
        if self._any.search(text) is None:
            return
        for line in text.split("\n"):
            if self._any.search(line) is not None:
                self._mark(line)

    def _mark(self, line: str) -> None:
        for mark, pattern in self._dialect.mark_patterns:
            match = pattern.search(line)
            if match is None:
                continue
            self._marks[mark] += 1
            if mark == "resumed":
                said = match.groupdict()
                done, following = number_of(said.get("done")), number_of(said.get("next"))
                if done is not None:
                    self._resumed_at = done
                if following is not None:
                    self._resumed_at = following - 1
        for means, pattern in self._dialect.end_patterns:
            if pattern.search(line):
                self._end = (means, line.strip()[:200])


_ReadStep = Callable[[bytes], StepLine | None]


def _steps_of(dialect: Dialect) -> _ReadStep:
    """What reads a line of a step: the dialect's own pattern, else the table of all trainers."""
    own = dialect.step_pattern

    def by_pattern(line: bytes) -> StepLine | None:
        match = own.search(_COLOUR.sub("", line.decode("utf-8", "replace")))
        if match is None:
            return None
        said = match.groupdict()
        done = number_of(said.get("step"))
        if done is None:
            return None
        total, loss = number_of(said.get("total")), said.get("loss")
        try:
            value = None if loss is None else float(loss)
        except ValueError:
            value = None
        return StepLine(dialect.name, done + dialect.offset, total, value)

    def by_table(line: bytes) -> StepLine | None:
        found: StepNumbers | None = step_of(line.decode("utf-8", "replace"))
        if found is None:
            return None
        done = None
        if found.iteration is not None:
            done = found.iteration + dialect.offset
        return StepLine(found.dialect.name, done, found.total, found.loss)

    if dialect.step_line:
        return by_pattern
    return by_table


def number_of(text: str | None) -> int | None:
    """A whole number that a line tells; None for anything else."""
    if text is None or not _DIGITS.fullmatch(text):
        return None
    return int(text)


def _unnamed(pattern: str) -> str:
    """A pattern whose groups have no names, so that several stand in one."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)
