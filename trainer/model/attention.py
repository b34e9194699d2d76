"""Attention with heads cut over tensor ranks: of a sequence to itself, and of a decoder to an
encoder's result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config.card import ModelSection
from trainer.contract.record import Record
from trainer.model.compiled import Compiler
from trainer.model.initial import output_projection_std
from trainer.model.kernels import Kernel, drops_by_place
from trainer.model.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from trainer.model.positions import Rotary
from trainer.model.random import Drop, Dropout
from trainer.parallel.mesh import Mesh


class AttentionContext(NamedTuple):
    """What the blocks of a worker share in a micro batch: the kernel's mask; cosines and sines of
    rotary positions.
    """

    mask: Any
    angles: tuple[Tensor, Tensor] | None = None


class BlockSetup(Record):
    """What all blocks of a worker are made of, and share.

    `rotary`: None unless positions are rotary. `compiler`: what compiles the parts of a block; None
    leaves them as they are. `in_float8`: the linear layers multiply in 8-bit floats.
    """

    model: ModelSection
    mesh: Mesh
    kernel: Kernel
    rotary: Rotary | None = None
    compiler: Compiler | None = None
    in_float8: bool = False

    def column(self, outputs: int, matrices: int = 1) -> ColumnParallelLinear:
        """A projection out of the residual stream."""
        return ColumnParallelLinear(
            self.model.hidden_size,
            outputs,
            std=self.model.init_std,
            mesh=self.mesh,
            in_float8=self.in_float8,
            has_bias=self.model.linear_biases,
            matrices=matrices,
        )

    def row(self, inputs: int) -> RowParallelLinear:
        """A projection that writes into the residual stream."""
        return RowParallelLinear(
            inputs,
            self.model.hidden_size,
            std=output_projection_std(self.model.init_std, self.model.layers),
            mesh=self.mesh,
            in_float8=self.in_float8,
            has_bias=self.model.linear_biases,
        )


class _Attention(nn.Module):
    """What both kinds share: the inner part, between the projections.

    `recompute`: it is computed again in the backward pass, which keeps the first projections'
    results alone.
    """

    def __init__(self, setup: BlockSetup, kernel: Kernel, recompute: bool):
        super().__init__()
        model = setup.model
        self.mesh = mesh = setup.mesh
        self.kernel = kernel
        self.head_size = model.head_size
        # `draws`: the kernel drops by itself, from the generators
        self.place = Dropout(model.attention_dropout, mesh)
        self.draws = model.attention_dropout > 0.0 and not drops_by_place(kernel)
        self.recompute = recompute

    def _recomputed(self, mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not self.recompute:
            return mix
        return partial(
            checkpoint,
            mix,
            use_reentrant=False,
            preserve_rng_state=self.draws,
            determinism_check="none",
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any, words: Tensor | None
    ) -> Tensor:
        """Each [batch, sequence, heads, head size] -> mixed values [batch, sequence of the queries,
        width].

        Of keys and values there may be fewer heads, each for as many heads of queries that follow
        one another. `words`: those of the dropout's place, handed in since it has others by the
        time that this is computed again.
        """
        batch, length = query.shape[:2]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        drop = None
        if self.place.drops:
            assert words is not None, "a step has begun, and with it this micro batch"
            drop = Drop(self.place.probability, words, self.mesh.tensor_rank * query.shape[1])
        mixed = self.kernel(query, key, value, mask, drop)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class SelfAttention(_Attention):
    """Query, key and value in one projection: rows [groups, queries + 2, head size], a slice of
    which is whole groups.

    A group is a head of keys and values with the heads of queries that share it: one, unless the
    card says otherwise.
    """

    def __init__(self, setup: BlockSetup, recompute: bool = False):
        super().__init__(setup, setup.kernel, recompute)
        model = setup.model
        self.rotary = setup.rotary
        self.queries = model.attention_heads // model.groups  # of a group
        self.query_key_value = setup.column(model.fused_width)
        self.query_norm = self.key_norm = None
        if model.qk_norm:
            self.query_norm, self.key_norm = (
                RMSNorm(self.head_size, model.layernorm_epsilon, self.mesh, in_region=True)
                for _ in range(2)
            )
        self.dense = setup.row(model.attention_width)

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        """[batch, sequence, hidden] -> the same; `documents`: document numbers [batch, sequence],
        when they count.
        """
        return self.dense(self.mix(self.query_key_value(hidden), self.context(hidden, documents)))

    def context(self, hidden: Tensor, documents: Tensor | None) -> AttentionContext:
        """What it needs beside the hidden states of a block, of which with sequence parallelism
        this is a stretch. It comes before what the block draws, first and when computed again.
        """
        if self.draws and self.training:
            self.place.seed_generators()
        length = hidden.shape[1] * (self.mesh.tensor if self.mesh.sequence_parallel else 1)
        if self.rotary is None:
            angles = None
        else:
            angles = self.rotary.angles(length, documents)
        return AttentionContext(self.kernel.mask(hidden, length, documents), angles)

    def mix(self, fused: Tensor, context: AttentionContext) -> Tensor:
        """What lies between the two projections: what the first gave -> [batch, sequence, width]."""
        return self._recomputed(self._mix)(fused, context, self.place.words)

    def _mix(self, fused: Tensor, context: AttentionContext, words: Tensor | None) -> Tensor:
        """Query, key and value side by side -> mixed values [batch, sequence, width]."""
        batch, length, _ = fused.shape
        queries, key, value = fused.view(batch, length, -1, self.queries + 2, self.head_size).split(
            (self.queries, 1, 1), dim=3
        )
        query, key, value = queries.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None and context.angles is not None:
            query, key = self.rotary.rotate(query, key, *context.angles)
        return self._attend(query, key, value, mask=context.mask, words=words)


class CrossAttention(_Attention):
    """Queries of one sequence, keys and values of another: rows [heads, head size], and [heads, 2,
    head size].
    """

    def __init__(self, setup: BlockSetup, kernel: Kernel, recompute: bool):
        super().__init__(setup, kernel, recompute)
        width = setup.model.attention_width
        self.query, self.key_value = setup.column(width), setup.column(2 * width)
        self.dense = setup.row(width)

    def mix(self, query: Tensor, key_value: Tensor, mask: Any) -> Tensor:
        """What lies between the projections: [batch, own sequence, width] and [batch, other
        sequence, 2 x width] -> [batch, own sequence, width]. `mask`: the kernel's, of the other
        sequence.
        """
        return self._recomputed(self._mix)(query, key_value, mask, self.place.words)

    def _mix(self, query: Tensor, key_value: Tensor, mask: Any, words: Tensor | None) -> Tensor:
        batch, length, _ = key_value.shape
        key, value = key_value.view(batch, length, -1, 2, self.head_size).unbind(3)
        query = query.view(batch, query.shape[1], -1, self.head_size)
        return self._attend(query, key, value, mask=mask, words=words)
