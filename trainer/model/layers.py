"""The building blocks that are cut over tensor-parallel workers, on plain tensors and explicit
groups.

Activations are [batch, sequence, features]. A column-parallel layer cuts its output features, a
row-parallel one its input features, so a column layer feeds a row layer with one sum at the end
(Megatron's scheme). With sequence parallelism everything between a row layer and the next column
layer holds only this rank's stretch of the sequence.

The gradient of a replicated parameter is left as a share on every tensor rank: of its own stretch
of the sequence, or else all of it on tensor rank 0 and zero elsewhere. The engine sums the shares
once per step, so copies receive the same bits whatever the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.card import ModelSection
from trainer.model.documents import (
    DocumentRules,
    Stream,
    document_numbers,
    hidden_of,
    joined,
    passes_documents,
    positions_in_documents,
)
from trainer.model.initial import ONES, ZEROS, Initial
from trainer.model.matmul import column_linear, linear
from trainer.parallel.comm import reduce_from_tensor_region, reduce_scatter_sequence, stretch
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import Sharding, declare

# Normalisation by the root mean square: x / sqrt(mean(x^2) + epsilon) x weight, in fp32, rounded
# once.
#
# GPUs have a kernel for it. Elsewhere torch would make it of parts that keep six tensors for the
# backward pass; here the input and a number of each row are kept, as by that kernel.


def root_mean_square_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension of `hidden`, in its dtype; `weight` [features]."""
    if hidden.is_cuda:
        return functional.rms_norm(hidden, weight.shape, weight, epsilon)
    found: Tensor = _RootMeanSquareNorm.apply(hidden, weight, epsilon)
    return found


class _RootMeanSquareNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden.float()
        factor = wide.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, factor)
        return (wide * factor * weight.float()).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, factor = ctx.saved_tensors
        normed, wide = hidden.float() * factor, gradient.float()
        to_weight = (wide * normed).flatten(0, -2).sum(dim=0)
        wide = wide * weight.float()
        to_hidden = factor * (wide - normed * (wide * normed).mean(dim=-1, keepdim=True))
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), None


def new_parameter(
    shape: tuple[int, ...], mesh: Mesh, dim: int | None, initial: Initial, in_region: bool = False
) -> nn.Parameter:
    """This worker's slice of a parameter of whole `shape`, cut along `dim` (None = replicated);
    values not yet set.

    `in_region`: a replicated one that works on what is cut over the tensor ranks, so that each
    rank's gradient is a share by itself.
    """
    sharding = Sharding(dim, 1 if dim is None else mesh.tensor)
    tensor = torch.empty(sharding.local_shape(shape), dtype=torch.float32, device=mesh.device)
    parameter = declare(nn.Parameter(tensor), sharding)
    parameter.initial = initial  # type: ignore[attr-defined]
    if dim is None and mesh.tensor_rank > 0 and not mesh.sequence_parallel and not in_region:
        parameter.register_hook(torch.zeros_like)
    return parameter


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension, replicated on all tensor ranks."""

    def __init__(self, size: int, epsilon: float, mesh: Mesh):
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = new_parameter((size,), mesh, None, ONES)
        self.bias = new_parameter((size,), mesh, None, ZEROS)

    @passes_documents
    def forward(self, hidden: Tensor) -> Tensor:
        return functional.layer_norm(hidden, self.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Division by the root mean square over the last dimension, replicated on all tensor ranks
    (Zhang and Sennrich, arXiv 1910.07467). `in_region`: as for `new_parameter`.
    """

    def __init__(self, size: int, epsilon: float, mesh: Mesh, in_region: bool = False):
        super().__init__()
        self.epsilon = epsilon
        self.weight = new_parameter((size,), mesh, dim=None, initial=ONES, in_region=in_region)

    @passes_documents
    def forward(self, hidden: Tensor) -> Tensor:
        return root_mean_square_norm(hidden, self.weight, self.epsilon)


Norm = LayerNorm | RMSNorm


