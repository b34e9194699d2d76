"""What a card may not say of a family's models. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.card import Problem, TrainerConfig
from trainer.config.stage_units import units_of


def family_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Of a BERT: keys that mean something for a GPT alone."""
    model = config.model
    if model.family != "bert":
        return
    if model.position_embedding != "absolute":
        rule = f'has no meaning with model.family = "{model.family}": its positions are learned'
        yield Problem("model.position_embedding", model.position_embedding, rule, 'use "absolute"')
    if model.embedding_layernorm:
        rule = f'is not a part of model.family = "{model.family}"'
        yield Problem("model.embedding_layernorm", True, rule, "leave it out")
    if config.parallel.pipeline > 1 and units_of(config.parallel.partition) is None:
        rule = f'may part what model.family = "{model.family}" has at its end'
        yield Problem("parallel.partition", config.parallel.partition, rule, "use type:transformer|embedding")
    if config.checkpoint.format == "deepspeed":
        rule = f'has no place for the tensors of model.family = "{model.family}"'
        yield Problem("checkpoint.format", "deepspeed", rule, 'use "tr11"')
