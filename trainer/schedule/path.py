"""The way of a training through its steps: batch and sequence length of each, samples and tokens
after it.

Pure and free of torch: the trainer steps by it, the operations side plans by it. Formulas:
Megatron's.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from trainer.config.card import BatchSection, CurriculumSection, TrainerConfig
from trainer.contract.errors import RangeError
from trainer.contract.record import IterationRange, Record


def sequence_length_at(
    iteration: int, curriculum: CurriculumSection | None, full_length: int
) -> int:
    """Tokens of each sample in step `iteration`, which counts from 1 as the log does.

    Never less than in an earlier step; `full_length` from the curriculum's end on, or always
    without a curriculum.
    """
    if curriculum is None:
        return full_length
    if curriculum.kind == "discrete":
        return curriculum.lengths[bisect_left(curriculum.until_steps, iteration)]
    start, total = curriculum.start_length, curriculum.total_steps
    if start is None or total is None:
        raise ValueError(f"a {curriculum.kind} curriculum needs start_length and total_steps")
    if iteration >= total:
        return full_length
    share = iteration / total
    if curriculum.kind == "root":
        share = share ** (1.0 / curriculum.root_degree)
    length = math.floor(share * (full_length - start) + start)
    return min(length - length % curriculum.step, full_length)


def last_step_of_length(
    iteration: int, curriculum: CurriculumSection | None, full_length: int
) -> int | None:
    """The last step with the length of step `iteration`; None when the length never changes again."""
    if curriculum is None:
        return None
    if curriculum.kind == "discrete":
        level = bisect_left(curriculum.until_steps, iteration)
        if level < len(curriculum.until_steps):
            return curriculum.until_steps[level]
        return None
    length = sequence_length_at(iteration, curriculum, full_length)
    if length == full_length:
        return None
    later = range(iteration, (curriculum.total_steps or iteration) + 1)
    count = bisect_right(
        later, length, key=lambda step: sequence_length_at(step, curriculum, full_length)
    )
    return later[count - 1]


def count_lengths(curriculum: CurriculumSection, full_length: int) -> int:
    """At most so many different lengths occur."""
    if curriculum.kind == "discrete":
        return len(curriculum.lengths)
    return max(0, full_length - (curriculum.start_length or full_length)) // curriculum.step + 1


class Position(Record):
    """Where a training stands: steps completed, and what they took. A skipped iteration counts in
    all three.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


START = Position()


class Segment(Record):
    """Consecutive steps of one global batch and one sequence length: `iterations` of them, from
    `start` on.
    """

    start: Position
    iterations: int
    batch_size: int
    sequence_length: int

    def after(self, iterations: int) -> Position:
        """The position after so many of the segment's steps; its end when it has no more."""
        iterations = min(iterations, self.iterations)
        samples = iterations * self.batch_size
        return Position(
            self.start.iteration + iterations,
            self.start.consumed_samples + samples,
            self.start.consumed_tokens + samples * self.sequence_length,
        )

    @property
    def end(self) -> Position:
        return self.after(self.iterations)


class BatchLevel(Record):
    """Consecutive steps of one global batch: `iterations` of them, the first of which starts at
    `consumed_samples`.

    `first_iteration` counts from 1, as the log does.
    """

    batch_size: int
    first_iteration: int
    iterations: int
    consumed_samples: int


