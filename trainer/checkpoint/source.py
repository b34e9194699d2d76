"""Where the tensors of a checkpoint come from, whatever layout it has on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.parallel.replica_check import is_finite
from trainer.parallel.state import MASTERS, MOMENT_KINDS

Part = Literal["weights", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "optimizer")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
"""Precisions of a training, under the names that a card has for them."""


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls it."""
    return str(dtype).removeprefix("torch.")


def precision_name(dtype: torch.dtype) -> str:
    """What a card calls it; of another than a card's, what torch does."""
    return next((name for name, kind in DTYPES.items() if kind == dtype), dtype_name(dtype))


class TensorFacts(Record):
    """Shape and dtype of one logical (whole) tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointFacts(Record):
    """What a checkpoint says of its run besides the tensors.

    `cursor`: the counters of the training (`iteration`, `consumed_samples`, `consumed_tokens`,
    ...). `topology`: degrees under "tensor", "pipeline", "data". `model`: facts under the card's
    keys, such as {"model.layers": 4}.
    """

    step: int
    layout: Literal["tr11", "deepspeed", "huggingface"]
    topology: Mapping[str, int]
    model: Mapping[str, Any]
    cursor: Mapping[str, Any]
    optimizer_step: int


class TensorSource(Protocol):
    """A checkpoint as logical tensors, opened by one process. Nothing large is read before `read`.

    Keys of "weights" are the logical names of the model's family (`blocks.0.mlp.up.weight`); keys
    of "optimizer" are NAME/fp32, NAME/exp_avg and NAME/exp_avg_sq, and more where the optimizer
    kept more. Shapes are those of the whole tensor, offsets count in it.
    """

    @property
    def facts(self) -> CheckpointFacts: ...

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        """All tensors of a part; empty when the checkpoint holds no such part (a weights-only
        copy).
        """

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The rectangle at `offsets` of `sizes`, in memory of its own. Raises CheckpointError,
        naming the file.
        """


def read_finite(
    source: TensorSource, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """`source.read`, for what becomes a checkpoint or a model: raises CheckpointError also for NaN
    and infinity.
    """
    values = source.read(part, key, offsets, sizes)
    if not is_finite(values):
        raise CheckpointError(
            f"{key} ({part}) holds NaN or infinity as {dtype_name(values.dtype)}: nothing is made of"
            " it; take another checkpoint, or a dtype that holds its numbers"
        )
    return values


def state_kinds(optimizer: Mapping[str, TensorFacts]) -> tuple[str, ...]:
    """What the optimizer part of a checkpoint holds of each weight: masters, moments, and what else
    it keeps.
    """
    held = {key.rpartition("/")[2] for key in optimizer}
    return tuple(kind for kind in (MASTERS, *MOMENT_KINDS) if kind in held)
