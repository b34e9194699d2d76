"""The output projection and its cross-entropy as one step, in pieces, never holding all logits in fp32.

The projection's weight is the tied word embedding, its rows cut over tensor ranks. For each piece of tokens: logits,
soft-max statistics (one small exchange between tensor ranks), loss, and at once the gradients of the hidden states
and of the weight, so that nothing is recomputed in the backward pass. The gradients of the loss wait until the
backward pass asks for them. They are those of the sum of all tokens' losses: the mean's divisor and the loss scale of
fp16 are one factor in fp32 there. Divided before, a probability below 1.2e-4 (of 2048 tokens) would be zero in fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.mesh import Mesh
from trainer.model.comm import copy_to_tensor_region, gather_sequence
from trainer.model.documents import Stream, hidden_of
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.matmul import compute_dtype
from trainer.model.pieces import PIECE_ELEMENTS, SOFTMAX_ELEMENTS


@dataclass
class _Slot:
    """Carries the weight's gradient from the loss, which computes it, to the projection, which owns the weight."""

    gradient: Tensor | None = None


@dataclass(frozen=True)
class _Rows:
    """The rows of the vocabulary on this worker."""

    first: int
    group: ProcessGroup | None


class LanguageModelHead:
    """The last two steps of the model: `attach` is the layer on the pipeline's last stage, `loss` its loss function.

    They are two because the pipeline engine hands out labels only after the last layer. The engine also clears
    gradients at the moment the layer's output receives its own, hence the weight must get its gradient after
    that output: `attach` takes the weight into the graph below it.
    """

    def __init__(self, mesh: Mesh):
        self.group = mesh.tensor_group
        self._enter = gather_sequence if mesh.sequence_parallel else copy_to_tensor_region
        self._pending: tuple[VocabularyParallelEmbedding, _Slot] | None = None

    def attach(self, embedding: VocabularyParallelEmbedding, stream: Stream) -> Tensor:
        """Final hidden states [batch, sequence, features] -> the same, with the projection's weight attached.

        With sequence parallelism this rank's stretch comes in, and the whole sequence goes out.
        """
        slot = _Slot()
        self._pending = (embedding, slot)
        hidden, _ = hidden_of(stream)
        return _Attach.apply(self._enter(hidden, self.group), embedding.weight, slot)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the labels [batch, sequence]; an fp32 scalar, the same on all tensor ranks.

        Labels below zero do not count, neither in the sum nor in the number it is divided by (so each micro batch is
        a mean of its own, as in Megatron); where none counts the loss is zero.
        Raises RuntimeError unless `attach` made `hidden` just before.
        """
        if self._pending is None:
            raise RuntimeError("loss() needs hidden states that attach() has just prepared")
        (embedding, slot), self._pending = self._pending, None
        rows = _Rows(embedding.first_row, self.group)
        flat = hidden.reshape(-1, hidden.shape[-1])
        wanted = labels.reshape(-1)
        weight = embedding.weight.detach().to(compute_dtype(flat))
        counted = (wanted >= 0).sum().clamp(min=1).float()
        if torch.is_grad_enabled() and flat.requires_grad:
            return _ProjectionLoss.apply(flat, weight, wanted, counted, (rows, slot))
        return _cross_entropy(flat.to(weight.dtype), weight, wanted, rows, None) / counted


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight_gradient, ctx.slot.gradient = ctx.slot.gradient, None
        return gradient, weight_gradient, None


class _ProjectionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, place: tuple[_Rows, _Slot]
    ) -> Tensor:
        rows, ctx.slot = place
        wide = hidden.to(weight.dtype)
        to_weight = torch.zeros_like(weight, dtype=torch.float32)
        ctx.gradients, ctx.dtype, ctx.counted = (torch.empty_like(wide), to_weight), hidden.dtype, counted
        return _cross_entropy(wide, weight, labels, rows, ctx.gradients) / counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (to_hidden, to_weight), ctx.gradients = ctx.gradients, None
        factor = gradient / ctx.counted
        ctx.slot.gradient = to_weight.mul_(factor).to(ctx.dtype)
        return to_hidden.float().mul_(factor).to(ctx.dtype), None, None, None, None


@torch.no_grad()
def _cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: _Rows, gradients: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Sum of the tokens' losses; its gradients with respect to `hidden` and `weight` when given room for them.

    The weight's is added to what is there, in fp32.
    """
    tokens, kind = hidden.shape[0], hidden.device.type
    height = min(tokens, max(1, PIECE_ELEMENTS[kind] // weight.shape[0]))
    counts = labels >= 0
    shares = counts.float().unsqueeze(1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    room = hidden.new_empty(height, weight.shape[0])
    for begin in range(0, tokens, height):
        part = slice(begin, begin + height)
        logits = torch.mm(hidden[part], weight.t(), out=room[: min(height, tokens - begin)])
        losses = _softmax_losses(logits, labels[part], rows, shares[part] if gradients is not None else None)
        total += losses.masked_fill_(~counts[part], 0.0).sum()
        if gradients is not None:
            torch.mm(logits, weight, out=gradients[0][part])
            _add_product(gradients[1], logits.t(), hidden[part])
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left x right to `total` (fp32). A product in fp16 is not rounded to fp16, where a sum of tokens overflows."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.dtype == torch.bfloat16:
        total += left @ right
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float(), right.float())


def _softmax_losses(logits: Tensor, labels: Tensor, rows: _Rows, shares: Tensor | None) -> Tensor:
    """Per-token losses (fp32) of a piece's logits; those are overwritten, by their gradient if `shares` is given.

    `shares` [tokens, 1]: 1 for a token whose loss counts, else 0.
    """
    count, width = logits.shape
    local = labels - rows.first
    here = (local >= 0) & (local < width)
    local = local.masked_fill(~here, 0).unsqueeze(1)
    target = logits.gather(1, local).squeeze(1).float().masked_fill(~here, 0.0)
    top = torch.empty(count, 1, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(top)
    step = max(1, SOFTMAX_ELEMENTS[logits.device.type] // width)
    for begin in range(0, count, step):
        part = slice(begin, begin + step)
        values = logits[part].float()
        torch.amax(values, dim=1, keepdim=True, out=top[part])
        torch.sum(values.sub_(top[part]).exp_(), dim=1, keepdim=True, out=total[part])
        if rows.group is None and shares is not None:
            values.mul_(shares[part] / total[part]).scatter_add_(1, local[part], -shares[part])
        if shares is not None and values.dtype != logits.dtype:
            logits[part] = values
    if rows.group is None:
        return (top + total.log()).squeeze(1) - target
    normaliser, target = _exchange(top + total.log(), target, rows.group)
    if shares is not None:
        minus = (-shares).masked_fill(~here.unsqueeze(1), 0.0)
        logits.mul_((top - normaliser).exp_() * shares).scatter_add_(1, local, minus.to(logits.dtype))
    return normaliser.squeeze(1) - target


def _exchange(normaliser: Tensor, target: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Join the tensor ranks' log-sum-exps [tokens, 1] and label logits [tokens] (zero where elsewhere)."""
    mine = torch.cat((normaliser, target.unsqueeze(1)), dim=1)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    joined = torch.stack(all_ranks)
    return joined[..., 0].logsumexp(dim=0).unsqueeze(1), joined[..., 1].sum(dim=0)
