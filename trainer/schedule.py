"""What is a function of consumed samples alone: the global batch, the number of steps, the learning rate.

Pure and free of torch: the trainer steps by it, the operations side plans by it. Formulas: Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config import BatchSection, ScheduleSection


@dataclass(frozen=True)
class BatchLevel:
    """Consecutive steps of one global batch: `iterations` of them, the first of which starts at `consumed_samples`.

    `first_iteration` counts from 1, as the log does.
    """

    batch_size: int
    first_iteration: int
    iterations: int
    consumed_samples: int


def batch_size_at(consumed_samples: int, batch: BatchSection) -> int:
    """Samples of the step that starts when `consumed_samples` samples have been trained on."""
    ramp = batch.ramp
    if ramp is None or ramp.samples == 0 or consumed_samples > ramp.samples:
        return batch.global_batch_size
    level = int(consumed_samples / _samples_per_level(batch))
    return min(batch.global_batch_size, ramp.start + ramp.increment * level)


def _samples_per_level(batch: BatchSection) -> float:
    assert batch.ramp is not None
    return batch.ramp.samples / ((batch.global_batch_size - batch.ramp.start) // batch.ramp.increment)


def batch_levels(batch: BatchSection) -> tuple[BatchLevel, ...]:
    """The whole training as levels of equal batch; the last one drops the batch that `train_samples` cannot fill."""
    return tuple(_levels(batch))


def _levels(batch: BatchSection) -> Iterator[BatchLevel]:
    consumed, done = 0, 0
    while True:
        size = batch_size_at(consumed, batch)
        room = (batch.train_samples - consumed) // size
        count = min(room, _steps_until_change(consumed, size, batch))
        if count > 0:
            yield BatchLevel(size, done + 1, count, consumed)
            consumed, done = consumed + count * size, done + count
        if count == room:
            return


def _steps_until_change(consumed: int, size: int, batch: BatchSection) -> int:
    """Steps of `size` that start before the batch changes; more than any training has when it never does."""
    ramp = batch.ramp
    if ramp is None or size == batch.global_batch_size:
        return batch.train_samples
    level = (size - ramp.start) // ramp.increment
    change = min(math.ceil((level + 1) * _samples_per_level(batch)), ramp.samples + 1)
    # The product above and the division in batch_size_at round apart: step to the first sample of the next level.
    while change > consumed + 1 and batch_size_at(change - 1, batch) > size:
        change -= 1
    while batch_size_at(change, batch) == size:
        change += 1
    return -(-(change - consumed) // size)


def total_iterations(batch: BatchSection) -> int:
    """Steps of the whole training."""
    return sum(level.iterations for level in _levels(batch))


def iterations_at(consumed_samples: int, batch: BatchSection) -> int:
    """Steps that have been completed when `consumed_samples` samples were trained on from the start."""
    done = 0
    for level in _levels(batch):
        if consumed_samples < level.consumed_samples:
            break
        done = (
            level.first_iteration
            - 1
            + min(level.iterations, (consumed_samples - level.consumed_samples) // level.batch_size)
        )
    return done


def consumed_samples_at(iteration: int, batch: BatchSection) -> int:
    """Samples trained on after `iteration` steps (the whole training's, when it has no more)."""
    consumed = 0
    for level in _levels(batch):
        if iteration < level.first_iteration:
            break
        steps = min(level.iterations, iteration - level.first_iteration + 1)
        consumed = level.consumed_samples + steps * level.batch_size
    return consumed


def learning_rate_at(samples: int, schedule: ScheduleSection, decay_samples: int) -> float:
    """The learning rate once `samples` samples were trained on: warm-up, then the decay, then its floor."""
    peak, floor, warmup = schedule.learning_rate, schedule.min_learning_rate, schedule.warmup_samples
    if warmup > 0 and samples <= warmup:
        return peak * samples / warmup
    if schedule.decay_style == "constant":
        return peak
    if samples > decay_samples:
        return floor
    ratio = (samples - warmup) / (decay_samples - warmup)
    coefficient = 1.0 - ratio if schedule.decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return floor + coefficient * (peak - floor)
