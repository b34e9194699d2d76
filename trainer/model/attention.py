"""Causal self-attention with heads cut over tensor ranks; ALiBi or no bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import ModelSection
from trainer.mesh import Mesh
from trainer.model.initial import output_projection_std
from trainer.model.layers import ColumnParallelLinear, RowParallelLinear
from trainer.model.matmul import compute_dtype
from trainer.model.random import tensor_region


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head (Press et al. 2022; as in BLOOM).

    For a power of two n they are 2^(-8/n), its square, its cube ...; otherwise the slopes of the largest power below n,
    followed by every second slope of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = _geometric(power)
    if power < heads:
        slopes += _geometric(2 * power)[::2][: heads - power]
    return slopes


def _geometric(heads: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / heads)
    return [ratio ** (index + 1) for index in range(heads)]


class AttentionBias:
    """The additive mask of all blocks of one worker: causal, plus ALiBi's slope x distance for its heads.

    Written as the distance to the query (0 on the diagonal, negative behind it), which equals slope x position under
    the softmax and stays exact in bf16 where it matters. Made once per sequence length and shared by all blocks.
    """

    def __init__(self, heads: int, mesh: Mesh):
        local = heads // mesh.tensor
        first = mesh.tensor_rank * local
        self.slopes = torch.tensor(alibi_slopes(heads)[first : first + local], dtype=torch.float32, device=mesh.device)
        self.made: dict[tuple[int, torch.dtype], Tensor] = {}

    def get(self, length: int, dtype: torch.dtype) -> Tensor:
        """[1, heads of this worker, length, length] of `dtype`."""
        found = self.made.get((length, dtype))
        if found is None:
            position = torch.arange(length, device=self.slopes.device)
            distance = (position[None, :] - position[:, None]).to(torch.float32)
            bias = self.slopes[:, None, None] * distance
            bias.masked_fill_(distance > 0, -math.inf)
            found = self.made[(length, dtype)] = bias.to(dtype).unsqueeze(0)
        return found


class SelfAttention(nn.Module):
    """Query, key and value in one projection: rows [heads, 3, head size], so a slice of rows is whole heads."""

    def __init__(self, model: ModelSection, mesh: Mesh, bias: AttentionBias | None):
        super().__init__()
        size = model.hidden_size
        self.mesh = mesh
        self.bias = bias
        self.head_size = model.head_size
        self.dropout = model.attention_dropout
        self.query_key_value = ColumnParallelLinear(size, 3 * size, model.init_std, mesh)
        self.dense = RowParallelLinear(size, size, output_projection_std(model.init_std, model.layers), mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        fused = self.query_key_value(hidden)
        batch, length, _ = fused.shape
        heads = fused.view(batch, length, -1, 3, self.head_size).permute(3, 0, 2, 1, 4)
        query, key, value = heads.unbind(0)
        mask = None if self.bias is None else self.bias.get(length, compute_dtype(query))
        if self.training and self.dropout > 0.0:
            with tensor_region(self.mesh):
                mixed = self._attend(query, key, value, mask, self.dropout)
        else:
            mixed = self._attend(query, key, value, mask, 0.0)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, -1))

    @staticmethod
    def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        wide = compute_dtype(query)
        mixed = functional.scaled_dot_product_attention(
            query.to(wide), key.to(wide), value.to(wide), attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return mixed.to(query.dtype)
