"""The learning rate: warm-up, decay by samples or by tokens, and the floor. Pure, free of torch.

Formulas: Megatron's. Trainings counted in iterations use the same ones, with iterations x global
batch for samples.
"""

from __future__ import annotations

import math

from trainer.config.card import TrainerConfig
from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record
from trainer.schedule.path import (
    Position,
    TrainingPath,
    decay_samples_of,
    path_of,
    warmup_samples_of,
)


class LearningRatePlan(Record):
    """The learning rate of a whole training; built once by `plan_of`, then asked before every step.

    `warmup_samples` has a fraction where the card gives the warm-up as a share of the decay. With
    `decay_tokens` the decay is counted in tokens and `decay_samples` has no effect; so is the
    cooldown of the style "wsd", which has the last `cooldown_samples` or `cooldown_tokens` of the
    decay. `warmup_tokens` are the tokens of exactly the first `warmup_samples` samples on the
    card's path of batches and sequence lengths: the decay starts there, at the peak.
    (Megatron-DeepSpeed noted this number only if a step ended exactly with the warm-up, and else
    took zero, so its rate jumped there.)
    """

    learning_rate: float
    min_learning_rate: float
    decay_style: str
    warmup_samples: float
    warmup_tokens: float
    decay_samples: int
    decay_tokens: int | None
    cooldown_style: str = "minus_sqrt"
    cooldown_samples: int | None = None
    cooldown_tokens: int | None = None

    def decayed_at(self, path: TrainingPath, before: int = 0) -> Position:
        """Where the decay ends, or so many samples or tokens before it."""
        if self.decay_tokens is not None:
            return path.after_tokens(self.decay_tokens - before)
        return path.after_samples(self.decay_samples - before)

    def at(self, samples: int, tokens: int) -> float:
        """The rate for the step that starts after so many scheduled samples and tokens.

        Scheduled are those of updates that were made, and of ranges that the card skips. An update
        that was dropped (fp16's loss scale) does not move the schedule, which so lags behind what
        was consumed, as Megatron's does.
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
        style = self.decay_style
        if style == "wsd":
            start, style = end - self.cooldown, self.cooldown_style
        ratio = max(0.0, (position - start) / (end - start))
        return floor + remaining(style, ratio) * (peak - floor)

    @property
    def cooldown(self) -> int:
        """Its length, in tokens or samples as the decay is counted; 0 where there is none."""
        return (self.cooldown_samples if self.decay_tokens is None else self.cooldown_tokens) or 0

    def facts(self) -> JsonObject:
        """What a checkpoint keeps of the schedule, for `trainer.schedule.start.reconcile`."""
        return document(self)


def remaining(style: str, ratio: float) -> float:
    """What is left of the way from peak to floor when `ratio` (0 to 1) of the decay or cooldown is
    behind.

    linear: 1 - r. cosine: (cos(pi r) + 1) / 2. exponential: 2 x 0.5^r - 1. minus_sqrt: 1 - sqrt(r),
    which ended lower than the linear one for Haegele et al., arXiv 2405.18392. All as in Megatron;
    warm-up, stable, decay as a whole: Hu et al., arXiv 2404.06395.
    """
    if style == "linear":
        return 1.0 - ratio
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def cooldown_samples_of(config: TrainerConfig) -> int | None:
    """How many samples the cooldown has; None where it has none, or is counted in tokens."""
    schedule = config.schedule
    if schedule.cooldown_iterations is not None:
        return schedule.cooldown_iterations * config.batch.global_batch_size
    return schedule.cooldown_samples


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
        cooldown_style=schedule.cooldown_style,
        cooldown_samples=cooldown_samples_of(config),
        cooldown_tokens=schedule.cooldown_tokens,
    )
