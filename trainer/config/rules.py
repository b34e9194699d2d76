"""Rules of the run card that span several keys: divisibility, stages, batches, schedule, data
shares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from trainer.config.card import (
    MOST_RAMP_LEVELS,
    BatchSection,
    Problem,
    RampSection,
    TrainerConfig,
)
from trainer.config.model import ModelSection, OptimizerSection, Units, units_of

Rule: TypeAlias = Callable[[], Iterable[Problem]]


def _width_problems(config: TrainerConfig) -> Iterator[Problem]:
    model, tensor = config.model, config.parallel.tensor
    if model.kv_channels is None and model.hidden_size % model.attention_heads:
        near = _multiples(model.hidden_size, model.attention_heads)
        rule = f"must be divisible by model.attention_heads ({model.attention_heads})"
        yield Problem("model.hidden_size", model.hidden_size, rule, f"use {near}")
    if model.attention_heads % tensor:
        rule = f"must divide model.attention_heads ({model.attention_heads})"
        yield Problem("parallel.tensor", tensor, rule, "choose a divisor of it")
    if model.attention_heads % model.groups:
        rule = f"must divide model.attention_heads ({model.attention_heads})"
        yield Problem("model.key_value_heads", model.groups, rule, "choose a divisor of it")
    elif model.attention_heads % tensor == 0 and model.groups % tensor:
        rule = (
            f"must divide model.key_value_heads ({model.groups}): each tensor rank has whole ones"
        )
        yield Problem("parallel.tensor", tensor, rule, "choose a divisor of it")
    if model.ffn % tensor:
        rule = f"must divide model.ffn_hidden_size ({model.ffn})"
        yield Problem("parallel.tensor", tensor, rule, "choose a divisor of it")
    if model.is_gated and model.linear_biases:
        rule = f'is not possible with model.activation = "{model.activation}", whose matrices have none'
        yield Problem("model.linear_biases", True, rule, "set it to false")


def _vocabulary_problems(config: TrainerConfig) -> Iterator[Problem]:
    vocabulary, tensor = config.tokenizer.padded_vocabulary_size, config.parallel.tensor
    if vocabulary % tensor:
        rule = f"must be divisible by parallel.tensor ({tensor})"
        yield Problem(
            "tokenizer.padded_vocabulary_size",
            vocabulary,
            rule,
            f"use {_multiples(vocabulary, tensor)}",
        )


def _position_problems(config: TrainerConfig) -> Iterator[Problem]:
    model = config.model
    if model.position_embedding == "rotary":
        most = model.max_position_embeddings
        if most is not None:
            yield Problem(
                "model.max_position_embeddings",
                most,
                "has no meaning with rotary positions",
                "leave it out",
            )
        if model.head_size % 2:
            rule = "must be even with rotary positions"
            yield Problem("model.kv_channels", model.head_size, rule, "use an even head size")
        yield from _stretch_problems(model)
    elif model.rotary_factor > 1.0:
        rule = f'has no meaning with model.position_embedding = "{model.position_embedding}"'
        yield Problem(
            "model.rotary_factor",
            model.rotary_factor,
            rule,
            "leave it out, or use rotary positions",
        )
    elif model.positions < model.sequence_length:
        rule = f"must be at least model.sequence_length ({model.sequence_length})"
        yield Problem(
            "model.max_position_embeddings", model.positions, rule, "raise it or leave it out"
        )


def _stretch_problems(model: ModelSection) -> Iterator[Problem]:
    length = model.rotary_original_length
    if model.rotary_factor == 1.0 and length is not None:
        rule = "has no meaning without model.rotary_factor"
        yield Problem(
            "model.rotary_original_length",
            length,
            rule,
            "leave it out, or give the factor of the stretch",
        )
    if model.rotary_factor > 1.0 and length is None:
        rule = "needs model.rotary_original_length, the length of the texts before the stretch"
        yield Problem(
            "model.rotary_factor", model.rotary_factor, rule, "set it: 8192 is Llama 3.1's"
        )
    if model.rotary_high_factor <= model.rotary_low_factor:
        rule = f"must be above model.rotary_low_factor ({model.rotary_low_factor:g})"
        yield Problem(
            "model.rotary_high_factor", model.rotary_high_factor, rule, "use Llama 3.1's 1 and 4"
        )


def _sharing_problems(config: TrainerConfig) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    if parallel.sequence_parallel and model.sequence_length % parallel.tensor:
        rule = f"must be divisible by parallel.tensor ({parallel.tensor}) with parallel.sequence_parallel"
        fix = f"use {_multiples(model.sequence_length, parallel.tensor)}"
        yield Problem("model.sequence_length", model.sequence_length, rule, fix)
    if model.partition_activations and parallel.sequence_parallel:
        rule = "is already done by parallel.sequence_parallel"
        yield Problem("model.partition_activations", True, rule, "keep one of the two")
    if model.partition_activations and not model.activation_checkpointing:
        rule = "needs model.activation_checkpointing"
        yield Problem("model.partition_activations", True, rule, "switch that on, or this off")


def _recompute_problems(config: TrainerConfig) -> Iterator[Problem]:
    model = config.model
    blocks, selective = model.recompute_blocks, model.recompute_granularity == "selective"
    needs = "needs model.activation_checkpointing"
    if blocks is not None and not model.activation_checkpointing:
        yield Problem("model.recompute_blocks", blocks, needs, "switch that on, or leave this out")
    elif blocks is not None and blocks > model.layers:
        rule = f"must be at most model.layers ({model.layers})"
        yield Problem("model.recompute_blocks", blocks, rule, "lower it, or leave it out for all")
    if selective and not model.activation_checkpointing:
        yield Problem(
            "model.recompute_granularity", "selective", needs, "switch that on, or leave this out"
        )
    if selective and model.partition_activations:
        rule = "keeps no input of a block that model.partition_activations could cut"
        yield Problem("model.recompute_granularity", "selective", rule, "keep one of the two")


def _order_problems(config: TrainerConfig) -> Iterator[Problem]:
    if config.batch.micro_batch_ramp and config.data.order == "cyclic":
        rule = "changes the order of the data with data.order = cyclic"
        yield Problem(
            "batch.micro_batch_ramp", None, rule, 'set data.order = "single", or leave it out'
        )
    if config.ordered_samples < config.batch.train_samples:
        rule = f"must be at least batch.train_samples ({config.batch.train_samples})"
        yield Problem(
            "data.order_samples", config.ordered_samples, rule, "raise it, or leave it out"
        )


def _multiples(value: int, factor: int) -> str:
    below, above = value // factor * factor, -(-value // factor) * factor
    if below:
        return f"{below} or {above}"
    return str(above)


def _stage_problems(config: TrainerConfig) -> Iterator[Problem]:
    partition, usual = config.parallel.partition, "use type:transformer|embedding"
    if not (partition in {"uniform", "parameters"} or partition.startswith("type:")):
        rule = "must be type:REGEX, uniform or parameters"
        yield Problem("parallel.partition", partition, rule, usual)
        return
    try:
        re.compile(partition)
    except (re.error, RecursionError, OverflowError) as error:
        rule = f"is not a regular expression ({error})"
        yield Problem("parallel.partition", partition, rule, usual)
        return
    counted = units_of(partition)
    if config.parallel.pipeline == 1 or counted is None:
        return
    if counted.blocks:
        yield from _unit_problems(config, counted)
    else:
        rule = "counts no transformer block, so a stage may be without one"
        yield Problem("parallel.partition", partition, rule, usual)


def _unit_problems(config: TrainerConfig, counted: Units) -> Iterator[Problem]:
    """Stages that would count more or fewer layers than others, or be without a block."""
    stages, layers, units = (
        config.parallel.pipeline,
        config.model.layers,
        counted.total(config.model.layers),
    )
    of_stages, parts = "parallel.pipeline", config.parallel.virtual_stages
    if parts > 1:
        stages, of_stages = stages * parts, f"{of_stages} x parallel.virtual_stages"
    if units % stages:
        near = [
            count
            for count in range(max(1, layers - stages), layers + stages + 1)
            if (count + units - layers) % stages == 0
        ]
        shown = " or ".join(str(count) for count in near[:2]) or "another number of layers"
        rule = f"model.layers{' + 2' if counted.ends else ''} must be divisible by {of_stages} ({stages})"
        yield Problem("model.layers", layers, rule, f"use {shown}")
    elif units // stages < 2 and counted.ends and parts > 1:
        rule = "leaves a part of a stage without a transformer block"
        yield Problem("parallel.virtual_stages", parts, rule, "use fewer parts or more layers")
    elif units // stages < 2 and counted.ends:
        rule = "leaves a stage without a transformer block"
        yield Problem("parallel.pipeline", stages, rule, "use fewer stages or more layers")


def _part_problems(config: TrainerConfig) -> Iterator[Problem]:
    """What stages of several parts do not go with."""
    parallel, parts = config.parallel, config.parallel.virtual_stages
    if parts == 1:
        return
    counted = units_of(parallel.partition)
    if parallel.pipeline == 1:
        yield Problem("parallel.virtual_stages", parts, "needs parallel.pipeline above 1", "use 1")
    elif counted is None:
        rule = f"needs a partition that counts blocks, not {parallel.partition}"
        fix = "use parallel.partition = type:transformer|embedding"
        yield Problem("parallel.virtual_stages", parts, rule, fix)
    if config.checkpoint.format == "deepspeed":
        rule = "cannot be saved with checkpoint.format = deepspeed, where a stage's layers are adjacent"
        yield Problem("parallel.virtual_stages", parts, rule, "use 1, or the other format")


def _round_problems(config: TrainerConfig, world_size: Callable[[], int]) -> Iterator[Problem]:
    """Batches too small for stages of several parts."""
    batch, stages, data_parallel = (
        config.batch,
        config.parallel.pipeline,
        _replicas(config, world_size),
    )
    if config.parallel.virtual_stages == 1 or batch_problems(batch, data_parallel):
        return
    first = "batch.ramp.start", batch.ramp.start if batch.ramp else batch.global_batch_size
    entries = [
        (f"batch.micro_batch_ramp.{number}.from_batch", entry.from_batch)
        for number, entry in enumerate(batch.micro_batch_ramp)
    ]
    for key, level in (first, *entries, ("batch.global_batch_size", batch.global_batch_size)):
        least = stages * batch.micro_batch_at(level) * data_parallel
        if level < least:
            rule = f"gives each replica fewer micro batches than stages ({stages}), for parallel.virtual_stages"
            yield Problem(
                key if batch.ramp else "batch.global_batch_size",
                level,
                rule,
                f"use {least} or more",
            )
            return


def _world_problems(config: TrainerConfig, world_size: Callable[[], int]) -> Iterator[Problem]:
    shape, workers = config.parallel.tensor * config.parallel.pipeline, world_size()
    if workers % shape:
        yield Problem(
            "parallel",
            f"tensor {config.parallel.tensor} x pipeline {config.parallel.pipeline}",
            f"the number of workers ({workers} = nodes x workers per node) must be a multiple of {shape}",
            f"use {_multiples(workers, shape)} workers, or other degrees",
        )


def _replicas(config: TrainerConfig, world_size: Callable[[], int]) -> int:
    """At least one, where the workers do not fill any: that is a problem of its own."""
    return config.data_parallel(world_size()) or 1


def _replica_problems(config: TrainerConfig, world_size: Callable[[], int]) -> list[Problem]:
    return batch_problems(config.batch, _replicas(config, world_size))


def batch_problems(batch: BatchSection, data_parallel: int) -> list[Problem]:
    """Rules of [batch] for so many replicas: each step must hold whole micro batches of each."""
    ramp, first = batch.ramp, batch.global_batch_size
    problems = list(_level_problems(batch, data_parallel))
    if ramp is not None and not problems:
        problems += _micro_batch_problems(batch, ramp, data_parallel)
    if ramp and ramp.samples:
        first = ramp.start
    if batch.train_samples < first:
        rule = f"is less than one global batch ({first})"
        problems.append(Problem("batch.train_samples", batch.train_samples, rule, "raise it"))
    return problems


def _level_problems(batch: BatchSection, data_parallel: int) -> Iterator[Problem]:
    """Levels without whole micro batches, and a ramp that does not lead to the full batch."""
    ramp, size = batch.ramp, batch.micro_batch_at(batch.global_batch_size)
    chunk = size * data_parallel
    product = f"batch.micro_batch_size x data-parallel degree ({size} x {data_parallel} = {chunk})"

    def uneven(key: str, value: int) -> Iterator[Problem]:
        if value % chunk:
            fix = f"use {_multiples(value, chunk)}"
            yield Problem(key, value, f"must be divisible by {product}", fix)

    yield from uneven("batch.global_batch_size", batch.global_batch_size)
    if ramp is None:
        return
    yield from ramp_problems(batch, ramp)
    if not batch.micro_batch_ramp:
        yield from uneven("batch.ramp.start", ramp.start)
        yield from uneven("batch.ramp.increment", ramp.increment)


def ramp_problems(batch: BatchSection, ramp: RampSection) -> Iterator[Problem]:
    """A ramp that does not lead to the full batch in whole levels."""
    growth = batch.global_batch_size - ramp.start
    if growth <= 0:
        rule = f"must be below batch.global_batch_size ({batch.global_batch_size})"
        yield Problem("batch.ramp.start", ramp.start, rule, "lower it or remove the ramp")
    elif growth % ramp.increment:
        rule = f"must divide batch.global_batch_size - batch.ramp.start ({growth})"
        yield Problem("batch.ramp.increment", ramp.increment, rule, "choose a divisor of it")
    elif growth // ramp.increment > MOST_RAMP_LEVELS:
        rule = f"gives more than {MOST_RAMP_LEVELS} levels"
        yield Problem("batch.ramp.increment", ramp.increment, rule, "raise it")


def _micro_batch_problems(
    batch: BatchSection, ramp: RampSection, data_parallel: int
) -> list[Problem]:
    """Rules of `batch.micro_batch_ramp`, where those of the batch and its ramp hold: the first that
    is broken.

    Without a ramp the full batch alone counts, so that a ramp can be switched off by itself.
    """
    key = "batch.micro_batch_ramp"
    levels = range(ramp.start, batch.global_batch_size + 1, ramp.increment)
    below, size = ramp.start, batch.micro_batch_size
    for index, entry in enumerate(batch.micro_batch_ramp):
        if entry.from_batch not in levels or entry.from_batch <= below:
            rule = f"must be a level of the ramp above {below}: {ramp.start} + n x {ramp.increment}"
            above = [(abs(level - entry.from_batch), level) for level in levels if level > below]
            if above:
                fix = f"use {min(above)[1]}"
            else:
                fix = "remove it"
            return [Problem(f"{key}.{index}.from_batch", entry.from_batch, rule, fix)]
        if entry.size <= size:
            return [
                Problem(
                    f"{key}.{index}.size",
                    entry.size,
                    f"must be larger than {size}, before it",
                    "raise it",
                )
            ]
        below, size = entry.from_batch, entry.size
    for level in levels:
        micro = batch.micro_batch_at(level)
        if level % (micro * data_parallel):
            rule = (
                f"the ramp's level {level} must be divisible by micro batch x data-parallel degree "
                f"({micro} x {data_parallel} = {micro * data_parallel})"
            )
            return [Problem(key, None, rule, "choose another batch.ramp, from_batch or size")]
    return []


_LAMB_KEYS = ("lamb_variant", "lamb_norms", "embedding_alpha")


def optimizer_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Keys of LAMB without LAMB, and of a variant without that."""
    section = config.optimizer
    defaults = {key: OptimizerSection.model_fields[key].default for key in _LAMB_KEYS}
    changed = [key for key, default in defaults.items() if getattr(section, key) != default]
    if section.type != "lamb":
        for key in changed:
            rule, fix = 'belongs to optimizer.type = "lamb"', "leave it out, or use that optimizer"
            yield Problem(f"optimizer.{key}", getattr(section, key), rule, fix)
    elif "embedding_alpha" in changed and section.lamb_variant != "embedding-lr":
        rule = 'belongs to optimizer.lamb_variant = "embedding-lr"'
        yield Problem(
            "optimizer.embedding_alpha",
            section.embedding_alpha,
            rule,
            "leave it out, or use that variant",
        )


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
    no_part = f'is not a part of model.family = "{model.family}"'
    for key, fix in _unlike_the_original(model):
        yield Problem(f"model.{key}", getattr(model, key), no_part, fix)
    if model.position_embedding != "absolute":
        rule = f'has no meaning with model.family = "{model.family}": its positions are learned'
        yield Problem("model.position_embedding", model.position_embedding, rule, 'use "absolute"')
    for key in ("embedding_layernorm", "z_loss"):
        if getattr(model, key):
            yield Problem(f"model.{key}", getattr(model, key), no_part, "leave it out")
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


OF_THE_MODEL = (
    _width_problems,
    _vocabulary_problems,
    _position_problems,
    _sharing_problems,
    _recompute_problems,
    family_problems,
    _stage_problems,
    _part_problems,
)
OF_THE_WORKERS = (_round_problems, _world_problems, _replica_problems)
OF_BATCH_AND_OPTIMIZER = (_order_problems, optimizer_problems)
