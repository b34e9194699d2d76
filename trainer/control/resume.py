"""What a training starts from: this run's newest checkpoint, another run's, or nothing; in either
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from trainer.checkpoint import randomness, store
from trainer.checkpoint.deepspeed.collective import load_deepspeed
from trainer.checkpoint.publishing import CheckpointInfo
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_formats import DEEPSPEED, format_at
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name, checkpoint_step
from trainer.contract.errors import CheckpointError
from trainer.contract.files import now
from trainer.contract.origin import ORIGIN_KEY, BranchOrigin, lineage_before, run_of_checkpoints
from trainer.contract.record import Record
from trainer.contract.resumable import (
    OPTIMIZER_SUMS,
    foreign_step,
    model_facts,
)
from trainer.engine import Engine
from trainer.parallel.agreement import RankGroup
from trainer.parallel.mesh import Mesh
from trainer.schedule.learning_rate import LearningRatePlan, plan_of
from trainer.schedule.path import Progress
from trainer.schedule.start import StartSource, agreed_settings, loaded_source, no_start, own_source

Say = Callable[[str], None]


# of a cursor: how dropout's masks were made
MASKS_KEY = "dropout_masks"
BY_PLACE = "by place"


class ResumePosition(Record):
    """Where the training stands, and the learning rate that it follows. `own_step`: this run's
    checkpoint, if any.

    `place` and `cursor`: the checkpoint that was loaded and goes on; None and empty where all
    begins at zero. `origin`: what the run had begun with, if that was another's checkpoint.
    """

    progress: Progress
    plan: LearningRatePlan
    own_step: int | None
    was_loaded: bool
    place: Path | None = None
    cursor: Mapping[str, Any] = {}
    origin: BranchOrigin | None = None


def load_newest(engine: Engine, say: Say, job_id: str = "") -> ResumePosition:
    """Resume from the newest complete checkpoint, or from `checkpoint.load`, or start at zero.
    Collective.

    Keeps on record, as done by `job_id`, which checkpoint of another run was the start.

    Raises CheckpointError when there are checkpoints and none can be used, when the run must resume
    and cannot, or when the checkpoint's settings are not the card's and no one said which count.
    """
    config = engine.config
    ranks = RankGroup(engine.mesh.cpu_group)
    own = own_source(config)
    step = _find(config, own, say, ranks)
    if step is not None:
        found = load_step(engine, step, say)
        origin = ranks.on_first("the origin", _origin_of, config, found.cursor, say=say)
        return replace(found, own_step=step, origin=origin)
    other = loaded_source(config)
    if other is None:
        say(f"no checkpoint in {own.folder}: starting from random weights")
        ranks.on_first("the origin", _keep_origin, config, None, say=say)
        return ResumePosition(Progress(), plan_of(config), None, False)
    step = _find(config, other, say, ranks)
    assert step is not None
    found = load_step(engine, step, say, source=other)
    run = run_of_checkpoints(other.folder)
    before = lineage_before(other.folder)
    began = BranchOrigin(
        str(other.folder),
        step,
        run,
        takes_weights=other.takes_weights,
        is_fresh=other.is_fresh,
        time=now(),
        job_id=job_id,
        before=before,
    )
    origin = ranks.on_first("the origin", _keep_origin, config, began, say=say)
    return replace(found, origin=origin)


def _origin_of(config: TrainerConfig, cursor: Mapping[str, Any], say: Say) -> BranchOrigin | None:
    """What the run had begun with: by its own record, else by its checkpoint, as in a directory
    that was restored.
    """
    try:
        origin = BranchOrigin.read(config.paths)
    except (OSError, ValueError) as error:
        say(f"tr11: WARNING: what this training began with is not on record: {error}")
        origin = None
    saved = cursor.get(ORIGIN_KEY)
    if origin is None and isinstance(saved, Mapping):
        return _keep_origin(config, BranchOrigin.of(saved), say)
    return origin


def _keep_origin(
    config: TrainerConfig, origin: BranchOrigin | None, say: Say
) -> BranchOrigin | None:
    """Keep what the training began with, on rank 0; what cannot be written keeps no one from
    training.
    """
    try:
        if origin is None:
            config.paths.origin.unlink(missing_ok=True)
        else:
            origin.write(config.paths)
    except OSError as error:
        say(f"tr11: WARNING: what this training began with could not be kept on record: {error}")
    return origin


def load_step(
    engine: Engine, step: int, say: Say, source: StartSource | None = None
) -> ResumePosition:
    """Load the checkpoint of `step` from this run's folder, or from another run's `source`.
    Collective.
    """
    config = engine.config
    source = source or own_source(config)
    place = source.folder / checkpoint_name(step)
    cursor, rng = _read(engine, place, weights_only=source.takes_weights, say=say)
    agreed = agreed_settings(config, source, cursor, str(place))
    for remark in agreed.remarks:
        say(remark)
    if drops(config) and not source.takes_weights and cursor.get(MASKS_KEY) != BY_PLACE:
        say(
            "dropout's masks are by place from here on; until here they were drawn, and were others"
        )
    if (
        rng is not None
        and not source.is_fresh
        and (source.is_own or config.checkpoint.load_random_state)
    ):
        randomness.restore(rng)
    if not source.takes_weights:
        engine.restore_scaler(cursor.get("loss_scaler", {}))
        engine.restore_optimizer_sums(cursor.get(OPTIMIZER_SUMS, {}))
    say(
        f"  successfully loaded checkpoint from {place.parent} at iteration {int(cursor['iteration'])}"
    )
    if source.is_fresh:
        say("checkpoint.finetune: its weights are used, all counters start at zero")
        return ResumePosition(Progress(), agreed.plan, None, True)
    return ResumePosition(
        Progress.from_cursor(cursor), agreed.plan, None, was_loaded=True, place=place, cursor=cursor
    )


def drops(config: TrainerConfig) -> bool:
    """Whether the card asks for dropout anywhere."""
    return config.model.hidden_dropout > 0.0 or config.model.attention_dropout > 0.0


def load_weights(engine: Engine, place: Path, say: Say) -> int:
    """Fill an engine's weights from the `global_stepN` folder `place`; returns its step.
    Collective.
    """
    cursor, _ = _read(engine, place, weights_only=True, say=say)
    return int(cursor["iteration"])


def _read(
    engine: Engine, place: Path, weights_only: bool, say: Say
) -> tuple[Mapping[str, Any], dict[str, torch.Tensor] | None]:
    """Fill the engine from a checkpoint of either layout; returns its cursor, and this rank's
    random state.
    """
    state = engine.sharded_state()
    info = checkpoint_info(engine.config, engine.mesh, "", "")
    ranks = RankGroup(engine.mesh.cpu_group)
    if ranks.on_first(f"{place} was not loaded", format_at, place) == DEEPSPEED:
        loaded = load_deepspeed(place, state, info, group=ranks.group, weights_only=weights_only)
    else:
        step = checkpoint_step(place.name)
        if step is None:
            raise CheckpointError(
                f"{place} is not a checkpoint's folder: its name must be global_stepN"
            )
        loaded = store.load(
            place.parent, step, state, info, group=ranks.group, weights_only=weights_only
        )
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


def _find(config: TrainerConfig, source: StartSource, say: Say, ranks: RankGroup) -> int | None:
    """The step to start from; also a checkpoint that another tool wrote, which has no manifest."""
    folder = source.folder
    foreign = ranks.on_first(f"{folder} could not be searched", foreign_step, folder)
    if foreign is not None:
        return foreign
    must = source.must and source.is_own
    step = store.find_resumable(
        folder, config.checkpoint.verify, must, report=say, group=ranks.group, need=source.need
    )
    if step is None and source.must:
        rule, fix = ranks.on_first(f"{folder} could not be searched", no_start, source)
        raise CheckpointError(f"checkpoint.load = {rule}; {fix}")
    return step


def checkpoint_info(
    config: TrainerConfig, mesh: Mesh, card_hash: str, job_id: str
) -> CheckpointInfo:
    """What a checkpoint of this run says of it."""
    return CheckpointInfo(
        topology=mesh.degrees(),
        model=model_facts(config),
        run_card_hash=card_hash,
        versions={"torch": torch.__version__, "deepspeed": metadata.version("deepspeed")},
        job_id=job_id,
    )
