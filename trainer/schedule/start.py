"""What a training starts from, and whether its card goes on from there: one rule, for trainer and
`tr11 launch`.

Free of torch. What makes one checkpoint resumable is in `trainer.contract.resumable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import checkpoint_step
from trainer.contract.errors import ScheduleMismatch
from trainer.contract.record import Record
from trainer.contract.resumable import ResumeNeed
from trainer.schedule.learning_rate import LearningRatePlan, plan_of

OPTIMIZER_KEYS = (
    "type",
    "beta1",
    "beta2",
    "epsilon",
    "weight_decay",
    "clip_grad",
    "lamb_variant",
    "lamb_norms",
    "embedding_alpha",
)


class StartSource(Record):
    """Where a training looks for its start: the run's own checkpoints, or the folder that
    `checkpoint.load` names.

    `must`: no start from random weights where it holds none. `takes_weights`: the optimizer's
    moments begin at zero. `is_fresh`: so do all counters, and the schedule is the card's. `need`:
    what one of its checkpoints must hold.
    """

    folder: Path
    is_own: bool
    must: bool
    need: ResumeNeed
    takes_weights: bool = False
    is_fresh: bool = False


def own_source(config: TrainerConfig) -> StartSource:
    """The run's own checkpoints, which go before all others."""
    must = config.run.expect_resume and config.checkpoint.load is None
    return StartSource(config.paths.checkpoints, True, must, ResumeNeed.of(config))


def loaded_source(config: TrainerConfig) -> StartSource | None:
    """Another run's checkpoints, for a run that has none of its own; None where the card names
    none.
    """
    settings = config.checkpoint
    if settings.load is None:
        return None
    takes_weights = settings.finetune or not settings.load_optimizer
    need = ResumeNeed.of(config)
    if takes_weights:
        need = need.for_weights()
    return StartSource(
        Path(settings.load),
        False,
        True,
        need=need,
        takes_weights=takes_weights,
        is_fresh=settings.finetune,
    )


def no_start(source: StartSource) -> tuple[str, str]:
    """Why nothing can be started from the folder that `checkpoint.load` names and that holds no
    checkpoint, without the key; and what to do about it.
    """
    folder = source.folder
    if checkpoint_step(folder.name) is not None and folder.is_dir():
        return (
            f"{folder} is one checkpoint",
            "name the folder above it, whose file latest says which",
        )
    if folder.is_dir():
        fault = "holds no checkpoint (global_stepN)"
    else:
        fault = "is not a folder that is there"
    return f"{folder} {fault}", "name a folder of checkpoints, or leave the key out"


def optimizer_facts(config: TrainerConfig) -> dict[str, Any]:
    """What a checkpoint keeps of the optimizer's settings."""
    return {key: getattr(config.optimizer, key) for key in OPTIMIZER_KEYS}


def agreed_settings(
    config: TrainerConfig, source: StartSource, cursor: Mapping[str, Any], place: str
) -> Reconciled:
    """The learning-rate plan to train by from the checkpoint `place`, whose cursor this is, and the
    lines to say.

    Raises ScheduleMismatch where schedule or optimizer are not the checkpoint's and
    `schedule.on_resume` does not say which count: every difference.
    """
    card = plan_of(config)
    if source.is_fresh:
        return Reconciled(card, ())
    faults, agreed = [], Reconciled(card, ())
    try:
        agreed = reconcile(cursor.get("schedule", {}), card, config.schedule.on_resume)
    except ScheduleMismatch as error:
        faults += [
            (f"{place} follows another learning rate: {rule}", fix) for rule, fix in error.faults
        ]
    differing = _optimizer_differences(config, cursor)
    if differing and config.schedule.on_resume != "override":
        listed = ", ".join(
            f"optimizer.{key} is {then} there and {now} in the card" for key, then, now in differing
        )
        rule = f"{place} was trained with other settings: {listed}"
        faults.append((rule, 'restore them, or set schedule.on_resume = "override"'))
    if faults:
        raise ScheduleMismatch(*faults)
    overridden = tuple(f" > overriding optimizer {key} value to {now}" for key, _, now in differing)
    return Reconciled(agreed.plan, (*agreed.remarks, *overridden))


def _optimizer_differences(
    config: TrainerConfig, cursor: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """(key, value in the checkpoint, the card's value) of the optimizer's settings that are not the
    checkpoint's.
    """
    saved, card = cursor.get("optimizer", {}), optimizer_facts(config)
    return [
        (key, saved[key], card[key])
        for key in OPTIMIZER_KEYS
        if key in saved and saved[key] != card[key]
    ]


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

    A value that the checkpoint does not know is the card's. Raises ScheduleMismatch under "match"
    where any differs.
    """
    mine, differing = card.facts(), schedule_differences(saved, card)
    if on_resume == "override":
        remarks = (
            f" > overriding {NAMES[name]} value to {_shown(mine[name])}" for name in differing
        )
        return Reconciled(card, tuple(remarks))
    if on_resume == "checkpoint":
        known = {name: saved[name] for name in (*NAMES, "warmup_tokens") if name in saved}
        remarks = (
            f" > using checkpoint value {_shown(saved[name])} for {NAMES[name]}"
            for name in NAMES
            if name in saved
        )
        return Reconciled(replace(card, **known), tuple(remarks))
    if differing:
        raise ScheduleMismatch(*(_refusal(name, saved[name], mine[name]) for name in differing))
    # The decay by tokens starts where the warm-up truly ended, also when batch or curriculum were
    # changed since.
    return Reconciled(
        replace(card, warmup_tokens=saved.get("warmup_tokens", card.warmup_tokens)), ()
    )


def schedule_differences(saved: Mapping[str, Any], card: LearningRatePlan) -> list[str]:
    """The values that both sides know and on which they disagree, by the keys of NAMES."""
    mine = card.facts()
    return [name for name in NAMES if name in saved and not _equal(name, saved, mine)]


def _equal(name: str, saved: Mapping[str, Any], card: Mapping[str, Any]) -> bool:
    """Whether one value agrees. Where tokens end both decays, the length in samples has no effect
    and may differ; a cooldown may where neither has one.
    """
    if name.startswith("cooldown") and "wsd" not in (saved.get("decay_style"), card["decay_style"]):
        return True
    if (
        name == "decay_samples"
        and card["decay_tokens"] is not None
        and saved.get("decay_tokens") is not None
    ):
        return True
    return bool(saved[name] == card[name])


def _refusal(name: str, saved: Any, card: Any) -> tuple[str, str]:
    key = CARD_KEYS.get(name, f"schedule.{name}")
    return (
        f"{NAMES[name]}: value from checkpoint ({_shown(saved)}) is not equal to the card's ({_shown(card)})",
        f'restore {key}, or set schedule.on_resume to "override" (the card wins) or "checkpoint"',
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)
