"""Whole trainings of two ranks, in one process each: their cards, kinds of trouble, and what they
wrote.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tests.trainer.cases import VOCABULARY, tiny
from tests.trainer.spawn import run_ranks
from trainer.attempt import TrainingAttempt
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.errors import CheckpointError, NotFiniteError
from trainer.contract.paths import RunPaths
from trainer.contract.recovery import (
    RecoveryRecord,
    write_recovery,
)
from trainer.control.exits import is_refusal
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag, Worker
from trainer.data.indexed_write import IndexedWriter
from trainer.engine import StepResult
from trainer.loop import Trainer

Started = TypeVar("Started", bound=Worker)
Curve = dict[int, tuple[float, ...]]


def write_tokens(folder: Path, documents: int = 60) -> None:
    """Documents of 40 random tokens as `folder/tokens`, unless they are there."""
    if (folder / "tokens.idx").exists():
        return
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, documents * 40).astype(np.uint16)
    with IndexedWriter(folder / "tokens", "uint16") as writer:
        writer.add_sequences(tokens, np.full(documents, 40, dtype=np.int32))


def card(folder: Path, **changes: Any) -> TrainerConfig:
    """A run of 24 steps of 16 samples on two stages; `changes` are sections with the keys to set in
    them.
    """
    write_tokens(folder)
    value = tiny(pipeline=2).model_dump(mode="json")
    value["run"]["directory"] = str(folder / "run")
    value["batch"] |= {"micro_batch_size": 4, "train_samples": 16 * 24}
    value["schedule"] |= {"warmup_samples": 64}
    value["checkpoint"] |= {"interval": 5}
    value["data"] |= {"prefixes": [str(folder / "tokens")], "workers": 0}
    value["logging"]["tensorboard"] = False
    for section, keys in changes.items():
        value[section] = (value[section] or {}) | keys
    return TrainerConfig.model_validate(value)


class Poisoned(Trainer):
    """Turns one weight into NaN for the length of one step: loss and gradients of that step are not
    finite.
    """

    poison_at: int = 0

    def _step(self) -> StepResult:
        if self.progress.iteration + 1 != self.poison_at:
            return super()._step()
        weight = self.engine.named_parameters()[0][1]
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(math.nan)
        result = super()._step()
        with torch.no_grad():
            weight.copy_(torch.where(weight.isnan(), kept, weight))
        return result


class Spiking(Trainer):
    """Damages the model before the step of one iteration, once; as a real spike does, the loss and
    norm jump.
    """

    spike_at: int | None = None

    def _step(self) -> StepResult:
        if self.progress.iteration + 1 == self.spike_at:
            type(self).spike_at = None
            with torch.no_grad():
                for fragment in self.engine.sharded_state().fragments:
                    fragment.tensors["fp32"].mul_(-9.0)
            self.engine.finish_load(self.engine.sharded_state())
        return super()._step()


class Disagreeing(Trainer):
    """The last rank alone gets other numbers of a step than the rest, as from sums in another
    order; far off, here.
    """

    def _step(self) -> StepResult:
        pipeline = self.engine._pipeline
        if self.mesh.rank == self.mesh.world_size - 1 and self.steps_done == 13:
            early, norm = self.engine._early_loss, pipeline.get_global_grad_norm
            losses = early.values
            early.values = lambda: [loss * 50 for loss in losses()]  # type: ignore[method-assign]
            pipeline.get_global_grad_norm = lambda: norm() * 50
        return super()._step()


def worker_of(
    config: TrainerConfig,
    job: str = "1",
    rank: int | None = None,
    launch: int = 1,
    kind: type[Started] = Worker,  # type: ignore[assignment]
) -> Started:
    """A worker as the launcher makes it: this rank, unless another is meant."""
    if rank is None:
        rank = int(os.environ["RANK"])
    beats = HeartbeatWriter(config.paths, rank, job)
    identity = AttemptIdentity(job, launch, config.paths.stop_request(job))
    return kind(config, identity, rank, beats, SignalFlag())


def attempt_of(kind: type[Trainer], config: TrainerConfig, job: str = "1") -> TrainingAttempt:
    """An attempt as the launcher makes it, on this rank."""
    return TrainingAttempt(worker_of(config, job), Path("none.json"), kind)


def trained(attempt: TrainingAttempt) -> tuple[str, int]:
    """Its end reason, and the iteration."""
    try:
        reason = attempt.train()
    finally:
        attempt.close()  # it lets go of the lease, also after a refusal
    return reason, attempt.iteration


def attempt(config: TrainerConfig, number: int, spike_at: int | None = None) -> tuple[str, int]:
    """One attempt on this rank; returns the end reason, and the iteration."""
    Spiking.spike_at = spike_at
    return trained(attempt_of(Spiking, config, str(number)))


def disagreeing_attempt(config: TrainerConfig) -> tuple[str, int]:
    return trained(attempt_of(Disagreeing, config))


def poisoned_attempt(config: TrainerConfig, poison_at: int) -> tuple[str, int]:
    Poisoned.poison_at = poison_at
    return trained(attempt_of(Poisoned, config))


class Diverged(Trainer):
    """Its masters turn into NaN before one iteration, for good: every later step is not finite."""

    poison_at: int = 0

    def _step(self) -> StepResult:
        if self.progress.iteration + 1 == self.poison_at:
            with torch.no_grad():
                for fragment in self.engine.sharded_state().fragments:
                    fragment.tensors["fp32"].fill_(math.nan)
            self.engine.finish_load(self.engine.sharded_state())
        return super()._step()


def diverged_attempt(config: TrainerConfig, poison_at: int) -> tuple[str, int, bool]:
    Diverged.poison_at = poison_at
    course = attempt_of(Diverged, config)
    try:
        trained(course)
    except NotFiniteError as error:
        return str(error), course.iteration, is_refusal(error, course.steps_done)
    return "", course.iteration, False


def _write_and_die(paths: RunPaths, record: RecoveryRecord) -> None:
    write_recovery(paths, record)
    os._exit(9)


def attempt_cut_in_roll_back(config: TrainerConfig) -> None:
    """An attempt with a spike that is killed between the record of its roll-back and the renames."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.spikes.recovery.write_recovery", _write_and_die)
        attempt(config, 1, spike_at=14)


def refusal(config: TrainerConfig, number: int) -> str:
    try:
        attempt(config, number)
    except CheckpointError as error:
        return str(error)
    return ""


def run(config: TrainerConfig, number: int = 1, spike_at: int | None = None) -> tuple[str, int]:
    results = run_ranks(attempt, 2, config, number, spike_at, launch=False)
    assert results[0] == results[1]
    return results[0]


def records(config: TrainerConfig, kind: str = "step") -> list[dict[str, Any]]:
    lines = config.paths.metrics.read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def curve(config: TrainerConfig) -> Curve:
    """iteration -> (loss, norm, samples, tokens, learning rate, length), of the last time it was
    trained.
    """
    keys = (
        "lm_loss",
        "grad_norm",
        "consumed_samples",
        "consumed_tokens",
        "learning_rate",
        "curriculum_length",
    )
    return {record["iteration"]: tuple(record[key] for key in keys) for record in records(config)}
