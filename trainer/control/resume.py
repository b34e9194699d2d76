"""What a training starts from: this run's newest checkpoint, another run's, or nothing; in either layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import randomness, store
from trainer.checkpoint.deepspeed.collective import load_deepspeed
from trainer.checkpoint.deepspeed.inspect import is_deepspeed_layout
from trainer.checkpoint.store import CheckpointInfo
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.checkpoints import CheckpointError
from trainer.contract.paths import MANIFEST_FILE
from trainer.contract.resumable import OPTIMIZER_SUMS, WEIGHTS, ResumeNeed, model_facts
from trainer.engine import Engine
from trainer.parallel.agreement import RankGroup
from trainer.parallel.mesh import Mesh
from trainer.schedule.learning_rate import LearningRatePlan, plan_of
from trainer.schedule.progress import Progress
from trainer.schedule.resume import ScheduleMismatch, reconcile

Say = Callable[[str], None]
OPTIMIZER_KEYS = (
    "type", "beta1", "beta2", "epsilon", "weight_decay", "clip_grad", "lamb_variant", "lamb_norms", "embedding_alpha",
)  # fmt: skip


@dataclass(frozen=True)
class ResumePosition:
    """Where the training stands, and the learning rate that it follows. `own_step`: this run's checkpoint, if any.

    `place` and `cursor`: the checkpoint that was loaded and goes on; None and empty where all begins at zero.
    """

    progress: Progress
    plan: LearningRatePlan
    own_step: int | None
    was_loaded: bool
    place: Path | None = None
    cursor: Mapping[str, Any] = field(default_factory=dict)


def load_newest(config: TrainerConfig, mesh: Mesh, engine: Engine, say: Say) -> ResumePosition:
    """Resume from the newest complete checkpoint, or from `checkpoint.load`, or start at zero. Collective.

    Raises CheckpointError when there are checkpoints and none can be used, when the run must resume and cannot, or
    when the checkpoint's settings are not the card's and no one said which count.
    """
    folder, ranks = config.paths.checkpoints, RankGroup(mesh.cpu_group)
    must = config.run.expect_resume and config.checkpoint.load is None
    step = _find(config, folder, must, say, ranks, ResumeNeed.of(config))
    if step is not None:
        found = load_step(config, mesh, engine, step, say)
        return replace(found, own_step=step)
    if config.checkpoint.load is None:
        say(f"no checkpoint in {folder}: starting from random weights")
        return ResumePosition(Progress(), plan_of(config), None, False)
    other = Path(config.checkpoint.load)
    need = ResumeNeed.of(config)
    step = _find(config, other, True, say, ranks, need.for_weights() if _takes_weights(config) else need)
    assert step is not None
    return load_step(config, mesh, engine, step, say, other)


def load_step(
    config: TrainerConfig, mesh: Mesh, engine: Engine, step: int, say: Say, folder: Path | None = None
) -> ResumePosition:
    """Load the checkpoint of `step` from this run's folder, or from `folder`, which another run wrote. Collective."""
    is_own = folder is None
    place = (folder or config.paths.checkpoints) / checkpoint_name(step)
    settings = config.checkpoint
    fresh = settings.finetune and not is_own
    weights_only = not is_own and _takes_weights(config)
    cursor, rng = _read(config, mesh, engine, place, weights_only, say)
    plan = plan_of(config)
    if not fresh:
        plan = _agreed_plan(config, cursor, plan, place, say)
        _check_optimizer(config, cursor, place, say)
    if rng is not None and not fresh and (is_own or settings.load_random_state):
        randomness.restore(rng)
    if not weights_only:
        engine.restore_scaler(cursor.get("loss_scaler", {}))
        engine.restore_optimizer_sums(cursor.get(OPTIMIZER_SUMS, {}))
    progress = Progress() if fresh else Progress.from_cursor(cursor)
    say(f"  successfully loaded checkpoint from {place.parent} at iteration {int(cursor['iteration'])}")
    if fresh:
        say("checkpoint.finetune: its weights are used, all counters start at zero")
    return (
        ResumePosition(progress, plan, None, True)
        if fresh
        else ResumePosition(progress, plan, None, True, place, cursor)
    )


def _takes_weights(config: TrainerConfig) -> bool:
    """Whether a start from another run's checkpoint leaves its optimizer alone."""
    return config.checkpoint.finetune or not config.checkpoint.load_optimizer


def load_weights(config: TrainerConfig, mesh: Mesh, engine: Engine, place: Path, say: Say) -> int:
    """Fill an engine's weights from the `global_stepN` folder `place`; returns its step. Collective."""
    cursor, _ = _read(config, mesh, engine, place, True, say)
    return int(cursor["iteration"])


