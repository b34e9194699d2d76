"""Which parameters decay: weights and embeddings do, biases and LayerNorm parameters do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for torch optimizers, decayed first, each in the given order.

    Every pipeline stage must have both, because the stages add up their gradient norms group by group.
    Raises ValueError when one would be empty.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for _, parameter in named:
        (kept if parameter.dim() == 1 else decayed).append(parameter)
    if not decayed or not kept:
        raise ValueError(
            "parallel.partition: a pipeline stage has no weights or no LayerNorm and biases; every stage needs a "
            "transformer block, use type:transformer|embedding"
        )
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
