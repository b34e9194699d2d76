"""What a card may not say of a family's models. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.card import ModelSection, Problem, TrainerConfig
from trainer.config.stage_units import units_of


def family_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Of a BERT or a T5: keys that mean something for a GPT alone. Of a GPT: what the original's
    layout cannot hold.
    """
    model = config.model
    if not model.looks_ahead:
        if config.checkpoint.format == "deepspeed":
            for key, fix in _unlike_the_original(model):
                rule = 'has no place in checkpoint.format = "deepspeed", the original\'s layout'
                yield Problem(f"model.{key}", getattr(model, key), rule, f'{fix}, or use "tr11"')
        return
    for key, fix in _unlike_the_original(model):
        rule = f'is not a part of model.family = "{model.family}"'
        yield Problem(f"model.{key}", getattr(model, key), rule, fix)
    if model.position_embedding != "absolute":
        rule = f'has no meaning with model.family = "{model.family}": its positions are learned'
        yield Problem("model.position_embedding", model.position_embedding, rule, 'use "absolute"')
    if model.embedding_layernorm:
        rule = f'is not a part of model.family = "{model.family}"'
        yield Problem("model.embedding_layernorm", True, rule, "leave it out")
    if model.z_loss:
        rule = f'is not a part of model.family = "{model.family}"'
        yield Problem("model.z_loss", model.z_loss, rule, "leave it out")
    if model.has_decoder:
        yield from _decoder_problems(config)
    elif config.parallel.pipeline > 1 and units_of(config.parallel.partition) is None:
        rule = f'may part what model.family = "{model.family}" has at its end'
        yield Problem(
            "parallel.partition", config.parallel.partition, rule, "use type:transformer|embedding"
        )
    if config.checkpoint.format == "deepspeed":
        rule = f'has no place for the tensors of model.family = "{model.family}"'
        yield Problem("checkpoint.format", "deepspeed", rule, 'use "tr11"')


def _unlike_the_original(model: ModelSection) -> Iterator[tuple[str, str]]:
    """Keys that make a model unlike Megatron's of BLOOM's time, and what makes it like those again."""
    if model.norm != "layernorm":
        yield "norm", 'set it to "layernorm"'
    if model.is_gated:
        yield "activation", 'set it to "gelu"'
    if model.groups != model.attention_heads:
        yield "key_value_heads", "leave it out"
    if model.qk_norm:
        yield "qk_norm", "leave it out"
    if not model.linear_biases:
        yield "linear_biases", "leave it out"
    if not model.tied_embeddings:
        yield "tied_embeddings", "leave it out"


def _decoder_problems(config: TrainerConfig) -> Iterator[Problem]:
    """What is not there where two sequences go through the model."""
    model, parallel = config.model, config.parallel
    has_no = f'model.family = "{model.family}" has no'
    if parallel.pipeline > 1:
        yield Problem(
            "parallel.pipeline",
            parallel.pipeline,
            f"must be 1: {has_no} pipeline",
            "use tensor ranks",
        )
    if parallel.sequence_parallel:
        rule = f"cannot be: {has_no} sequence parallelism"
        yield Problem("parallel.sequence_parallel", True, rule, "leave it out")
    if config.curriculum is not None:
        rule = f"cannot be: {has_no} curriculum, which would cut off text that the decoder is to fill in"
        yield Problem("curriculum", config.curriculum.kind, rule, "leave the section out")
    if model.positions < model.decoder_sequence_length:
        rule = f"must be at least model.decoder_sequence_length ({model.decoder_sequence_length})"
        yield Problem("model.max_position_embeddings", model.positions, rule, "raise it")
