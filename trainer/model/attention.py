"""Causal self-attention with heads cut over tensor ranks."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config.card import ModelSection
from trainer.model.initial import output_projection_std
from trainer.model.kernels import Kernel
from trainer.model.layers import ColumnParallelLinear, RowParallelLinear
from trainer.model.positions import Rotary
from trainer.model.random import tensor_region
from trainer.parallel.mesh import Mesh


class SelfAttention(nn.Module):
    """Query, key and value in one projection: rows [heads, 3, head size], so a slice of rows is whole heads.

    `kernel` and `rotary` (None unless positions are rotary) are shared by all blocks of a worker. `recompute`: what
    lies between the two projections is computed again in the backward pass, which keeps the first one's result alone.
    `in_float8`: the projections multiply in 8-bit floats.
    """

    def __init__(
        self,
        model: ModelSection,
        mesh: Mesh,
        kernel: Kernel,
        rotary: Rotary | None,
        recompute: bool = False,
        in_float8: bool = False,
    ):
        super().__init__()
        width = model.attention_heads * model.head_size
        self.mesh = mesh
        self.kernel = kernel
        self.rotary = rotary
        self.head_size = model.head_size
        self.dropout = model.attention_dropout
        self.recompute = recompute
        self.query_key_value = ColumnParallelLinear(model.hidden_size, 3 * width, model.init_std, mesh, in_float8)
        std = output_projection_std(model.init_std, model.layers)
        self.dense = RowParallelLinear(width, model.hidden_size, std, mesh, in_float8)

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        """[batch, sequence, hidden] -> the same; `documents`: document numbers [batch, sequence], when they count."""
        return self.dense(self.mix(self.query_key_value(hidden), documents))

    def mix(self, fused: Tensor, documents: Tensor | None) -> Tensor:
        """What lies between the two projections: [batch, sequence, 3 x width] -> [batch, sequence, width]."""
        mix = self._mix
        if self.recompute:
            keeps_random = self.dropout > 0.0
            mix = partial(
                checkpoint, mix, use_reentrant=False, preserve_rng_state=keeps_random, determinism_check="none"
            )
        return mix(fused, documents)

    def _mix(self, fused: Tensor, documents: Tensor | None) -> Tensor:
        """Query, key and value side by side [batch, sequence, 3 x width] -> mixed values [batch, sequence, width]."""
        batch, length, _ = fused.shape
        query, key, value = fused.view(batch, length, -1, 3, self.head_size).unbind(3)
        if self.rotary is not None:
            query, key = self.rotary.rotate(query, documents), self.rotary.rotate(key, documents)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.training and self.dropout > 0.0:
            with tensor_region(self.mesh):
                mixed = self.kernel(query, key, value, documents, self.dropout)
        else:
            mixed = self.kernel(query, key, value, documents, 0.0)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
