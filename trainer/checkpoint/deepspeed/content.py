"""What the files of the original layout hold besides tensors, and how a stage's parameters are
dealt to flat groups.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.deepspeed.layout import OWN_KEY
from trainer.checkpoint.deepspeed.partition import (
    FlatFragment,
    padding_elements,
    partition_elements,
)
from trainer.checkpoint.publishing import CheckpointInfo, NewCheckpoint
from trainer.contract.record import Record
from trainer.parallel.state import MASTERS

CHECKPOINT_VERSION = 3.0  # Megatron's: query, key and value rows in the order of heads
_ZERO_STAGE = 1
_UNIVERSAL_VERSION = 0.2


class Degrees(Record):
    """Degrees of parallelism of a checkpoint."""

    tensor: int
    pipeline: int
    data: int

    @classmethod
    def of(cls, topology: Mapping[str, int]) -> Degrees:
        """From a manifest's topology; a degree that it does not name is 1."""
        return cls(topology.get("tensor", 1), topology.get("pipeline", 1), topology.get("data", 1))

    @property
    def model(self) -> int:
        return self.tensor * self.pipeline


class OptimizerSettings(Record):
    """What the original keeps with its parameter groups. A DeepSpeed engine that loads the groups
    takes these over.
    """

    learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0

    @classmethod
    def of(cls, options: Sequence[Mapping[str, Any]]) -> OptimizerSettings:
        """From the options of a checkpoint's parameter groups (`DeepSpeedSource.group_options`)."""
        if not options:
            return cls()
        first = options[0]
        default = cls()
        beta1, beta2 = first.get("betas", (default.beta1, default.beta2))
        return cls(
            learning_rate=float(first.get("lr", default.learning_rate)),
            beta1=float(beta1),
            beta2=float(beta2),
            epsilon=float(first.get("eps", default.epsilon)),
            weight_decay=max(float(option.get("weight_decay", 0.0)) for option in options),
            clip_grad=float(first.get("clip_grad", default.clip_grad)),
        )


class StageParameter(Record):
    """A parameter of one tensor rank on a stage: our name, the original's in its pipeline module,
    local shape.

    `idle`: a copy that takes no part in the training (of the embedding's LayerNorm and positions,
    beside the head).
    """

    name: str
    module_name: str
    shape: tuple[int, ...]
    idle: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def flat_groups(parameters: Iterable[StageParameter]) -> list[list[StageParameter]]:
    """The optimizer's groups of a stage: what decays (matrices), then what does not (LayerNorms and
    biases).
    """
    listed = list(parameters)
    return [
        [item for item in listed if len(item.shape) > 1],
        [item for item in listed if len(item.shape) == 1],
    ]


def rank_contents(
    groups: Sequence[Sequence[StageParameter]],
    degrees: Degrees,
    new: NewCheckpoint,
    optimizer_step: int,
) -> dict[str, Any]:
    """Contents of a rank file: the engine's fields, and the client's (Megatron's) with what tr11
    keeps of its own.
    """
    cursor = new.extras.cursor
    info = new.info
    iteration = int(cursor.get("iteration", 0))
    skipped = int(cursor.get("skipped", 0))
    arguments = _arguments(degrees, cursor, info)
    vocabulary = info.model.get("tokenizer.padded_vocabulary_size")
    return {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((item.module_name, torch.Size(item.shape)) for item in group)
            for group in groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": skipped,
        "global_steps": optimizer_step + skipped,
        "global_samples": int(cursor.get("consumed_samples", 0)),
        "dp_world_size": degrees.data,
        "mp_world_size": degrees.model,
        "checkpoint_parallel_dimensions": {
            "pp_degree": degrees.pipeline,
            "tp_degree": degrees.tensor,
        },
        "ds_config": {"zero_optimization": {"stage": _ZERO_STAGE}},
        "ds_version": metadata.version("deepspeed"),
        "args": arguments,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "tokens": int(cursor.get("consumed_tokens", 0)),
        "checkpoint_info": {"padded_vocab_size": vocabulary, "original_vocab_size": vocabulary},
        "universal_checkpoint_info": _universal_info(groups, vocabulary),
        OWN_KEY: {"cursor": dict(cursor), "model": dict(info.model)},
    }


def _universal_info(groups: Sequence[Sequence[StageParameter]], vocabulary: Any) -> dict[str, Any]:
    """By which rule DeepSpeed's universal converter joins tensor slices: regular expressions on
    module names.

    It refuses one that fits no parameter of the model, and reads the first rank's.
    """
    embedding_norm = any(".norm." in item.module_name for group in groups for item in group)
    positions = any("position_embeddings" in item.module_name for group in groups for item in group)
    replicated = [
        r".*layernorm\.(weight|bias)",
        r".*\.(dense|dense_4h_to_h)\.bias",
        r"\d+\.(weight|bias)",
    ]
    replicated += [r".*word_embeddings\.norm\.(weight|bias)"] * embedding_norm
    replicated += [r".*position_embeddings\.weight"] * positions
    return {
        "universal_checkpoint_version": _UNIVERSAL_VERSION,
        "original_vocab_size": vocabulary,
        "vocabulary_parameter_patterns": [r".*word_embeddings\.weight"],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\..*"],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": [
            r".*\.self_attention\.dense\.weight",
            r".*\.dense_4h_to_h\.weight",
        ],
    }


