"""One transformer block: attention and MLP, each behind a norm, each added to the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.kernel_choice import Recomputed
from trainer.model.attention import AttentionContext, BlockSetup, SelfAttention
from trainer.model.compiled import uncompiled
from trainer.model.documents import Stream, hidden_of, joined
from trainer.model.layers import norm_class
from trainer.model.random import Dropout


def gated_silu(both: Tensor) -> Tensor:
    """Gate and up side by side [.., 2 x features] -> [.., features]."""
    if torch.compiler.is_compiling():  # the compiler itself finds what to keep
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up
    found: Tensor = _GatedSiLU.apply(both)
    return found


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        to_both = torch.empty_like(both)
        to_gate, to_up = to_both.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), gradient, out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return to_both


GELU_FORMS = {"gelu_tanh": "tanh", "gelu": "none"}


class MultilayerPerceptron(nn.Module):
    """hidden -> ffn -> hidden with GELU: its tanh approximation (as BLOOM was trained), or the
    exact one.

    Gated (SwiGLU; Shazeer, arXiv 2002.05202) `up` has two matrices, the gate's first: SiLU(gate) x
    up goes down.
    """

    def __init__(self, setup: BlockSetup):
        super().__init__()
        model = setup.model
        self.approximate = GELU_FORMS.get(model.activation)
        self.up = setup.column(model.ffn, matrices=2 if model.is_gated else 1)
        self.down = setup.row(model.ffn)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate(self.up(hidden)))

    def activate(self, hidden: Tensor) -> Tensor:
        """What goes to `down`, of what `up` gave."""
        if self.approximate is not None:
            return functional.gelu(hidden, approximate=self.approximate)
        return gated_silu(hidden)


class TransformerBlock(nn.Module):
    """Pre-norm block on [batch, sequence, hidden]. Its name is what `type:transformer` partitions
    by.

    `recomputed`: what the backward pass computes again; of a whole block the engine takes care.
    """

    def __init__(self, setup: BlockSetup, recomputed: Recomputed = "nothing"):
        super().__init__()
        model, mesh = setup.model, setup.mesh
        self.run = setup.compiler or uncompiled
        self.is_cut = mesh.tensor_group is not None
        self.recomputed = recomputed
        norm = norm_class(model)
        self.input_norm = norm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.attention = SelfAttention(setup, recomputed == "attention")
        self.post_attention_norm = norm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.mlp = MultilayerPerceptron(setup)
        self.attention_dropout, self.mlp_dropout = (
            Dropout(model.hidden_dropout, mesh) for _ in range(2)
        )

    def forward(self, stream: Stream) -> Stream:
        hidden, documents = hidden_of(stream)
        return joined(self._compute(hidden, self.attention.context(hidden, documents)), documents)

    def _compute(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """Where nothing is cut this is one graph; else collectives lie between the parts, and are
        not compiled.
        """
        run, attention, down = self.run, self.attention, self.mlp.down
        if not self.is_cut:
            return run(whole)(self, hidden, context)
        fused = attention.query_key_value(run(input_normed)(self, hidden))
        summed = attention.dense.exchange(run(mixed)(self, fused, context))
        hidden, normed = run(added_and_normed)(self, hidden, summed)
        summed = down.exchange(run(activated)(self, self.mlp.up(normed)))
        return run(added)(self, hidden, summed)


# The parts of a block, from one collective to the next, each with the block as its first argument.


def input_normed(block: TransformerBlock, hidden: Tensor) -> Tensor:
    normed: Tensor = block.input_norm(hidden)
    return normed


def mixed(block: TransformerBlock, fused: Tensor, context: AttentionContext) -> Tensor:
    attention = block.attention
    return attention.dense.product(attention.mix(fused, context))


def added_and_normed(
    block: TransformerBlock, hidden: Tensor, summed: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden + block.attention_dropout.apply_to(block.attention.dense.finish(summed))
    return hidden, block.post_attention_norm(hidden)


def activated(block: TransformerBlock, hidden: Tensor) -> Tensor:
    return block.mlp.down.product(block.mlp.activate(hidden))


def added(block: TransformerBlock, hidden: Tensor, summed: Tensor) -> Tensor:
    return hidden + block.mlp_dropout.apply_to(block.mlp.down.finish(summed))


def whole(block: TransformerBlock, hidden: Tensor, context: AttentionContext) -> Tensor:
    """All of them, where nothing is cut."""
    fused = block.attention.query_key_value(input_normed(block, hidden))
    hidden, normed = added_and_normed(block, hidden, mixed(block, fused, context))
    return added(block, hidden, activated(block, block.mlp.up(normed)))