def _read(
    config: TrainerConfig, mesh: Mesh, engine: Engine, place: Path, weights_only: bool, say: Say
) -> tuple[Mapping[str, Any], dict[str, torch.Tensor] | None]:
    """Fill the engine from a checkpoint of either layout; returns its cursor, and this rank's random state."""
    state, info = engine.sharded_state(), checkpoint_info(config, mesh, "", "")
    ranks = RankGroup(mesh.cpu_group)
    if ranks.on_first(f"{place} was not loaded", lambda: has_original_layout(place)):
        loaded = load_deepspeed(place, state, info, group=mesh.cpu_group, weights_only=weights_only)
    else:
        step = checkpoint_step(place.name)
        if step is None:
            raise CheckpointError(f"{place} is not a checkpoint's folder: its name must be global_stepN")
        loaded = store.load(place.parent, step, state, info, group=mesh.cpu_group, weights_only=weights_only)
    optimizer_step = loaded.optimizer_step
    for remark in loaded.remarks:
        say(remark)
    if weights_only:
        engine.masters_from_weights(state)
        optimizer_step = 0
    engine.finish_load(replace(state, optimizer_step=optimizer_step))
    broken = engine.not_finite(state)
    if broken:
        raise CheckpointError(
            f"{place} holds numbers that are not finite: {len(broken)} parameters, the first {broken[0]}; nothing can "
            f"be trained from it: write the name of an older one into {place.parent / LATEST_FILE}"
        )
    return loaded.cursor, loaded.rng


def has_original_layout(place: Path) -> bool:
    """True when the folder holds layer files of the original layout and not ours."""
    return not (place / WEIGHTS).is_dir() and is_deepspeed_layout(place)


def _find(config: TrainerConfig, folder: Path, must: bool, say: Say, ranks: RankGroup, need: ResumeNeed) -> int | None:
    """The step to start from; also a checkpoint that another tool wrote, which has no manifest."""
    foreign = ranks.on_first(f"{folder} could not be searched", lambda: _foreign_step(folder))
    if foreign is not None:
        return foreign
    return store.find_resumable(folder, config.checkpoint.verify, must, say, ranks.group, need)


def _foreign_step(folder: Path) -> int | None:
    """The step that `latest` names (else the newest), when no checkpoint here has a manifest and one is foreign."""
    steps = checkpoint_steps(folder) if folder.is_dir() else []
    if any((folder / checkpoint_name(step) / MANIFEST_FILE).exists() for step in steps):
        return None
    usable = [step for step in steps if is_deepspeed_layout(folder / checkpoint_name(step))]
    if not usable:
        return None
    try:
        named = read_latest(folder)
    except ValueError:
        named = None
    return named if named in usable else max(usable)


def _agreed_plan(
    config: TrainerConfig, cursor: Mapping[str, Any], plan: LearningRatePlan, place: Path, say: Say
) -> LearningRatePlan:
    try:
        agreed = reconcile(cursor.get("schedule", {}), plan, config.schedule.on_resume)
    except ScheduleMismatch as error:
        raise CheckpointError(f"{place} follows another learning rate: {error}") from None
    for remark in agreed.remarks:
        say(remark)
    return agreed.plan


def _check_optimizer(config: TrainerConfig, cursor: Mapping[str, Any], place: Path, say: Say) -> None:
    """Compare the optimizer's settings; the card's are used when `schedule.on_resume` is "override".

    Raises CheckpointError with every difference otherwise.
    """
    saved, card = cursor.get("optimizer", {}), optimizer_facts(config)
    differing = [key for key in OPTIMIZER_KEYS if key in saved and saved[key] != card[key]]
    if not differing:
        return
    if config.schedule.on_resume == "override":
        for key in differing:
            say(f" > overriding optimizer {key} value to {card[key]}")
        return
    listed = ", ".join(f"optimizer.{key} is {saved[key]} there and {card[key]} in the card" for key in differing)
    raise CheckpointError(
        f'{place} was trained with other settings: {listed}; restore them, or set schedule.on_resume = "override"'
    )


def optimizer_facts(config: TrainerConfig) -> dict[str, Any]:
    """What a checkpoint keeps of the optimizer's settings."""
    return {key: getattr(config.optimizer, key) for key in OPTIMIZER_KEYS}


def checkpoint_info(config: TrainerConfig, mesh: Mesh, card_hash: str, job_id: str) -> CheckpointInfo:
    """What a checkpoint of this run says of it."""
    return CheckpointInfo(
        topology=mesh.degrees(),
        model=model_facts(config),
        run_card_hash=card_hash,
        versions={"torch": torch.__version__, "deepspeed": metadata.version("deepspeed")},
        job_id=job_id,
    )
