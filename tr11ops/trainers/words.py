"""What a foreign trainer says while it runs, line by line: steps, marks and ends. Pure.

A line may be a bar that is drawn again and again, so a carriage return ends one too; and one step may
be told in several lines, of which the first has its number and another its loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from tr11ops.dialects.dialect import Dialect, Ending, Mark
from tr11ops.dialects.reading import StepNumbers, StepReader, total_in
from tr11ops.trainers.log import number_of
from tr11ops.trainers.never_began import kind_of
from trainer.contract.record import JsonObject, Record

_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_PREFIX = re.compile(rb"^\[default(\d+)\]:")
_LONGEST = 16 << 10  # bytes of a line that are looked at
LEAST_SECONDS = 1.0  # a step's numbers are complete when no more came for so long
LOSS_SECONDS = 5.0  # and where none of them is a loss, which another line may tell


class StepSeen(Record):
    """A line of a step. `iteration`: steps done with it, as checkpoints count them. `values`: its
    numbers by the names of `metrics.jsonl`. `is_certain`: no bar of something else can look so.
    `is_numbered`: the line has the step's number, which else is that of the last one that had.
    """

    iteration: int
    total: int | None
    values: Mapping[str, float | None]
    is_certain: bool = True
    is_numbered: bool = True


class MarkSeen(Record):
    """A line that tells of a phase. `done`: the steps done, where it says so."""

    mark: Mark
    done: int | None = None


class EndSeen(Record):
    """A line that tells of an end."""

    means: Ending
    line: str


class TotalSeen(Record):
    """A line that says how many steps the training has."""

    total: int


Heard = StepSeen | MarkSeen | EndSeen | TotalSeen


class Piece(Record):
    """One line of a worker: which one's (None: its launcher's), its bytes without the prefix, and when
    it came, seconds since the epoch.
    """

    local_rank: int | None
    text: bytes
    time: float


def piece_of(line: bytes, now: float) -> Piece:
    """The worker and the words of a line, by the prefix that torchrun sets."""
    match = _PREFIX.match(line)
    if match is None:
        return Piece(None, line, now)
    return Piece(int(match[1]), line[match.end() :], now)


class TrainerWords:
    """Reads the lines of one launch in the dialect of its trainer. `resumed_at`: the step of the checkpoint
    that it was given to go on from. `not_taken`: the line in which it, or its launcher, says that it never
    began; "" where none did.
    """

    def __init__(self, dialect: Dialect, resumed_at: int = 0) -> None:
        self.resumed_at = resumed_at
        self._dialect = dialect
        self._epoch_began: int | None = None  # the steps before an epoch that no line names
        self._reader = StepReader()
        self._own = dialect.step_pattern if dialect.step_line else None
        self._total_is_known = False
        self.not_taken = ""

    def hear(self, line: bytes) -> Iterator[Heard]:
        """What one line says, without the prefix of its worker."""
        line = line[:_LONGEST]
        text = _COLOUR.sub("", line.decode("utf-8", "replace")).strip("\r\n")
        if not self.not_taken and kind_of(text) is not None:
            self.not_taken = text.strip()[:500]
        for mark, pattern in self._dialect.mark_patterns:
            match = pattern.search(text)
            if match is not None:
                yield MarkSeen(mark, _done(mark, match))
        for means, pattern in self._dialect.end_patterns:
            if pattern.search(text):
                yield EndSeen(means, text.strip()[:200])
        if self._own is not None:
            yield from self._by_pattern(self._own, text)
        elif self._reader.takes(line):
            yield from self._by_table(line.decode("utf-8", "replace"))
        elif not self._total_is_known:
            total = total_in(line)
            if total is not None:
                self._total_is_known = True
                yield TotalSeen(total)

    def _by_pattern(self, pattern: re.Pattern[str], text: str) -> Iterator[StepSeen]:
        match = pattern.search(text)
        if match is None:
            return
        said = match.groupdict()
        done, total, loss = (
            number_of(said.get("step")),
            number_of(said.get("total")),
            said.get("loss"),
        )
        if done is None:
            return
        values: dict[str, float | None] = {}
        if loss is not None:
            values["lm_loss"] = _finite(loss)
        yield StepSeen(done + self._dialect.offset, total, values)

    def _by_table(self, line: str) -> Iterator[StepSeen]:
        for found in self._reader.feed(line):
            if found.iteration is not None:
                yield StepSeen(
                    iteration=self._iteration_of(found.iteration, found.is_within),
                    total=found.total,
                    values=_values(found),
                    is_certain=not found.dialect.guess,
                    is_numbered=found.dialect.has_numbers,
                )

    def _iteration_of(self, said: int, is_within: bool) -> int:
        """The steps done by a line's number. Where it counts within an epoch that it does not name, it may be
        the first epoch, if that is beyond the checkpoint; else the first line is taken for the step after that.
        """
        if not is_within:
            return said + self._dialect.offset
        if self._epoch_began is None:
            self._epoch_began = 0
            if said <= self.resumed_at:
                self._epoch_began = self.resumed_at + 1 - said
        return self._epoch_began + said


class StepRecords:
    """Makes records of `metrics.jsonl` of the lines of steps: one for each, when all of it was told.

    A line without a number may come before the one that has its step's, as from another stream: where
    the step has such a line already, or is written, it is of the next one. A bar is drawn first with the
    loss of the step before: the last line of a step counts.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None
        self._values: JsonObject = {}
        self._since = 0.0
        self._is_written = False
        self._told_apart: frozenset[str] = frozenset()  # by lines without a number
        self._of_next: Mapping[str, float | None] = {}
        self._before: tuple[int, float] | None = None

    def add(self, step: StepSeen, now: float) -> JsonObject | None:
        """Take a line into account; the record of the step before it, where that is due."""
        due = None
        if step.iteration != self._iteration:
            due = self._take()
            self._begin(step, now)
        if not step.is_numbered:
            if self._is_written or not self._told_apart.isdisjoint(step.values):
                self._of_next = step.values
                return due
            self._told_apart = frozenset(step.values)
        if not step.values.keys() <= self._values.keys():
            self._since = now
        self._values |= step.values
        return due

    def due(self, now: float) -> JsonObject | None:
        """The record of the last step, where nothing more was told of it for a while."""
        seconds = LOSS_SECONDS
        if "lm_loss" in self._values:
            seconds = LEAST_SECONDS
        if now - self._since < seconds:
            return None
        return self._take()

    def last(self) -> JsonObject | None:
        """The record of the last step, where it is not written: nothing more will be told."""
        return self._take()

    def _begin(self, step: StepSeen, now: float) -> None:
        self._values = {"iteration": step.iteration, "time": now}
        if step.total is not None:
            self._values["total_iterations"] = step.total
        if self._before is not None and "seconds_per_iteration" not in step.values:
            iteration, moment = self._before
            steps = step.iteration - iteration
            if steps > 0 and now > moment:
                self._values["seconds_per_iteration"] = (now - moment) / steps
        self._before = step.iteration, now
        self._iteration, self._since = step.iteration, now
        self._is_written = False
        self._told_apart = frozenset(self._of_next)
        self._values |= self._of_next
        self._of_next = {}

    def _take(self) -> JsonObject | None:
        if self._iteration is None or self._is_written:
            return None
        self._is_written = True
        return {"kind": "step", **self._values}


def _values(found: StepNumbers) -> dict[str, float | None]:
    """The numbers of a line; what is no number is None, as the trainer writes it. A rate that a bar has
    averaged over what it skipped at a resume is left out.
    """
    values: dict[str, float | None] = {}
    for name, value in found.values.items():
        values[name] = value if math.isfinite(value) else None
    if found.lacks_loss and found.iteration is not None:
        values.setdefault("lm_loss", None)
    if found.hides_nan:
        values["lm_loss"] = None
    rate = values.pop("iterations_per_second", None)
    if found.dialect.averages:
        values.pop("seconds_per_iteration", None)  # the time between two steps tells it
    elif rate:
        values.setdefault("seconds_per_iteration", 1.0 / rate)
    return values


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if math.isfinite(value):
        return value
    return None


def _done(mark: Mark, match: re.Match[str]) -> int | None:
    """How many steps are done, by the words of a line."""
    said = match.groupdict()
    following = number_of(said.get("next"))
    if mark == "resumed" and following is not None:
        return following - 1
    return number_of(said.get("done"))
