"""What the backward pass of each block computes again, from the card alone. Free of torch.

Recomputed blocks are dealt evenly over the model, so that stages of equal length differ by one at most and a card means
the same on every shape of the pipeline.
"""

from __future__ import annotations

from typing import Literal

from trainer.config.model import ModelSection

Recomputed = Literal["nothing", "attention", "block"]


def recomputed_part(model: ModelSection, block: int) -> Recomputed:
    """What of block `block`, counted from 0 over the whole model."""
    if block * recomputed_blocks(model) % model.layers >= recomputed_blocks(model):
        return "nothing"
    return "attention" if model.recompute_granularity == "selective" else "block"


def recomputed_blocks(model: ModelSection) -> int:
    """Blocks of the whole model that are recomputed, wholly or in part."""
    if not model.activation_checkpointing:
        return 0
    return model.layers if model.recompute_blocks is None else model.recompute_blocks


def recomputed_between(model: ModelSection, first: int, count: int) -> int:
    """How many of the `count` blocks from `first` on are recomputed."""
    return _recomputed_before(model, first + count) - _recomputed_before(model, first)


def _recomputed_before(model: ModelSection, block: int) -> int:
    chosen = recomputed_blocks(model)
    return (block - 1) * chosen // model.layers + 1 if block and chosen else 0
