"""Which optimizer a card asks for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainer.config import OptimizerSection
from trainer.optim.adam8bit import Adam8bit
from trainer.optim.adamw import AdamW
from trainer.optim.interface import TrainingOptimizer


def build_optimizer(
    groups: list[dict[str, Any]], section: OptimizerSection, learning_rate: float, embeddings: Collection[str]
) -> TrainingOptimizer:
    """The optimizer of `section` over `groups`. `embeddings`: names of weights whose moments are never in 8 bits."""
    betas = (section.beta1, section.beta2)
    if section.type == "adam8bit":
        return Adam8bit(groups, learning_rate, betas, section.epsilon, embeddings)
    return AdamW(groups, learning_rate, betas, section.epsilon)
