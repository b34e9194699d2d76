"""A checkpoint as a command's test needs one."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.trainer.checkpoint.synthetic import Model, Shape, state
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint


def save(folder: Path, step: int, spoil: bool = False) -> Path:
    """A real checkpoint of a small model with known values; `spoil` changes one weight."""
    shape, model = Shape(), Model()
    held = state(model, shape, 0, 7)
    if spoil:
        held.weights[2].tensor.view(-1)[3] += 1.0
    cursor = {"iteration": step, "consumed_samples": 8 * step, "consumed_tokens": 128 * step}
    extras = Extras(cursor, {"torch": torch.get_rng_state()})
    return store.save(
        NewCheckpoint(folder, step, extras, CheckpointInfo(shape.topology, {})), held
    ).folder
