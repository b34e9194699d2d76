"""The output projection and its cross-entropy as one step, in pieces, never holding all logits in
fp32.

The projection's weight is the tied word embedding, its rows cut over tensor ranks. For each piece
of tokens: logits, soft-max (one small exchange between tensor ranks), loss, and at once the
gradients of the hidden states and of the weight, so that nothing is recomputed in the backward
pass. A piece's logits are made once and become their own gradient. The weight's gradient is summed
over pieces, so on a GPU pieces are as large as memory allows, mostly one.

Each tensor rank has the soft-max of its own words. What these weigh of all words, a token's share,
needs no pass over the logits: it scales the rows of the other factor, or of the result, of each
product. (fp16 has no room for what is left at the label, so there the logits are scaled.)

The gradients of the loss wait until the backward pass asks for them. They are those of the sum of
all tokens' losses: the mean's divisor and the loss scale of fp16 are one factor in fp32 there.
Divided before, a probability below 1.2e-4 (of 2048 tokens) would be zero in fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.contract.record import Record
from trainer.model.compiled import compiles_small_parts
from trainer.model.documents import Stream, hidden_of
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.matmul import compute_dtype
from trainer.parallel.comm import copy_to_tensor_region, gather_sequence
from trainer.parallel.mesh import Mesh
from trainer.parallel.widened import add_widened
from trainer.schedule.flops import PIECE_ELEMENTS, SOFTMAX_ELEMENTS, WIDENED_ELEMENTS

# The soft-max of logits where they lie, strip by strip, by the fastest way that their device has.
#
# On a GPU one compiled kernel reads the logits and writes their soft-max over them: in bf16 at most
# 8 bytes a logit, of which the cache saves half, where torch's own operations move 20 and hold
# strips in fp32. It is compiled for strips of one height; a shorter one is computed with rows that
# no one looks at. So a row's numbers depend on nothing else, neither on the number of tokens nor on
# the lengths that a run has seen before. A node without a compiler takes torch's own.


class Softmax(Record):
    """`soften(values, local, target, room, replaces)`: log-sum-exps [tokens, 1] of a strip [tokens,
    words], which is lost; its soft-max `replaces` it or not. `target`: the strip's numbers at
    `local`, both [tokens, 1].

    `room`: fp32, of the strip's size, where it `needs_room`. `whole_strips`: all strips are of full
    height.
    """

    soften: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
    needs_room: bool = True
    whole_strips: bool = False

    def rows(self, count: int, width: int, kind: str) -> int:
        """Rows of memory that `count` rows of logits need."""
        if self.whole_strips:
            return _up_to(count, _strip_height(kind, width))
        return count

    def softened(self, logits: Tensor, local: Tensor, target: Tensor, replaces: bool) -> Tensor:
        """Log-sum-exps [count, 1] of the first `count` rows of `logits`, which has as many `rows`
        as they need.
        """
        count, width = len(local), logits.shape[1]
        step = _strip_height(logits.device.type, width)
        if not self.whole_strips:
            step = min(step, count)
        found = torch.empty_like(target)
        room = torch.empty(
            step if self.needs_room else 0, width, dtype=torch.float32, device=logits.device
        )
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            if self.whole_strips:
                values = logits[begin : begin + step]
            else:
                values = logits[part]
            sums = self.soften(values, local[part], target[part], room[: len(values)], replaces)
            found[part] = sums[: part.stop - begin]
        return found


def _strip_height(kind: str, width: int) -> int:
    return max(1, SOFTMAX_ELEMENTS[kind] // width)


def _up_to(count: int, height: int) -> int:
    return -(-count // height) * height


@cache
def softmax_for(device: torch.device) -> Softmax:
    """The way that is taken on a device. The machine is asked for a compiler once, not at each
    micro batch: that looks through all of PATH.
    """
    if device.type == "cpu":
        return IN_CACHE
    if compiles_small_parts(device):
        return COMPILED
    return FUSED


def _soften_in_cache(
    values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool
) -> Tensor:
    """On a CPU an exponential costs more than a pass over a strip in cache."""
    if values.dtype == room.dtype:
        wide = values
    else:
        wide = room.copy_(values)
    top = torch.amax(wide, dim=1, keepdim=True)
    total = wide.sub_(top).exp_().sum(dim=1, keepdim=True)
    if replaces:
        wide.mul_(total.reciprocal())
        if wide is not values:
            values.copy_(wide)
    return top + total.log()


def _soften_fused(
    values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool
) -> Tensor:
    """The same in half the bytes: two exponentials a number."""
    logarithms = torch.log_softmax(values.float(), 1, out=room)
    normaliser = target - logarithms.gather(1, local)
    if replaces:
        torch.exp(logarithms, out=values)
    return normaliser


def soften_at_once(values: Tensor, replaces: bool) -> Tensor:
    """The same as arithmetic, of which one kernel is made."""
    wide = values.float()
    top = wide.amax(dim=1, keepdim=True)
    total = (wide - top).exp().sum(dim=1, keepdim=True)
    if replaces:
        values.copy_((wide - top).exp() * total.reciprocal())
    return top + total.log()


@cache
def compiled_softening() -> Any:
    """`soften_at_once`, compiled for each width, dtype and use at the first strip of it."""
    return torch.compile(soften_at_once, fullgraph=True, dynamic=False)


def _soften_compiled(
    values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool
) -> Tensor:
    sums: Tensor = compiled_softening()(values, replaces)
    return sums


IN_CACHE, FUSED = Softmax(_soften_in_cache), Softmax(_soften_fused)
COMPILED = Softmax(_soften_compiled, needs_room=False, whole_strips=True)


LM, Z = "lm", "z"  # parts of a loss with a z-loss

# Of the label's tensor rank, so that one over it is a number. What it adds is lost beside the
# label's own gradient.
SMALLEST_SHARE = 2.0**-60


@dataclass
class Slot:
    """Carries gradients from the loss, which computes them, to the projection, below which they
    belong.

    `gradient`: the weight's. `bias`: of its bias, `order`: of logits that go past it, where a head
    has these.
    """

    gradient: Tensor | None = None
    bias: Tensor | None = None
    order: Tensor | None = None


class _Rows(Record):
    """The rows of the vocabulary on this worker. `bias`: of each of their logits, None where they
    have none. `z`: the factor of the z-loss, 0 without one.
    """

    first: int
    group: ProcessGroup | None
    bias: Tensor | None = None
    z: float = 0.0


class LanguageModelHead:
    """The last two steps of the model: `attach` is the layer on the pipeline's last stage, `loss`
    its loss function.

    They are two because the pipeline engine hands out labels only after the last layer. The engine
    also clears gradients at the moment the layer's output receives its own, hence the weight must
    get its gradient after that output: `attach` takes the weight into the graph below it.
    """

    def __init__(self, mesh: Mesh, z: float = 0.0):
        """`z`: the factor of a z-loss, which is then measured beside the cross-entropy."""
        self.group = mesh.tensor_group
        self.z = z
        if mesh.sequence_parallel:
            self._enter = gather_sequence
        else:
            self._enter = copy_to_tensor_region
        self.measured: dict[str, Tensor] = {}
        self._beside: tuple[Tensor, ...] = ()
        self._pending: tuple[VocabularyParallelEmbedding, Slot, tuple[Tensor, ...]] | None = None

    def take(self, *beside: Tensor) -> None:
        """What goes past the projection in this micro batch: a bias of this worker's words, and
        the logits of a loss of its own, where a family has these.
        """
        self._beside = beside

    def attach(self, embedding: VocabularyParallelEmbedding, stream: Stream) -> Tensor:
        """Final hidden states [batch, sequence, features] -> the same, with the projection's weight
        attached, and what goes past it.

        With sequence parallelism this rank's stretch comes in, and the whole sequence goes out.
        """
        slot = Slot()
        self._pending = embedding, slot, self._beside
        hidden, _ = hidden_of(stream)
        return Attach.apply(self._enter(hidden, self.group), embedding.weight, slot, *self._beside)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the labels [batch, sequence]; an fp32 scalar, the same on all
        tensor ranks.

        With a z-loss that of the same labels is added: z x (log of the sum of exponentials)^2, which keeps the logits
        near zero (Chowdhery et al., arXiv 2204.02311, with z = 1e-4).
        Labels below zero do not count, neither in the sum nor in the number it is divided by (so each micro batch is
        a mean of its own, as in Megatron); where none counts the loss is zero.
        Raises RuntimeError unless `attach` made `hidden` just before.
        """
        embedding, slot, beside = self.prepared()
        loss, added = projection_loss(
            hidden.reshape(-1, hidden.shape[-1]),
            embedding,
            wanted=labels.reshape(-1),
            slot=slot,
            group=self.group,
            bias=beside[0].detach() if beside else None,
            z=self.z,
        )
        if self.z:
            self.measured = {LM: loss.detach() - added, Z: added}
        return loss

    def prepared(self) -> tuple[VocabularyParallelEmbedding, Slot, tuple[Tensor, ...]]:
        """What `attach` has left for the loss of its micro batch: once."""
        if self._pending is None:
            raise RuntimeError("loss() needs hidden states that attach() has just prepared")
        pending, self._pending = self._pending, None
        return pending


