"""The learning rate: warm-up, decay by samples or by tokens, and the floor. Pure, free of torch.

Formulas: Megatron's. Trainings counted in iterations use the same ones, with iterations x global batch for samples.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.schedule.path import path_of


class LearningRatePlan(Record):
    """The learning rate of a whole training; built once by `plan_of`, then asked before every step.

    `warmup_samples` has a fraction where the card gives the warm-up as a share of the decay. With `decay_tokens` the
    decay is counted in tokens and `decay_samples` has no effect. `warmup_tokens` are the tokens of exactly the first
    `warmup_samples` samples on the card's path of batches and sequence lengths: the decay starts there, at the peak.
    (Megatron-DeepSpeed noted this number only if a step ended exactly with the warm-up, and else took zero, so its
    rate jumped there.)
    """

    learning_rate: float
    min_learning_rate: float
    decay_style: str
    warmup_samples: float
    warmup_tokens: float
    decay_samples: int
    decay_tokens: int | None

    def at(self, samples: int, tokens: int) -> float:
        """The rate for the step that starts after so many scheduled samples and tokens.

        Scheduled are those of updates that were made, and of ranges that the card skips. An update that was dropped
        (fp16's loss scale) does not move the schedule, which so lags behind what was consumed, as Megatron's does.
        """
        peak, floor = self.learning_rate, self.min_learning_rate
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return peak * samples / self.warmup_samples
        if self.decay_style == "constant":
            return peak
        if self.decay_tokens is None:
            position, start, end = float(samples), self.warmup_samples, self.decay_samples
        else:
            position, start, end = float(tokens), self.warmup_tokens, self.decay_tokens
        if position >= end:
            return floor
        ratio = max(0.0, (position - start) / (end - start))
        coefficient = 1.0 - ratio if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return floor + coefficient * (peak - floor)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the schedule, for `trainer.schedule.resume.reconcile`."""
        return asdict(self)


def decay_samples_of(config: TrainerConfig) -> int:
    """Where the sample-counted decay ends; the whole training when the card does not say."""
    schedule, batch = config.schedule, config.batch
    if schedule.decay_samples is not None:
        return schedule.decay_samples
    if schedule.decay_iterations is not None:
        return schedule.decay_iterations * batch.global_batch_size
    return batch.train_samples


def warmup_samples_of(config: TrainerConfig) -> float:
    """Where the warm-up ends; a `warmup_fraction` is of the decay in samples, also when tokens end the decay."""
    schedule = config.schedule
    if schedule.warmup_fraction is not None:
        return schedule.warmup_fraction * decay_samples_of(config)
    if schedule.warmup_iterations is not None:
        return schedule.warmup_iterations * config.batch.global_batch_size
    return schedule.warmup_samples


def plan_of(config: TrainerConfig) -> LearningRatePlan:
    """The card's learning rate."""
    schedule, warmup = config.schedule, warmup_samples_of(config)
    return LearningRatePlan(
        learning_rate=schedule.learning_rate,
        min_learning_rate=schedule.min_learning_rate,
        decay_style=schedule.decay_style,
        warmup_samples=warmup,
        warmup_tokens=path_of(config).tokens_at(warmup),
        decay_samples=decay_samples_of(config),
        decay_tokens=schedule.decay_tokens,
    )
