"""BERT as a list of layers, and the logical names of its tensors: an encoder that normalises before
each part.

Names beside GPT's (`embedding.word.weight`, `embedding.position.weight`, `blocks.N.*`,
`final_norm.*`): `embedding.type.weight`, `heads.transform.*`, `heads.transform_norm.*`,
`heads.pooler.*`, `heads.order.*`, and `heads.word_bias`, the projection's bias of each word, cut
over tensor ranks as the words are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.card import DataSection, ModelSection, TrainerConfig
from trainer.model.attention import BlockSetup
from trainer.model.block import GELU_FORMS
from trainer.model.compiled import Compiler
from trainer.model.documents import IGNORED, Stream, hidden_of, joined
from trainer.model.family import TIED_KEY, Family, Layer, LossParts, block_layers
from trainer.model.initial import ZEROS, Initial
from trainer.model.kernels import build_kernel
from trainer.model.layers import (
    LayerNorm,
    LearnedPositions,
    VocabularyParallelEmbedding,
    embed_marked,
    new_parameter,
)
from trainer.model.loss import LanguageModelHead, Slot, projection_loss
from trainer.model.matmul import linear
from trainer.model.random import Dropout
from trainer.parallel.comm import reduce_from_tensor_region, stretch
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch
from trainer.schedule.flops import PLACES

# The two ends that BERT has beside GPT's: token types, and the heads for masked words and for the
# order of sentences.
#
# The words' head is a dense layer, GELU and LayerNorm on every token, then the tied projection with
# a bias of each word, on the masked tokens alone. The order's head is a dense layer and tanh on the
# first token, then two logits.

TYPES = 2  # first sentence, second sentence
LM, SOP = "lm", "sop"  # the two losses: of masked words, and of the order of sentences
FIRST_MARK = 1  # of a token of the first type; padding is marked 0


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor rank holds whole: [.., inputs] -> [.., outputs]."""

    def __init__(self, inputs: int, outputs: int, std: float, mesh: Mesh):
        super().__init__()
        self.weight = new_parameter((outputs, inputs), mesh, None, Initial(0.0, std))
        self.bias = new_parameter((outputs,), mesh, None, ZEROS)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)


