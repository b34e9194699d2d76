"""Lines of steps read, of any trainer in the table: the one answer to what a line says of a step.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from tr11ops.dialects.table import (
    DialectWord,
    StepDialect,
    all_words,
    dialects,
    number_of,
    whole_number_of,
    words_of,
)
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

# the cursor goes up again: a bar inside another one, such as that of an evaluation
INNER_BAR = "\x1b[A"
LONGEST = 16 << 10  # characters; no trainer prints a longer line of a step
_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_OTHER_LOSS = re.compile(
    r"(?<=\| )(?!lm\b)(\w+) loss: *([-+]?(?:\d[.\d]*(?:[eE][-+]?\d+)?|nan|inf)) (?=\|)"
)
_COUNTS = frozenset(
    {
        "consumed_samples",
        "consumed_tokens",
        "global_batch_size",
        "curriculum_length",
        "skipped_iterations",
        "nan_iterations",
    }
)
PLACE = frozenset({"iteration", "total_iterations"})  # all that says where a step is
_END = 80  # characters in which a whole line shows its end
_TRIES = 8  # lines that hold a word of a step and are none
_RATES = ("tflops", "tokens_per_second", "samples_per_second", "iterations_per_second")


class StepNumbers(Record):
    """What a line says of a step. `values`: numbers by the names of the table; what it does not say
    is not there.

    `iteration` is None where the line has no number; `total` is the training's last step, not an
    epoch's. `is_whole`: whether the line has its end. `is_within`: the number is one within an epoch
    that the line does not name.
    """

    dialect: StepDialect
    iteration: int | None
    total: int | None
    values: Mapping[str, float]
    is_whole: bool = True
    may_be_zero: bool = False  # its loss is no mean over words
    is_within: bool = False

    @property
    def loss(self) -> float | None:
        return self.values.get("lm_loss")

    @property
    def grad_norm(self) -> float | None:
        return self.values.get("grad_norm")

    @property
    def lacks_loss(self) -> bool:
        """Whether it ought to tell a loss and does not, as some trainers do where it is no number."""
        return self.loss is None and self.dialect.omits_nan

    @property
    def hides_nan(self) -> bool:
        """Whether its loss of 0 stands for one that was no number, as Hugging Face's Trainer prints it: the
        norm beside it is none.
        """
        return self.loss == 0 and math.isnan(self.grad_norm or 0.0) and not self.may_be_zero

    def speed(self) -> tuple[str, float] | None:
        """How fast it was, more being faster, and by which number; None where the line does not
        say.
        """
        for name in _RATES:
            value = self.values.get(name, math.nan)
            if math.isfinite(value) and value > 0:
                return name, value
        seconds = self.values.get("seconds_per_iteration", math.nan)
        if not (math.isfinite(seconds) and seconds > 0):
            return None
        batch = self.values.get("global_batch_size", 0.0)
        if batch > 0:
            return ("samples_per_second", batch / seconds)
        return ("iterations_per_second", 1.0 / seconds)


def step_of(
    line: str, words: Sequence[DialectWord] | None = None, wanted: frozenset[str] | None = None
) -> StepNumbers | None:
    """What a line says of a step, or goes on to say of the one before; None for any other line.

    The line may have colours, and the prefixes of its launcher. Of what a carriage return
    overprinted see `StepReader`. `words`: those of the dialects that it may be of, if not all.
    `wanted`: the values that are read, if not all.
    """
    if INNER_BAR in line or len(line) > LONGEST:
        return None
    if "\x1b" in line:
        text = _COLOUR.sub("", line)
    else:
        text = line
    tried: StepDialect | None = None
    for word in all_words() if words is None else words:
        if word.text not in text or word.dialect is tried:
            continue
        dialect = word.dialect
        if word.goes_on:
            return StepNumbers(dialect, None, None, _values(dialect, text, wanted))
        head = dialect.step_pattern.search(text)
        if head is not None:
            never = dialect.never_pattern
            if never is not None and never.search(text):
                return None
            return _numbers(dialect, head, text, wanted)
        tried = dialect
    return None


def iteration_of(line: str) -> int | None:
    """The step that a line is of, the last one where carriage returns overprinted others; None
    where it names none.
    """
    for part in reversed(line.split("\r")) if "\r" in line else (line,):
        found = step_of(part, None, PLACE)
        if found is not None and found.iteration is not None:
            return found.iteration
    return None


def step_record(line: str) -> MeasuredStep | None:
    """A line of a step as a record; None for a line of no step, without its number, or that only
    may be of one.

    A missing loss is NaN where the trainer leaves the field out exactly then, else None. Counts that
    it does not tell are None, other numbers NaN or None.
    """
    found = step_of(line)
    if found is None or found.dialect.guess:
        return None
    return record_of(found, line)


def record_of(found: StepNumbers, line: str = "") -> MeasuredStep | None:
    """The record of what was read of a step; of `line` the losses beside that of the words. None
    without a number, or of a line that was cut, which says nothing sure.
    """
    if found.iteration is None or not found.is_whole:
        return None
    values = found.values
    if line.count(" loss: ") > 1:
        others = _OTHER_LOSS.findall(line)
    else:
        others = []
    loss = found.loss
    if found.lacks_loss or found.hides_nan:
        loss = math.nan
    return MeasuredStep(
        iteration=found.iteration,
        total_iterations=found.total or None,
        consumed_samples=_told_count(values, "consumed_samples"),
        consumed_tokens=_told_count(values, "consumed_tokens"),
        seconds_per_iteration=values.get("seconds_per_iteration", math.nan),
        learning_rate=values.get("learning_rate", math.nan),
        global_batch_size=_told_count(values, "global_batch_size"),
        lm_loss=loss,
        grad_norm=values.get("grad_norm"),
        samples_per_second=values.get("samples_per_second", math.nan),
        tflops=values.get("tflops", math.nan),
        loss_scale=values.get("loss_scale"),
        params_norm=values.get("params_norm"),
        num_zeros=values.get("num_zeros", 0.0),
        curriculum_length=_told_count(values, "curriculum_length"),
        skipped_iterations=_count(values, "skipped_iterations"),
        nan_iterations=_count(values, "nan_iterations"),
        other_losses=tuple((name, float(value)) for name, value in others),
    )


class StepReader:
    """Reads the lines of one log in their order. A line without the number of its step has that of
    the last one.

    Once a step was read for certain, no dialect is tried that comes later in the table, but for one
    whose lines have no numbers.
    """

    def __init__(self) -> None:
        self._last: StepNumbers | None = None
        self._among = dialects()
        self._words = all_words()
        self._bytes = _bytes_of(self._words)

    def takes(self, line: bytes) -> bool:
        """Whether a line may be one of a step: quick to ask."""
        for word in self._bytes:  # noqa: SIM110  # half the time of any(), in a log of millions of lines
            if word in line:
                return True
        return False

    def feed(self, line: str) -> Iterator[StepNumbers]:
        """What one line says of steps; also what it said before a carriage return overprinted it."""
        for part in line.split("\r") if "\r" in line else (line,):
            found = step_of(part, self._words)
            if found is None:
                continue
            if found.iteration is not None:
                self._last = found
                self._narrow(found.dialect)
            elif self._last is not None:
                found = replace(found, iteration=self._last.iteration, total=self._last.total)
            yield found

    def _narrow(self, dialect: StepDialect) -> None:
        if dialect.guess or dialect not in self._among:
            return
        later = self._among[self._among.index(dialect) + 1 :]
        among = self._among[: self._among.index(dialect) + 1] + tuple(
            one for one in later if not one.has_numbers
        )
        if among != self._among:
            self._among, self._words = among, words_of(among)
            self._bytes = _bytes_of(self._words)


def _bytes_of(words: Sequence[DialectWord]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(word.text.encode() for word in words))


def dialect_in(text: bytes) -> StepDialect | None:
    """The dialect of the numbered steps in a part of a log; None where it holds none."""
    for dialect in dialects():
        for word in dialect.words:
            at = text.find(word.encode())
            for _ in range(_TRIES):
                if at < 0:
                    break
                start = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
                end = text.find(b"\n", at)
                found = step_of(
                    text[start : end if end >= 0 else len(text)].decode("utf-8", "replace"),
                    words_of((dialect,)),
                )
                if found is not None and found.iteration is not None:
                    return dialect
                at = text.find(word.encode(), at + 1)
    return None


def trainer_in(text: bytes) -> str | None:
    """The dialect of the trainer that a part of a log names, be there a step in it or not; None
    where none is named.
    """
    for dialect in dialects():
        if any(word.encode() in text for word in dialect.told):
            return dialect.name
    return None


def total_in(text: bytes) -> int | None:
    """How many steps a part of a log says that the training has, before any step; None where it
    does not say.
    """
    for dialect in dialects():
        for word in dialect.steps:
            at = text.find(word.encode())
            match = None
            if at >= 0:
                match = _LEADING.match(text, at + len(word))
            if match is not None:
                return whole_number_of(match[0].decode())
    return None


_LEADING = re.compile(rb"\d{1,3}(?:,\d{3})+|\d{1,15}")


def _numbers(
    dialect: StepDialect, head: re.Match[str], text: str, wanted: frozenset[str] | None
) -> StepNumbers:
    named = {
        name: whole_number_of(value)
        for name, value in head.groupdict().items()
        if value is not None
    }
    last = max(head.end(), len(text) - _END)
    is_whole = dialect.end_pattern is None or dialect.end_pattern.search(text, last) is not None
    values = _values(dialect, text, wanted, is_whole)
    iteration, total = named.get("iteration", named.get("global")), named.get("total")
    if "within" in named:
        iteration = named["within"]
    if "iteration" in values:
        iteration = _count(values, "iteration")
        del values["iteration"]
    elif "epoch" in named and iteration is not None and total is not None:
        iteration += (named["epoch"] - dialect.first_epoch) * total
    if "epoch" in named:
        total = _last_step(named)
    if "total_iterations" in values:
        total = _count(values, "total_iterations") or None
        del values["total_iterations"]
    may_be_zero = any(word in text for word in dialect.zero)
    return StepNumbers(
        dialect,
        iteration,
        total=total,
        values=values,
        is_whole=is_whole,
        may_be_zero=may_be_zero,
        is_within="within" in named,
    )


def _last_step(named: Mapping[str, int]) -> int | None:
    """The training's last step where a line counts the steps of an epoch, and may say which epoch
    is the last one.
    """
    total = named.get("total")
    if "epochs" in named:
        if total is None or named["epochs"] < 0:
            return None
        return (named["epochs"] + 1) * total
    return None


def _values(
    dialect: StepDialect, text: str, wanted: frozenset[str] | None, is_whole: bool = True
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, patterns in dialect.field_patterns:
        if wanted is not None and name not in wanted:
            continue
        for pattern in patterns:
            match = pattern.search(text)
            if match is not None and (is_whole or match.end() < len(text.rstrip())):
                found[name] = number_of(match)
                break
    if "milliseconds_per_iteration" in found:
        found.setdefault("seconds_per_iteration", found.pop("milliseconds_per_iteration") / 1000.0)
    return found


def _told_count(values: Mapping[str, float], name: str) -> int | None:
    if name not in values:
        return None
    return _count(values, name)


def _count(values: Mapping[str, float], name: str) -> int:
    value = values.get(name, 0.0)
    if math.isfinite(value):
        return int(value)
    return 0