def _arguments(
    degrees: Degrees, cursor: Mapping[str, Any], info: CheckpointInfo
) -> argparse.Namespace:
    """The part of Megatron's arguments that its loader and its converters look at, as far as the
    facts tell.
    """
    names = {
        "num_layers": "model.layers",
        "hidden_size": "model.hidden_size",
        "ffn_hidden_size": "model.ffn_hidden_size",
        "num_attention_heads": "model.attention_heads",
        "position_embedding_type": "model.position_embedding",
        "embed_layernorm": "model.embedding_layernorm",
        "max_position_embeddings": "model.max_position_embeddings",
        "padded_vocab_size": "tokenizer.padded_vocabulary_size",
    }
    known = {theirs: info.model[ours] for theirs, ours in names.items() if ours in info.model}
    dtype = info.model.get("precision.dtype")
    return argparse.Namespace(
        **known,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        data_parallel_size=degrees.data,
        iteration=int(cursor.get("iteration", 0)),
        consumed_train_samples=int(cursor.get("consumed_samples", 0)),
        consumed_valid_samples=0,
        consumed_train_tokens=int(cursor.get("consumed_tokens", 0)),
    )


class FlatGroup(Record):
    """One data rank's partition of a flat group. `kinds`: 1-D fp32 tensors of the partition's size,
    padding included.

    `total`: elements of the whole group, over all data ranks, without padding.
    """

    fragments: Sequence[FlatFragment]
    kinds: Mapping[str, Tensor]
    total: int


def empty_kinds(total: int, data: int, kinds: Sequence[str]) -> dict[str, Tensor]:
    """Zeros for one partition of a flat group of `total` elements over `data` ranks."""
    size = partition_elements(total, data)
    return {kind: torch.zeros(size) for kind in kinds}


def optimizer_contents(
    groups: Sequence[FlatGroup],
    module_names: Mapping[str, str],
    degrees: Degrees,
    data_rank: int,
    bf16: bool,
    optimizer_step: int,
    settings: OptimizerSettings,
) -> dict[str, Any]:
    """Contents of an optimizer file: BF16_Optimizer's, or ZeRO stage 1's, which keeps its masters
    without padding.

    `module_names`: our name -> the original's, for the parameters in `groups`.
    """
    fragment_address = _fragment_address()
    last = data_rank == degrees.data - 1
    sizes = [partition_elements(group.total, degrees.data) for group in groups]
    stripped = [padding_elements(group.total, degrees.data, data_rank) for group in groups]
    if bf16:
        paddings = [
            size * degrees.data - group.total if last else 0
            for size, group in zip(sizes, groups, strict=True)
        ]
        lengths = sizes
    else:
        paddings = stripped
        lengths = [size - padding for size, padding in zip(sizes, stripped, strict=True)]
    version = metadata.version("deepspeed")
    state: dict[str, Any] = {
        "clip_grad": settings.clip_grad,
        "base_optimizer_state": _base_state(groups, optimizer_step, settings),
        "single_partition_of_fp32_groups": [
            group.kinds["fp32"][:length] for group, length in zip(groups, lengths, strict=True)
        ],
        "group_paddings": paddings,
        "partition_count": [degrees.data] * len(groups),
        "ds_version": version,
        "param_slice_mappings": [
            OrderedDict(
                (module_names[item.name], fragment_address(numel=item.numel, start=item.start))
                for item in group.fragments
            )
            for group in groups
        ],
    }
    if not bf16:
        state |= {"zero_stage": _ZERO_STAGE, "overflow": False, "dynamic_loss_scale": False}
    return {
        "optimizer_state_dict": state,
        "ds_config": {"zero_optimization": {"stage": _ZERO_STAGE}},
        "ds_version": version,
    }


def _fragment_address() -> Any:
    """DeepSpeed's class of fragments, because its unpicklers look the name up. Only a writer
    imports the library.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns of what it could not find
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.utils.tensor_fragment import fragment_address
    return fragment_address


def _base_state(
    groups: Sequence[FlatGroup], step: int, settings: OptimizerSettings
) -> dict[str, Any]:
    """The state dictionary of AdamW over one flat tensor per group."""
    decays = (settings.weight_decay, 0.0)
    options = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "step": step,  # where the original's fused Adam keeps it
    }
    return {
        "state": {
            number: {
                "step": torch.tensor(float(step)),
                **{kind: values for kind, values in group.kinds.items() if kind != MASTERS},
            }
            for number, group in enumerate(groups)
        },
        "param_groups": [
            {**options, "weight_decay": decay, "params": [number]}
            for number, decay in enumerate(decays)
        ],
    }
