"""Ranges of iterations whose data is passed over. Pure, free of torch.

A skipped iteration is numbered and takes its whole global batch: iteration, consumed samples and
consumed tokens move as if it had been trained, and so do batch ramp, curriculum and learning rate,
which follow them. Only the step itself is missing: no forward pass, no update, no log line, no
save, no evaluation. What is skipped is therefore a function of the iteration's number alone, and a
restart anywhere, inside a range too, goes on exactly where it would have been. (Megatron-DeepSpeed
passed over one micro-batch per iteration, moved no counter, and forgot the offset at a restart.)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from trainer.config.card import TrainerConfig
from trainer.contract.errors import RangeError
from trainer.contract.record import IterationRange, Record
from trainer.schedule.path import Position, path_of


def parse_ranges(texts: Iterable[str]) -> tuple[IterationRange, ...]:
    """Read ranges such as `13251-14000`; ascending, those that overlap or touch merged. Raises
    RangeError.
    """
    return merge_ranges(parse_range(text) for text in texts)


def parse_range(text: str) -> IterationRange:
    """Read one `FIRST-LAST`. Raises RangeError."""
    match = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    if match is None:
        raise RangeError(f"{text!r} is not a range of iterations: write FIRST-LAST")
    found = IterationRange(int(match.group(1)), int(match.group(2)))
    if found.first < 1:
        raise RangeError(f"{text!r} starts before iteration 1")
    if found.last < found.first:
        raise RangeError(f"{text!r} ends before it starts")
    return found


def merge_ranges(ranges: Iterable[IterationRange]) -> tuple[IterationRange, ...]:
    """The same iterations in ascending ranges with a gap between any two."""
    merged: list[IterationRange] = []
    for item in sorted(ranges):
        if merged and item.first <= merged[-1].last + 1:
            merged[-1] = IterationRange(merged[-1].first, max(merged[-1].last, item.last))
        else:
            merged.append(item)
    return tuple(merged)


def next_training_iteration(iteration: int, ranges: Sequence[IterationRange]) -> int:
    """The first iteration from `iteration` on that is not skipped. `ranges` as `merge_ranges` gives
    them.
    """
    index = bisect_left(ranges, iteration, key=lambda item: item.last)
    if index < len(ranges) and iteration in ranges[index]:
        return ranges[index].last + 1
    return iteration


class Skipped(Record):
    """One passage over skipped iterations: `first` to `last`, and where the training stands behind
    them.
    """

    first: int
    last: int
    before: Position
    position: Position

    @property
    def samples(self) -> int:
        return self.position.consumed_samples - self.before.consumed_samples

    @property
    def tokens(self) -> int:
        return self.position.consumed_tokens - self.before.consumed_tokens

    @property
    def lines(self) -> tuple[str, str]:
        """For the log: the original's own line, which tools look for, and what was passed over."""
        return (
            f"Skipped iterations {self.first} to {self.last} due to --skip-train-iteration-range flag.",
            f" > passed over {self.samples} samples, {self.tokens} tokens without a step",
        )


class SkipPlan(Record):
    """All ranges that a training skips: those of its card, and those that recoveries added."""

    ranges: tuple[IterationRange, ...]

    @classmethod
    def of(cls, config: TrainerConfig, added: Iterable[IterationRange] = ()) -> SkipPlan:
        """The card's `data.skip_ranges` and `added`. Raises RangeError."""
        return cls(merge_ranges([*parse_ranges(config.data.skip_ranges), *added]))

    def advance(self, position: Position, config: TrainerConfig) -> Skipped | None:
        """What is skipped before the next step when the training stands at `position`; None when
        nothing is.

        Ask before every step. Afterwards the data continues at `position.consumed_samples` of the
        answer. A range that reaches beyond the training's end is cut there: then no step follows.
        """
        first = position.iteration + 1
        target = next_training_iteration(first, self.ranges) - 1
        if target < first:
            return None
        behind = path_of(config, position).after_iteration(target)
        if behind.iteration >= first:
            return Skipped(first, behind.iteration, position, behind)
        return None