class TokenTypes(nn.Module):
    """Adds a learned vector of each token's type, which its mark tells, to [batch, sequence,
    features].
    """

    def __init__(self, size: int, std: float, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = new_parameter((TYPES, size), mesh, None, Initial(0.0, std))

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        assert marks is not None
        types = (marks - FIRST_MARK).clamp(min=0)
        if self.mesh.sequence_parallel and self.mesh.tensor_group is not None:
            types = types[:, stretch(types.shape[1], self.mesh.tensor_group)]
        return joined(hidden + functional.embedding(types, self.weight), marks)


class PretrainingHead(LanguageModelHead):
    """The end of a BERT: masked words and the order of sentences. See `LanguageModelHead` for what
    is done when.
    """

    def loss(self, hidden: Tensor, labels: Any) -> Tensor:
        """Mean cross-entropy of the masked words, plus that of the order; an fp32 scalar, alike on
        all tensor ranks.

        `labels`: places of tokens among batch x sequence [places], the words there [places] (below
        zero: not counted), and whether the sentences were swapped [batch], below zero where that is
        not asked. Raises RuntimeError unless `attach` made `hidden` just before.
        """
        places, words, swapped = labels
        embedding, slot, (bias, logits) = self.prepared()
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
        if torch.is_grad_enabled():
            right = None
        else:
            right = torch.zeros((), device=hidden.device)
        loss, _ = projection_loss(
            chosen,
            embedding,
            wanted=words,
            slot=slot,
            group=self.group,
            bias=bias.detach(),
            hits=right,
        )
        both, order = _OrderLoss.apply(loss, logits.detach(), swapped, slot)
        self.measured = {LM: loss.detach(), SOP: order}
        if right is not None:
            in_order = ((logits.argmax(dim=1) == swapped) * _shares(swapped)).sum()
            self.measured |= {f"{LM} accuracy": right, f"{SOP} accuracy": in_order}
        return both


class PretrainingHeads(nn.Module):
    """Hidden states after the last LayerNorm -> those of the words' head; the order's logits go to
    `head`.
    """

    def __init__(
        self, model: ModelSection, vocabulary_size: int, mesh: Mesh, head: PretrainingHead
    ):
        super().__init__()
        size, std = model.hidden_size, model.init_std
        self.mesh, self.head = mesh, head
        self.approximate = GELU_FORMS[model.activation]
        self.transform = ReplicatedLinear(size, size, std, mesh)
        self.transform_norm = LayerNorm(size, model.layernorm_epsilon, mesh)
        self.pooler = ReplicatedLinear(size, size, std, mesh)
        self.order = ReplicatedLinear(size, 2, std, mesh)
        self.word_bias = new_parameter((vocabulary_size,), mesh, 0, ZEROS)

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        self.head.take(self.word_bias, self._order_logits(hidden[:, 0]))
        words = functional.gelu(self.transform(hidden), approximate=self.approximate)
        return joined(self.transform_norm(words), marks)

    def _order_logits(self, first: Tensor) -> Tensor:
        """[batch, features] -> [batch, 2]. With sequence parallelism the first tensor rank has the
        first token.
        """
        logits: Tensor = self.order(torch.tanh(self.pooler(first)))
        if not self.mesh.sequence_parallel or self.mesh.tensor_group is None:
            return logits
        mine = logits * float(self.mesh.tensor_rank == 0)
        return reduce_from_tensor_region(mine, self.mesh.tensor_group)


def _shares(wanted: Tensor) -> Tensor:
    """What each sample weighs in a mean [batch]: nothing where `wanted` is below zero."""
    counts = (wanted >= 0).float()
    return counts / counts.sum().clamp(min=1)


class _OrderLoss(torch.autograd.Function):
    """Adds the cross-entropy of logits [batch, 2] to a loss: the sum, and what was added, which has
    no gradient.

    The logits' gradient waits in the slot, as the weight's does.

    What is wanted below zero does not count; of a micro batch where none does nothing is added, and
    gradients are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, logits: Tensor, wanted: Tensor, slot: Slot
    ) -> tuple[Tensor, Tensor]:
        logarithms = torch.log_softmax(logits.float(), dim=1)
        ctx.slot, ctx.dtype = slot, logits.dtype
        shares = _shares(wanted)
        right = functional.one_hot(wanted.clamp(min=0), 2)
        ctx.gradient = (logarithms.exp() - right) * shares.unsqueeze(1)
        order = -(logarithms * right * shares.unsqueeze(1)).sum()
        ctx.mark_non_differentiable(order)
        return loss + order, order

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        ctx.slot.order = (ctx.gradient * gradient).to(ctx.dtype)
        return gradient, None, None, None


class BertFamily(Family):
    """Masked words and the order of two sentences. Layers hand on hidden states and a mark of each
    token.

    A mark is 0 for padding, 1 for a token of the first type and 2 for one of the second.
    """

    fields: ClassVar[tuple[str, ...]] = (
        "text",
        "types",
        "labels",
        "is_random",
        "loss_mask",
        "padding_mask",
    )

    def parts(self, config: TrainerConfig) -> LossParts:
        """That of the masked words and that of the order of sentences ("sop"), and how many of each
        are right.

        Without the order the loss is one.
        """
        losses = (LM, SOP) if config.data.binary_head else (LM,)
        return LossParts(losses, tuple(f"{name} accuracy" for name in losses))

    def head(self, config: TrainerConfig, mesh: Mesh) -> PretrainingHead:
        """Both losses."""
        return PretrainingHead(mesh)

    def layers(
        self, config: TrainerConfig, mesh: Mesh, head: PretrainingHead, compiler: Compiler | None
    ) -> list[Layer]:
        """Tokens and their marks in, hidden states for `head.loss` out."""
        model, vocabulary = config.model, config.tokenizer.padded_vocabulary_size
        size, std = model.hidden_size, model.init_std
        words = (VocabularyParallelEmbedding, (vocabulary, size, std, mesh), "embedding.word.")
        norm = (size, model.layernorm_epsilon, mesh)
        layers = [
            Layer(*words, tied_key=TIED_KEY, forward=embed_marked),
            Layer(LearnedPositions, (model.positions, size, std, mesh), "embedding.position."),
            Layer(TokenTypes, (size, std, mesh), "embedding.type."),
        ]
        if model.hidden_dropout > 0.0:
            layers.append(Layer(Dropout, (model.hidden_dropout, mesh), "embedding.dropout."))
        precision = config.precision
        kernel = build_kernel(model, mesh, None, precision.dtype)
        layers += block_layers(
            BlockSetup(model, mesh, kernel, compiler=compiler, in_float8=precision.float8)
        )
        layers.append(Layer(LayerNorm, norm, "final_norm."))
        layers.append(Layer(PretrainingHeads, (model, vocabulary, mesh, head), "heads."))
        layers.append(Layer(*words, tied_key=TIED_KEY, forward=head.attach))
        return layers

    def plain_mark(self, data: DataSection) -> int | None:
        """That of the first type."""
        return FIRST_MARK

    def prepared(self, micro_batch: Any, length: int, config: TrainerConfig) -> Batch:
        """(tokens and marks, (places of masked tokens, their words, whether sentences were
        swapped)).

        The places are found here, in host memory, where to count them holds up no GPU.
        """
        text, types, labels, loss_mask, padding_mask = (
            micro_batch[name][:, :length]
            for name in ("text", "types", "labels", "loss_mask", "padding_mask")
        )
        marks = ((types + FIRST_MARK) * padding_mask).to(torch.int32)
        words = labels.masked_fill(loss_mask <= 0, IGNORED).reshape(-1)
        found = (words >= 0).nonzero().squeeze(1)
        room = min(words.numel(), max(1, -(-found.numel() // PLACES)) * PLACES)
        places = torch.zeros(room, dtype=torch.int64)
        places[: found.numel()] = found
        wanted = torch.full_like(places, IGNORED)
        wanted[: found.numel()] = words[found]
        swapped = micro_batch["is_random"]
        if not config.data.binary_head:
            swapped = torch.full_like(swapped, IGNORED)
        return (text.contiguous(), marks.contiguous()), (places, wanted, swapped)

    def tokens(self, micro_batch: Any) -> Tensor:
        """The text, with its masks."""
        text: Tensor = micro_batch["text"]
        return text