def projection_loss(
    flat: Tensor,
    embedding: VocabularyParallelEmbedding,
    wanted: Tensor,
    slot: Slot,
    group: ProcessGroup | None,
    bias: Tensor | None,
    hits: Tensor | None = None,
    z: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the labels `wanted` [tokens], given hidden states `flat` [tokens,
    features], with a z-loss of factor `z`; and what of it that is.

    `bias`: of this worker's words, detached; its gradient goes to the slot beside the weight's.
    `hits`: an fp32 scalar to which the share of labels that have the largest logit is added, where
    no gradients are asked for.
    """
    weight = embedding.weight.detach().to(compute_dtype(flat))
    rows = _Rows(embedding.first_row, group, None if bias is None else bias.to(weight.dtype), z)
    counted = (wanted >= 0).sum().clamp(min=1).float()
    if torch.is_grad_enabled() and flat.requires_grad:
        return _ProjectionLoss.apply(flat, weight, wanted, counted, (rows, slot))
    found = torch.zeros_like(counted)
    seen = None if hits is None else found
    sums = _cross_entropy(
        flat.to(weight.dtype), weight, labels=wanted, rows=rows, gradients=None, hits=seen
    )
    if hits is not None:
        hits += found / counted
    return _mean_losses(*sums, counted, z)


def _mean_losses(
    total: Tensor, squares: Tensor, counted: Tensor, z: float
) -> tuple[Tensor, Tensor]:
    """The loss, and what of it is the z-loss, of sums over the tokens that count."""
    if not z:
        return total / counted, squares
    added = z * squares / counted
    return total / counted + added, added


class Attach(torch.autograd.Function):
    """Hidden states as they are; what gave `beside` (a bias of words, logits that go past) gets
    gradients here.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, slot: Slot, *beside: Tensor) -> Tensor:
        ctx.slot, ctx.beside = slot, len(beside)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slot: Slot = ctx.slot
        beside = (slot.bias, slot.order)[: ctx.beside]
        found = gradient, slot.gradient, None, *beside
        slot.gradient = slot.bias = slot.order = None
        return found