def norm_class(model: ModelSection) -> type[Norm]:
    """That of the layers on the residual stream."""
    if model.norm == "rmsnorm":
        return RMSNorm
    return LayerNorm


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut: [batch, sequence, inputs] -> [batch, sequence,
    outputs / tensor].

    With sequence parallelism the input is this rank's stretch, the output of the whole sequence.
    `matrices`: so many of `outputs` features each are one weight [matrices, outputs, inputs], of
    which every rank has its share of each; their results stand one behind the other.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        mesh: Mesh,
        in_float8: bool = False,
        has_bias: bool = True,
        matrices: int = 1,
    ):
        super().__init__()
        self.mesh = mesh
        self.in_float8 = in_float8
        shape, dim = ((outputs, inputs), 0) if matrices == 1 else ((matrices, outputs, inputs), 1)
        self.weight = new_parameter(shape, mesh, dim, Initial(0.0, std))
        self.bias = new_parameter((outputs,), mesh, 0, ZEROS) if has_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        group, weight = self.mesh.tensor_group, self.weight.view(-1, self.weight.shape[-1])
        if group is None:
            return linear(hidden, weight, self.bias, self.in_float8)
        return column_linear(
            hidden,
            weight,
            bias=self.bias,
            group=group,
            is_cut=self.mesh.sequence_parallel,
            in_float8=self.in_float8,
        )


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut: [batch, sequence, inputs / tensor] -> [batch,
    sequence, outputs].

    The partial products are summed over tensor ranks; with sequence parallelism each keeps its
    stretch of the sum. The bias is replicated and added once, after the sum.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        mesh: Mesh,
        in_float8: bool = False,
        has_bias: bool = True,
    ):
        super().__init__()
        self.mesh = mesh
        self.is_cut = mesh.tensor_group is not None
        self.in_float8 = in_float8
        self.weight = new_parameter((outputs, inputs), mesh, 1, Initial(0.0, std))
        self.bias = new_parameter((outputs,), mesh, None, ZEROS) if has_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.finish(self.exchange(self.product(hidden)))

    def product(self, hidden: Tensor) -> Tensor:
        """This worker's part of the result, which the others' are added to; the whole result where
        it is not cut.
        """
        return linear(hidden, self.weight, None if self.is_cut else self.bias, self.in_float8)

    def exchange(self, part: Tensor) -> Tensor:
        """The sum of all parts. Collective over the tensor ranks."""
        if self.is_cut:
            return _leave_region(part, self.mesh)
        return part

    def finish(self, summed: Tensor) -> Tensor:
        """The result of the layer."""
        if self.is_cut and self.bias is not None:
            return summed + self.bias
        return summed


class VocabularyParallelEmbedding(nn.Module):
    """Word embedding whose rows are cut: token ids [batch, sequence] -> [batch, sequence,
    features].

    With `documents` the numbers of the tokens' documents follow the hidden states from here on. The
    output projection is one too (see `loss.py`): a tied copy of the same weight, or with `attach`
    one of its own, which in place of looking up hands itself and the hidden states to that.
    """

    def __init__(
        self,
        vocabulary_size: int,
        size: int,
        std: float,
        mesh: Mesh,
        documents: DocumentRules | None = None,
        attach: Callable[[VocabularyParallelEmbedding, Stream], Tensor] | None = None,
    ):
        super().__init__()
        self.mesh = mesh
        self.documents = documents
        self.attach = attach
        self.weight = new_parameter((vocabulary_size, size), mesh, 0, Initial(0.0, std))
        self.first_row = mesh.tensor_rank * self.weight.shape[0]

    def forward(self, tokens: Any) -> Stream:
        if self.attach is not None:
            return self.attach(self, tokens)
        rule = self.documents
        return joined(
            self._look_up(tokens), None if rule is None else document_numbers(tokens, rule.end_id)
        )

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self.mesh.tensor_group is None:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return _leave_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh)


def embed_marked(embedding: VocabularyParallelEmbedding, read: tuple[Tensor, Tensor]) -> Stream:
    """Tokens and their marks, both [batch, sequence] -> their vectors, and the marks again."""
    tokens, marks = read
    return joined(embedding(tokens), marks)


class LearnedPositions(nn.Module):
    """Adds a learned vector per position to [batch, sequence, features]; positions may count within
    documents.
    """

    def __init__(
        self,
        positions: int,
        size: int,
        std: float,
        mesh: Mesh,
        documents: DocumentRules | None = None,
    ):
        super().__init__()
        self.mesh = mesh
        self.documents = documents
        self.weight = new_parameter((positions, size), mesh, None, Initial(0.0, std))

    def forward(self, stream: Stream) -> Stream:
        hidden, documents = hidden_of(stream)
        group = self.mesh.tensor_group if self.mesh.sequence_parallel else None
        if group is None:
            length = hidden.shape[1]
            mine = slice(0, length)
        else:
            length = hidden.shape[1] * self.mesh.tensor
            mine = stretch(length, group)
        if documents is not None and self.documents is not None and self.documents.reset_positions:
            added = functional.embedding(positions_in_documents(documents)[:, mine], self.weight)
        else:
            added = self.weight[mine]
        return joined(hidden + added, documents)


def _leave_region(partial: Tensor, mesh: Mesh) -> Tensor:
    if mesh.sequence_parallel:
        leave = reduce_scatter_sequence
    else:
        leave = reduce_from_tensor_region
    return leave(partial, mesh.tensor_group)
