"""Which optimizer a card asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from msgspec.structs import replace
from torch import nn

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
    """The optimizer of `section` over `groups`. `embeddings`: names of weights whose moments are
    never in 8 bits.

    They are also those that the last stage holds copies of.
    """
    betas = (section.beta1, section.beta2)
    if section.type == "adam8bit":
        return Adam8bit(groups, learning_rate, betas, epsilon=section.epsilon, in_full=embeddings)
    if section.type == "lamb":
        tied_copies = () if mesh.is_first_stage else embeddings
        kind = LayerNoiseLamb if section.lamb_variant == "layer-noise" else Lamb
        return kind(
            groups, learning_rate, betas, section.epsilon, lamb_rules(section), mesh, tied_copies
        )
    return AdamW(groups, learning_rate, betas, section.epsilon)


VARIANTS = {
    "paper": LambRules(),
    "apex": LambRules(adapts_all=False),
    "floored": LambRules(floor=FLOOR),
    "embedding-lr": LambRules(floor=FLOOR, corrects_mean=False),
    "layer-noise": LambRules(floor=FLOOR),
}


def lamb_rules(section: OptimizerSection) -> LambRules:
    """What a card's variant of LAMB means."""
    rules = replace(VARIANTS[section.lamb_variant], norm_of=NormOf(section.lamb_norms))
    if section.lamb_variant == "embedding-lr":
        return replace(rules, embedding_alpha=section.embedding_alpha)
    return rules


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
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
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