class _ProjectionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        counted: Tensor,
        place: tuple[_Rows, Slot],
    ) -> tuple[Tensor, Tensor]:
        rows, ctx.slot = place
        wide = hidden.to(weight.dtype)
        ctx.gradients = gradients = _Gradients(torch.empty_like(wide))
        if rows.bias is not None:
            gradients.bias = torch.zeros_like(rows.bias, dtype=torch.float32)
        ctx.dtype, ctx.counted = hidden.dtype, counted
        loss, added = _mean_losses(
            *_cross_entropy(wide, weight, labels=labels, rows=rows, gradients=gradients),
            counted,
            rows.z,
        )
        ctx.mark_non_differentiable(added)
        return loss, added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient / ctx.counted
        ctx.slot.gradient = _scaled(gradients.weight, factor, ctx.dtype)
        if gradients.bias is not None:
            ctx.slot.bias = _scaled(gradients.bias, factor, ctx.dtype)
        if gradients.shares is not None:
            factor = gradients.shares.mul_(factor)
        return _scaled(gradients.hidden, factor, ctx.dtype), None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` x an fp32 `factor`, rounded once, to `dtype`; in the same memory where that is its
    own.

    A factor without dimensions would be rounded to a bf16 gradient's dtype first. On a GPU the
    product widens each number as it reads it; on a CPU torch widens all of the tensor, in new
    memory, so there that is done in strips.
    """
    if gradient.dtype == dtype:
        result = gradient
    else:
        result = torch.empty_like(gradient, dtype=dtype)
    if factor.dim():
        scale = factor.reshape(-1, 1)
    else:
        scale = factor.reshape(1)
    if gradient.device.type != "cpu":
        return torch.mul(gradient, scale, out=result)
    height = max(1, WIDENED_ELEMENTS // max(1, gradient[:1].numel()))
    for begin in range(0, len(gradient), height):
        part = slice(begin, begin + height)
        result[part] = gradient[part].float() * (scale[part] if factor.dim() else scale)
    return result


@dataclass
class _Gradients:
    """Of the sum of the tokens' losses. `weight`: of one piece as the product gave it, of several
    summed in fp32.

    `hidden` is right once each row is multiplied by its token's share, where there are `shares`
    [tokens, 1].
    """

    hidden: Tensor
    weight: Tensor | None = None
    shares: Tensor | None = None
    bias: Tensor | None = None

    def add(
        self,
        part: slice,
        logits: Tensor,
        hidden: Tensor,
        weight: Tensor,
        counts: Tensor,
        shares: Tensor | None,
    ) -> None:
        """Take in one piece: its logits' gradients [tokens, words], right where a token `counts`
        [tokens, 1] and, where there are `shares` [tokens, 1], once they are multiplied by these.
        """
        ignored = ~counts
        torch.mm(logits, weight, out=self.hidden[part]).masked_fill_(ignored, 0.0)
        if self.bias is not None:
            counting = (counts if shares is None else shares.masked_fill(ignored, 0.0)).to(
                logits.dtype
            )
            self.bias.add_(_product(logits.t(), counting).squeeze(1))
        if shares is None:
            factors = logits.t(), hidden.masked_fill(ignored, 0.0)
        else:
            if self.shares is None:
                self.shares = shares.new_empty(self.hidden.shape[0], 1)
            self.shares[part] = shares
            factors = (
                logits.t(),
                torch.mul(hidden, shares.masked_fill(ignored, 0.0), out=torch.empty_like(hidden)),
            )
        if self.weight is None:
            self.weight = _product(*factors)
        elif self.weight.dtype == torch.float32 == logits.dtype:
            self.weight.addmm_(*factors)
        else:
            self.weight = add_widened(self.weight.float(), _product(*factors))


@torch.no_grad()
def _cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: _Rows,
    gradients: _Gradients | None,
    hits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens: of the losses, and with a z-loss of the squared log-sum-exps, else zero.
    The gradients of both together with respect to `hidden` and `weight` go to `gradients`.

    To `hits` the number of labels with the largest logit is added.
    """
    tokens, kind = hidden.shape[0], hidden.device.type
    height = min(tokens, max(1, PIECE_ELEMENTS[kind] // weight.shape[0]))
    counts = labels >= 0
    total, squares = torch.zeros(2, dtype=torch.float32, device=hidden.device)
    softmax = softmax_for(hidden.device)
    room = hidden.new_empty(softmax.rows(height, weight.shape[0], kind), weight.shape[0])
    for begin in range(0, tokens, height):
        part = slice(begin, min(begin + height, tokens))
        logits = torch.mm(hidden[part], weight.t(), out=room[: part.stop - begin])
        if rows.bias is not None:
            logits.add_(rows.bias)
        if hits is not None:
            hits += _largest(logits, labels[part], rows)
        losses, normaliser, shares = _softmax_losses(
            room, labels[part], rows=rows, softmax=softmax, becomes_gradient=gradients is not None
        )
        total += losses.masked_fill_(~counts[part], 0.0).sum()
        if rows.z:
            squares += normaliser.square().masked_fill_(~counts[part], 0.0).sum()
        if gradients is not None:
            gradients.add(part, logits, hidden[part], weight, counts[part].unsqueeze(1), shares)
    return total, squares


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left x right. In fp32 where the factors are fp16, in which a sum of tokens overflows."""
    if left.dtype != torch.float16:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _softmax_losses(
    room: Tensor, labels: Tensor, rows: _Rows, softmax: Softmax, becomes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-token losses and log-sum-exps (fp32) of a piece's logits, the first rows of `room`, which
    may become their gradient, then over the shares [tokens, 1].

    A z-loss makes the gradient of the others p (1 + 2 z L), L the log-sum-exp, and takes 1 off at
    the label as ever: the bracket is a factor of the row, as a share is.

    Rows of labels below zero hold anything finite afterwards, as do their losses.
    """
    logits = room[: len(labels)]
    width = logits.shape[1]
    local = labels - rows.first
    here = ((local >= 0) & (local < width)).unsqueeze(1)
    local = local.unsqueeze(1).masked_fill_(~here, 0)
    target = logits.gather(1, local).float()
    mine = softmax.softened(room, local, target, becomes_gradient)
    normaliser, wanted = mine, target.masked_fill(~here, 0.0)
    if rows.group is not None:
        normaliser, wanted = _exchange(mine, wanted, rows.group)
    losses = (normaliser - wanted).squeeze(1)
    if not becomes_gradient:
        return losses, normaliser.squeeze(1), None
    of_target, shares = (wanted - normaliser).expm1_(), None
    if rows.group is not None:
        shares = (mine - normaliser).exp_()
        if logits.dtype != torch.float16:
            shares = torch.where(here, shares.clamp(min=SMALLEST_SHARE), shares)
    if rows.z:
        steeper = 2.0 * rows.z * normaliser
        of_target += (wanted - normaliser).exp() * steeper
        if shares is None:
            shares = 1.0 + steeper
        else:
            shares = shares * (1.0 + steeper)
    if shares is not None and logits.dtype == torch.float16:
        logits.mul_(shares)
        shares = None
    elif shares is not None:
        of_target /= shares
    _put(logits, local, torch.where(here, of_target.to(logits.dtype), logits.gather(1, local)))
    return losses, normaliser.squeeze(1), shares


def _largest(logits: Tensor, labels: Tensor, rows: _Rows) -> Tensor:
    """How many of the labels have no larger logit beside theirs, of the words of all tensor ranks."""
    local = labels - rows.first
    here = (local >= 0) & (local < logits.shape[1])
    own = logits.gather(1, local.masked_fill(~here, 0).unsqueeze(1)).squeeze(1).float()
    both = torch.stack((logits.amax(dim=1).float(), own.masked_fill(~here, -torch.inf)))
    if rows.group is not None:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=rows.group)
    return ((both[0] == both[1]) & (labels >= 0)).sum()


def _put(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """Set one number of each row [tokens, words]: `values` at `places`, both [tokens, 1]."""
    # there torch's scatter widens all of a bf16 tensor first, and rounds it again
    if rows.device.type == "cpu":
        rows[torch.arange(rows.shape[0]), places.squeeze(1)] = values.squeeze(1)
    else:
        rows.scatter_(1, places, values)


def _exchange(normaliser: Tensor, target: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Join the tensor ranks' log-sum-exps and label logits (zero where elsewhere), all [tokens, 1]."""
    mine = torch.cat((normaliser, target), dim=1)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    joined = torch.stack(all_ranks)
    return joined[..., :1].logsumexp(dim=0), joined[..., 1:].sum(dim=0)
