"""Learning rate and warm-up of another batch size, and what makes runs of different batches
comparable. Pure.

The rules are those of the published large-batch experiments (BERT and T5, batches 512 to 32,768 at
equal samples): the rate grows with the square root of the batch, the share of the warm-up with the
batch; beyond sixteen times the card's batch the rate stays (16,384 has the rate of 8,192), and no
more than 64 % of the decay is warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from tr11ops.runcard.card import RunCard
from trainer.schedule.learning_rate import cooldown_samples_of, decay_samples_of, warmup_samples_of

BatchRule: TypeAlias = Literal["sqrt", "linear", "none"]
MOST_TIMES = 16.0  # of the card's batch: the rate grows no further
MOST_WARMUP = 0.64  # of the decay


def rule_overrides(card: RunCard, batch: int, rule: BatchRule) -> dict[str, Any]:
    """What the rule sets in place of the card's own for a step of `batch` samples, by key; the
    card's batch gives none.

    lr = lr0 sqrt(B / B0), or lr0 B / B0 where it is linear; the warm-up takes B / B0 times the
    card's samples, which is as many steps.
    """
    ratio = batch / card.batch.global_batch_size
    if rule == "none" or ratio == 1:
        return {}
    schedule = card.schedule
    grown = min(ratio, MOST_TIMES)
    rate = _rounded(schedule.learning_rate * (math.sqrt(grown) if rule == "sqrt" else grown))
    found: dict[str, Any] = {"schedule.learning_rate": rate}
    if schedule.min_learning_rate > rate:
        found["schedule.min_learning_rate"] = rate
    warmup = warmup_samples_of(card)
    if warmup:
        most = max(MOST_WARMUP * decay_samples_of(card), warmup)
        found |= _warmup(card, round(min(warmup * ratio, most)))
    return found


def equal_overrides(card: RunCard, batch: int, batches: Iterable[int]) -> dict[str, Any]:
    """What lets every cell see the same samples: the same end for all `batches`, and evaluations,
    of the same samples, and saves at the same places. What the card gives in steps is given in
    samples instead.
    """
    common = math.lcm(*batches)
    samples = card.batch.train_samples
    found: dict[str, Any] = {"batch.train_samples": samples // common * common or samples}
    if card.batch.train_iterations is not None:
        found["batch.train_iterations"] = None
    if card.schedule.decay_iterations is not None:
        found |= {
            "schedule.decay_samples": decay_samples_of(card),
            "schedule.decay_iterations": None,
        }
    if card.schedule.cooldown_iterations is not None:
        found |= {
            "schedule.cooldown_samples": cooldown_samples_of(card),
            "schedule.cooldown_iterations": None,
        }
    if card.schedule.warmup_iterations is not None:
        found |= _warmup(card, round(warmup_samples_of(card)))
    ratio = batch / card.batch.global_batch_size
    counts = {
        "checkpoint.interval": card.checkpoint.interval,
        "evaluation.interval": card.evaluation.interval,
        "evaluation.iterations": card.evaluation.iterations,
    }
    return found | {
        key: max(1, round(count / ratio)) for key, count in counts.items() if count and ratio != 1
    }


def _warmup(card: RunCard, samples: int) -> dict[str, Any]:
    """The warm-up in samples, in place of a share or of steps."""
    others = {
        "warmup_fraction": card.schedule.warmup_fraction,
        "warmup_iterations": card.schedule.warmup_iterations,
    }
    gone = {f"schedule.{key}": None for key, value in others.items() if value is not None}
    return {"schedule.warmup_samples": samples, **gone}


def without_named(found: Mapping[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The overrides less what the grid or the command line names itself: that counts as it was
    typed.
    """
    return {key: value for key, value in found.items() if key not in named}


def _rounded(value: float) -> float:
    """Six digits: a card is read by people."""
    return float(f"{value:.6g}")
