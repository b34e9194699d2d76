"""Where a checkpoint's learning-rate schedule and the card's differ: refuse, or let one of them win. Pure.

The counters (samples and tokens already scheduled) always come from the checkpoint; only the schedule's shape is
decided here. Values and modes are those of Megatron's `--override-lr-scheduler` and `--use-checkpoint-lr-scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec.structs import replace

from trainer.contract.errors import ScheduleMismatch
from trainer.contract.record import Record
from trainer.schedule.learning_rate import LearningRatePlan

OnResume = Literal["match", "override", "checkpoint"]

# Name of each value in messages. `warmup_tokens` is not among them: it follows from the others.
NAMES = {
    "learning_rate": "learning rate",
    "min_learning_rate": "minimum learning rate",
    "warmup_samples": "warm-up (samples)",
    "decay_samples": "decay length (samples)",
    "decay_tokens": "decay length (tokens)",
    "decay_style": "decay style",
    "cooldown_style": "cooldown style",
    "cooldown_samples": "cooldown (samples)",
    "cooldown_tokens": "cooldown (tokens)",
}
CARD_KEYS = {
    "warmup_samples": "schedule.warmup_samples, warmup_iterations or warmup_fraction",
    "decay_samples": "schedule.decay_samples or decay_iterations (default: batch.train_samples)",
    "cooldown_samples": "schedule.cooldown_samples or cooldown_iterations",
}


class Reconciled(Record):
    """The plan to train by, and a line for the log for each value that was decided."""

    plan: LearningRatePlan
    remarks: tuple[str, ...]


def reconcile(saved: Mapping[str, Any], card: LearningRatePlan, on_resume: OnResume) -> Reconciled:
    """Decide between the schedule in a checkpoint (`LearningRatePlan.facts()`) and the card's.

    A value that the checkpoint does not know is the card's. Raises ScheduleMismatch under "match" where any differs.
    """
    mine, differing = card.facts(), schedule_differences(saved, card)
    if on_resume == "override":
        remarks = (f" > overriding {NAMES[name]} value to {_shown(mine[name])}" for name in differing)
        return Reconciled(card, tuple(remarks))
    if on_resume == "checkpoint":
        known = {name: saved[name] for name in (*NAMES, "warmup_tokens") if name in saved}
        remarks = (
            f" > using checkpoint value {_shown(saved[name])} for {NAMES[name]}" for name in NAMES if name in saved
        )
        return Reconciled(replace(card, **known), tuple(remarks))
    if differing:
        raise ScheduleMismatch("\n".join(_refusal(name, saved[name], mine[name]) for name in differing))
    # The decay by tokens starts where the warm-up truly ended, also when batch or curriculum were changed since.
    return Reconciled(replace(card, warmup_tokens=saved.get("warmup_tokens", card.warmup_tokens)), ())


def schedule_differences(saved: Mapping[str, Any], card: LearningRatePlan) -> list[str]:
    """The values that both sides know and on which they disagree, by the keys of NAMES."""
    mine = card.facts()
    return [name for name in NAMES if name in saved and not _equal(name, saved, mine)]


def _equal(name: str, saved: Mapping[str, Any], card: Mapping[str, Any]) -> bool:
    """Whether one value agrees. Where tokens end both decays, the length in samples has no effect and may differ; a
    cooldown may where neither has one.
    """
    if name.startswith("cooldown") and "wsd" not in (saved.get("decay_style"), card["decay_style"]):
        return True
    if name == "decay_samples" and card["decay_tokens"] is not None and saved.get("decay_tokens") is not None:
        return True
    return bool(saved[name] == card[name])


def _refusal(name: str, saved: Any, card: Any) -> str:
    key = CARD_KEYS.get(name, f"schedule.{name}")
    return (
        f"{NAMES[name]}: value from checkpoint ({_shown(saved)}) is not equal to the card's ({_shown(card)}); "
        f'restore {key}, or set schedule.on_resume to "override" (the card wins) or "checkpoint"'
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
