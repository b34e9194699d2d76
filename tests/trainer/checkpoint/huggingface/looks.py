"""What a saved model says of single samples: trained here and saved, or loaded; for tests of export
and import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from tests.trainer.cases import CPU, batches
from tests.trainer.checkpoint.huggingface.models import EXTRAS
from trainer.checkpoint import randomness, store
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

STEP = 3
TOLERANCE = 1e-5  # fp32 rounding through two blocks, on logits of size 1


def info(config: TrainerConfig, mesh: Mesh) -> CheckpointInfo:
    return CheckpointInfo(
        mesh.degrees(), {**facts_of_card(config), "precision.dtype": config.precision.dtype}
    )


def loss_of_each(engine: Engine, tokens: Tensor) -> list[float]:
    pairs = [(sample[:-1].unsqueeze(0), sample[1:].unsqueeze(0)) for sample in tokens]
    return [found.loss for found in engine.measure_each(iter(pairs), len(pairs))]


def train_and_save(config: TrainerConfig, folder: Path, tokens: Tensor) -> list[float]:
    """A few steps, a save; the losses of single samples, by which logits are seen on every
    topology.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    for step in range(STEP):
        engine.set_learning_rate(1e-2)
        engine.train_step(batches(config, mesh, step, 8), 8)
    store.save(
        NewCheckpoint(
            folder, STEP, Extras(EXTRAS.cursor, randomness.capture()), info(config, mesh)
        ),
        engine.sharded_state(),
    )
    losses = loss_of_each(engine, tokens)
    engine.close()
    return losses


def load_and_look(
    config: TrainerConfig, folder: Path, step: int, tokens: Tensor
) -> tuple[list[float], Tensor | None]:
    """Losses of single samples and, where one process holds the model, the logits; then a step of
    training.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    state = engine.sharded_state()
    loaded = store.load(folder, step, state, info(config, mesh))
    engine.finish_load(replace(state, optimizer_step=loaded.optimizer_step))
    losses = loss_of_each(engine, tokens)
    logits = None
    if mesh.world_size == 1:
        module = engine._pipeline.module.eval()
        with torch.no_grad():
            parameters = dict(engine.named_parameters())
            head = parameters.get("head.weight", parameters["embedding.word.weight"])
            logits = module(tokens[:, :-1]) @ head.t()
    result = engine.train_step(batches(config, mesh, 7, 8), 8)
    assert math.isfinite(result.loss) and not result.skipped
    engine.close()
    return losses, logits


def their_losses(logits: Tensor, tokens: Tensor) -> list[float]:
    return [
        functional.cross_entropy(row.float(), sample[1:]).item()
        for row, sample in zip(logits, tokens, strict=True)
    ]


def require_theirs(
    looks: Iterable[tuple[list[float], Tensor | None]], model: torch.nn.Module, tokens: Tensor
) -> None:
    """What each rank's `load_and_look` gave equals the logits and losses of transformers' model
    within the bounds.
    """
    with torch.no_grad():
        theirs = model(tokens[:, :-1]).logits
    assert theirs.abs().max() > 1.0
    for losses, logits in looks:
        torch.testing.assert_close(losses, their_losses(theirs, tokens), atol=TOLERANCE, rtol=0)
        if logits is not None:
            torch.testing.assert_close(logits, theirs, atol=TOLERANCE, rtol=0)
