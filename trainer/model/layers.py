"""The building blocks that are cut over tensor-parallel workers, on plain tensors and explicit groups.

Activations are [batch, sequence, features]. A column-parallel layer cuts its output features, a row-parallel one its
input features, so a column layer feeds a row layer with one sum at the end (Megatron's scheme).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.mesh import Mesh
from trainer.model.comm import copy_to_tensor_region, reduce_from_tensor_region
from trainer.model.initial import ONES, ZEROS, Initial
from trainer.model.matmul import linear
from trainer.shard import Sharding, declare


def new_parameter(shape: tuple[int, ...], mesh: Mesh, dim: int | None, initial: Initial) -> nn.Parameter:
    """This worker's slice of a parameter of whole `shape`, cut along `dim` (None = replicated); values not yet set."""
    sharding = Sharding(dim, 1 if dim is None else mesh.tensor)
    tensor = torch.empty(sharding.local_shape(shape), dtype=torch.float32, device=mesh.device)
    parameter = declare(nn.Parameter(tensor), sharding)
    parameter.initial = initial  # type: ignore[attr-defined]
    return parameter


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension, replicated on all tensor ranks."""

    def __init__(self, size: int, epsilon: float, mesh: Mesh):
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = new_parameter((size,), mesh, None, ONES)
        self.bias = new_parameter((size,), mesh, None, ZEROS)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.layer_norm(hidden, self.shape, self.weight, self.bias, self.epsilon)


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut: [.., inputs] -> [.., outputs / tensor]."""

    def __init__(self, inputs: int, outputs: int, std: float, mesh: Mesh):
        super().__init__()
        self.group = mesh.tensor_group
        self.weight = new_parameter((outputs, inputs), mesh, 0, Initial(0.0, std))
        self.bias = new_parameter((outputs,), mesh, 0, ZEROS)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(copy_to_tensor_region(hidden, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut: [.., inputs / tensor] -> [.., outputs], summed over tensor ranks.

    The bias is replicated and added once, after the sum.
    """

    def __init__(self, inputs: int, outputs: int, std: float, mesh: Mesh):
        super().__init__()
        self.group = mesh.tensor_group
        self.weight = new_parameter((outputs, inputs), mesh, 1, Initial(0.0, std))
        self.bias = new_parameter((outputs,), mesh, None, ZEROS)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.group is None:
            return linear(hidden, self.weight, self.bias)
        return reduce_from_tensor_region(linear(hidden, self.weight), self.group) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Word embedding whose rows are cut: token ids [batch, sequence] -> [batch, sequence, features].

    The last stage holds a tied copy of the same weight for the output projection (see `loss.py`).
    """

    def __init__(self, vocabulary_size: int, size: int, std: float, mesh: Mesh):
        super().__init__()
        self.group = mesh.tensor_group
        self.weight = new_parameter((vocabulary_size, size), mesh, 0, Initial(0.0, std))
        self.first_row = mesh.tensor_rank * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tensor_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class LearnedPositions(nn.Module):
    """Adds a learned vector per absolute position to [batch, sequence, features]."""

    def __init__(self, positions: int, size: int, std: float, mesh: Mesh):
        super().__init__()
        self.weight = new_parameter((positions, size), mesh, None, Initial(0.0, std))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.weight[: hidden.shape[1]]


class Dropout(nn.Module):
    """Dropout on activations that all tensor ranks hold alike: they draw the same mask (see `random.py`)."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, self.probability, self.training)
