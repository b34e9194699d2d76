"""Which optimizer a card asks for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainer.config.card import OptimizerSection
from trainer.optim.adam8bit import Adam8bit
from trainer.optim.adamw import AdamW
from trainer.optim.interface import TrainingOptimizer
from trainer.optim.lamb import FLOOR, Lamb, LambRules, NormOf
from trainer.optim.layer_noise import LayerNoiseLamb
from trainer.parallel.mesh import Mesh


def build_optimizer(
    groups: list[dict[str, Any]],
    section: OptimizerSection,
    learning_rate: float,
    embeddings: Collection[str],
    mesh: Mesh,
) -> TrainingOptimizer:
    """The optimizer of `section` over `groups`. `embeddings`: names of weights whose moments are never in 8 bits.

    They are also those that the last stage holds copies of.
    """
    betas = (section.beta1, section.beta2)
    if section.type == "adam8bit":
        return Adam8bit(groups, learning_rate, betas, epsilon=section.epsilon, in_full=embeddings)
    if section.type == "lamb":
        tied_copies = () if mesh.is_first_stage else embeddings
        kind = LayerNoiseLamb if section.lamb_variant == "layer-noise" else Lamb
        return kind(groups, learning_rate, betas, section.epsilon, lamb_rules(section), mesh, tied_copies)
    return AdamW(groups, learning_rate, betas, section.epsilon)


def lamb_rules(section: OptimizerSection) -> LambRules:
    """What a card's variant of LAMB means."""
    variant, norm_of = section.lamb_variant, NormOf(section.lamb_norms)
    if variant == "embedding-lr":
        return LambRules(floor=FLOOR, corrects_mean=False, embedding_alpha=section.embedding_alpha, norm_of=norm_of)
    floor = FLOOR if variant in {"floored", "layer-noise"} else 0.0
    return LambRules(adapts_all=variant != "apex", floor=floor, norm_of=norm_of)