class TrainingPath(Record):
    """Every step from `start` to the end of the training, in segments of equal steps.

    Skipped ranges do not show: a skipped iteration takes what a trained one takes.
    """

    start: Position
    segments: tuple[Segment, ...]

    @property
    def end(self) -> Position:
        """Where the training is finished; it drops the batch that `train_samples` cannot fill."""
        if self.segments:
            return self.segments[-1].end
        return self.start

    @property
    def total_iterations(self) -> int:
        """Steps of the whole training, those before `start` included."""
        return self.end.iteration

    def after_iteration(self, iteration: int) -> Position:
        """The position after step `iteration`; the path's own ends for steps outside it."""
        segment = self._segment(iteration, lambda position: position.iteration)
        if segment:
            return segment.after(iteration - segment.start.iteration)
        return self.start

    def after_samples(self, samples: float) -> Position:
        """The last position between two steps at which at most `samples` samples were consumed."""
        segment = self._segment(samples, lambda position: position.consumed_samples)
        if segment is None:
            return self.start
        return segment.after(int((samples - segment.start.consumed_samples) // segment.batch_size))

    def after_tokens(self, tokens: int) -> Position:
        """The last position between two steps at which at most `tokens` tokens were consumed."""
        segment = self._segment(tokens, lambda position: position.consumed_tokens)
        if segment is None:
            return self.start
        return segment.after(
            (tokens - segment.start.consumed_tokens)
            // (segment.batch_size * segment.sequence_length)
        )

    def _segment(self, value: float, counter: Callable[[Position], int]) -> Segment | None:
        """The last segment that starts with at most `value` on the counter; None before the first
        one.
        """
        index = bisect_right(self.segments, value, key=lambda segment: counter(segment.start))
        if index:
            return self.segments[index - 1]
        return None

    def tokens_at(self, samples: float) -> float:
        """Tokens consumed with exactly the first `samples` samples, which may end inside a step.

        Beyond the path's end every sample counts with the last step's length.
        """
        segment = self._segment(samples, lambda position: position.consumed_samples)
        if segment is None:
            return float(self.start.consumed_tokens)
        return (
            segment.start.consumed_tokens
            + (samples - segment.start.consumed_samples) * segment.sequence_length
        )

    @property
    def batch_levels(self) -> tuple[BatchLevel, ...]:
        """The path as levels of equal batch, whatever the sequence length."""
        levels: list[BatchLevel] = []
        for segment in self.segments:
            if levels and levels[-1].batch_size == segment.batch_size:
                last = levels.pop()
                iterations, first, samples = (
                    last.iterations,
                    last.first_iteration,
                    last.consumed_samples,
                )
            else:
                iterations, first, samples = (
                    0,
                    segment.start.iteration + 1,
                    segment.start.consumed_samples,
                )
            levels.append(
                BatchLevel(segment.batch_size, first, iterations + segment.iterations, samples)
            )
        return tuple(levels)


def path_of(config: TrainerConfig, start: Position = START) -> TrainingPath:
    """All steps of the card's training from `start` on.

    The training ends where no whole batch is left of `batch.train_samples`, or with the first step
    that reaches `batch.train_tokens`. From a checkpoint's position this gives what is left under
    the card of today, also where batch, ramp or curriculum were changed since; under an unchanged
    card it is the rest of the path from zero.
    """
    return TrainingPath(start, tuple(_segments(config, start)))


def _segments(config: TrainerConfig, position: Position) -> Iterator[Segment]:
    batch, curriculum, full_length = config.batch, config.curriculum, config.model.sequence_length
    while True:
        size = batch_size_at(position.consumed_samples, batch)
        length = sequence_length_at(position.iteration + 1, curriculum, full_length)
        counts = [
            (batch.train_samples - position.consumed_samples) // size,
            _steps_until_change(position.consumed_samples, size, batch),
        ]
        last = last_step_of_length(position.iteration + 1, curriculum, full_length)
        if last is not None:
            counts.append(last - position.iteration)
        if batch.train_tokens is not None:
            counts.append(-(-(batch.train_tokens - position.consumed_tokens) // (size * length)))
        if min(counts) <= 0:
            return
        segment = Segment(position, min(counts), size, length)
        yield segment
        position = segment.end


def batch_size_at(consumed_samples: int, batch: BatchSection) -> int:
    """Samples of the step that starts when `consumed_samples` samples have been consumed."""
    ramp = batch.ramp
    if ramp is None or ramp.samples == 0 or consumed_samples > ramp.samples:
        return batch.global_batch_size
    level = int(consumed_samples / _samples_per_level(batch))
    return min(batch.global_batch_size, ramp.start + ramp.increment * level)


def _samples_per_level(batch: BatchSection) -> float:
    assert batch.ramp is not None
    return batch.ramp.samples / (
        (batch.global_batch_size - batch.ramp.start) // batch.ramp.increment
    )


def _steps_until_change(consumed: int, size: int, batch: BatchSection) -> int:
    """Steps of `size` that start before the batch changes; more than any training has when it never
    does.
    """
    ramp = batch.ramp
    if ramp is None or size == batch.global_batch_size:
        return batch.train_samples
    level = (size - ramp.start) // ramp.increment
    change = min(math.ceil((level + 1) * _samples_per_level(batch)), ramp.samples + 1)
    # The product above and the division in batch_size_at round apart: step to the first sample of
    # the next level.
    while change > consumed + 1 and batch_size_at(change - 1, batch) > size:
        change -= 1
    while batch_size_at(change, batch) == size:
        change += 1
    return -(-(change - consumed) // size)


# Ranges of iterations whose data is passed over.
#
# A skipped iteration is numbered and takes its whole global batch: iteration, consumed samples and
# consumed tokens move as if it had been trained, and so do batch ramp, curriculum and learning rate,
# which follow them. Only the step itself is missing: no forward pass, no update, no log line, no
# save, no evaluation. What is skipped is therefore a function of the iteration's number alone, and a
# restart anywhere, inside a range too, goes on exactly where it would have been. (Megatron-DeepSpeed
# passed over one micro-batch per iteration, moved no counter, and forgot the offset at a restart.)


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


class Progress(Record):
    """`skipped` (updates that were dropped) and `nan` count over the whole training.

    `unscheduled_samples` and `unscheduled_tokens` are those of dropped updates: consumed, but the
    learning-rate schedule did not move for them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    nan: int = 0
    unscheduled_samples: int = 0
    unscheduled_tokens: int = 0

    @classmethod
    def from_cursor(cls, cursor: Mapping[str, Any]) -> Progress:
        """The counters of a checkpoint; one that it does not know is zero."""
        return cls(**{name: int(cursor.get(name, 0)) for name in cls.__struct_fields__})

    @property
    def position(self) -> Position:
        return Position(self.iteration, self.consumed_samples, self.consumed_tokens)

    @property
    def scheduled_samples(self) -> int:
        """Where the learning-rate schedule stands, in samples."""
        return self.consumed_samples - self.unscheduled_samples

    @property
    def scheduled_tokens(self) -> int:
        """Where the learning-rate schedule stands, in tokens."""
        return self.consumed_tokens - self.unscheduled_tokens

    def after_step(
        self, samples: int, sequence_length: int, loss: float, skipped: bool
    ) -> Progress:
        """The counters after one step of `samples` samples; data is consumed even where the update
        was dropped.
        """
        tokens = samples * sequence_length
        return replace(
            self.moved_to(
                Position(
                    self.iteration + 1,
                    self.consumed_samples + samples,
                    self.consumed_tokens + tokens,
                )
            ),
            skipped=self.skipped + int(skipped),
            nan=self.nan + int(not math.isfinite(loss)),
            unscheduled_samples=self.unscheduled_samples + samples * skipped,
            unscheduled_tokens=self.unscheduled_tokens + tokens * skipped,
        )

    def moved_to(self, position: Position) -> Progress:
        """The counters at another place of the training's way, where nothing was trained in
        between.
        """
        return replace(
            self,
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            consumed_tokens=position.consumed_tokens,
        )


def decay_samples_of(config: TrainerConfig) -> int:
    """Where the sample-counted decay ends; the whole training when the card does not say."""
    schedule, batch = config.schedule, config.batch
    if schedule.decay_samples is not None:
        return schedule.decay_samples
    if schedule.decay_iterations is not None:
        return schedule.decay_iterations * batch.global_batch_size
    return batch.train_samples


def warmup_samples_of(config: TrainerConfig) -> float:
    """Where the warm-up ends; a `warmup_fraction` is of the decay in samples, also when tokens end
    the decay.
    """
    schedule = config.schedule
    if schedule.warmup_fraction is not None:
        return schedule.warmup_fraction * decay_samples_of(config)
    if schedule.warmup_iterations is not None:
        return schedule.warmup_iterations * config.batch.global_batch_size
    return schedule.warmup_samples
