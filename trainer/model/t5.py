"""T5 as a list of layers, and the logical names of its tensors: Megatron's, an encoder and a
decoder of L blocks each.

It normalises before each part; positions are learned, and shared by both sides. Names beside GPT's:
`blocks.0` to `blocks.L-1` are the encoder's, behind which comes `encoder_norm.*`; those from
`blocks.L` on are the decoder's and have `post_attention_norm.*`,
`cross_attention.{query,key_value,dense}.*` and `post_cross_attention_norm.*` between attention and
MLP; `head.word_bias`, the projection's bias of each word, is cut over tensor ranks as the words
are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.config.card import DataSection, ModelSection, TrainerConfig
from trainer.config.kernel_choice import Recomputed, recomputed_part
from trainer.model.attention import AttentionContext, CrossAttention
from trainer.model.block import (
    TransformerBlock,
    activated,
    added,
    added_and_normed,
    input_normed,
    mixed,
)
from trainer.model.compiled import Compiler
from trainer.model.documents import IGNORED, Stream, hidden_of, joined
from trainer.model.family import Family, Layer
from trainer.model.initial import ZEROS
from trainer.model.kernels import Kernel, build_causal_kernel, build_kernel
from trainer.model.layers import (
    LayerNorm,
    LearnedPositions,
    VocabularyParallelEmbedding,
    embed_marked,
    new_parameter,
)
from trainer.model.loss import Attach, LanguageModelHead, Slot, projection_loss
from trainer.model.random import Dropout
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch

# What a T5 has beside a GPT's and a BERT's layers, all of which work on two sequences in one
# tensor.
#
# The encoder's tokens come first, the decoder's stand behind them: [batch, encoder + decoder,
# features]. So hidden states and marks of tokens go from layer to layer as in every family, and
# each layer works on its side alone.


class PositionsOfBoth(LearnedPositions):
    """Adds a learned vector per position, counted from 0 on either side. `encoder`: tokens of the
    encoder.
    """

    def __init__(self, encoder: int, positions: int, size: int, std: float, mesh: Mesh):
        super().__init__(positions, size, std, mesh)
        self.encoder = encoder

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        decoder = hidden.shape[1] - self.encoder
        return joined(
            hidden + torch.cat((self.weight[: self.encoder], self.weight[:decoder])), marks
        )


class EncoderBlock(TransformerBlock):
    """A block of the encoder: its tokens attend to one another, but to no padding (mark 0)."""

    def __init__(
        self,
        encoder: int,
        model: ModelSection,
        mesh: Mesh,
        kernel: Kernel,
        recomputed: Recomputed,
        compiler: Compiler | None,
        in_float8: bool,
    ):
        super().__init__(
            model,
            mesh,
            kernel=kernel,
            rotary=None,
            recomputed=recomputed,
            compiler=compiler,
            in_float8=in_float8,
        )
        self.encoder = encoder

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        assert marks is not None
        text, answer = hidden[:, : self.encoder], hidden[:, self.encoder :]
        text = self._compute(text, self.attention.context(text, marks[:, : self.encoder]))
        return joined(torch.cat((text, answer), dim=1), marks)


class DecoderBlock(TransformerBlock):
    """A block of the decoder: its tokens attend to those before them, then to the encoder's result;
    then the MLP.

    `kernel`: for its own tokens, `cross_kernel`: for the encoder's.
    """

    def __init__(
        self,
        encoder: int,
        model: ModelSection,
        mesh: Mesh,
        kernel: Kernel,
        cross_kernel: Kernel,
        recomputed: Recomputed,
        compiler: Compiler | None,
        in_float8: bool,
    ):
        super().__init__(
            model,
            mesh,
            kernel=kernel,
            rotary=None,
            recomputed=recomputed,
            compiler=compiler,
            in_float8=in_float8,
        )
        self.encoder = encoder
        self.cross_attention = CrossAttention(
            model,
            mesh,
            kernel=cross_kernel,
            recompute=recomputed == "attention",
            in_float8=in_float8,
        )
        self.cross_dropout = Dropout(model.hidden_dropout, mesh)
        self.post_cross_attention_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        assert marks is not None
        text, answer = hidden[:, : self.encoder], hidden[:, self.encoder :]
        context = self.attention.context(answer, None)
        cross_mask = self.cross_attention.kernel.mask(text, self.encoder, marks[:, : self.encoder])
        answer = self._decode(answer, text, context, cross_mask)
        return joined(torch.cat((text, answer), dim=1), marks)

    def _decode(
        self, hidden: Tensor, text: Tensor, context: AttentionContext, cross_mask: Any
    ) -> Tensor:
        """`hidden`: of the decoder; `text`: the encoder's result; `cross_mask`: of its tokens."""
        run, own, cross, down = self.run, self.attention, self.cross_attention, self.mlp.down
        if not self.is_cut:
            return run(whole_decoder)(self, hidden, text, context, cross_mask=cross_mask)
        fused = own.query_key_value(run(input_normed)(self, hidden))
        summed = own.dense.exchange(run(mixed)(self, fused, context))
        hidden, asking = run(added_and_normed)(self, hidden, summed)
        across = run(cross_mixed)(self, cross.query(asking), cross.key_value(text), cross_mask)
        summed = cross.dense.exchange(across)
        hidden, found = run(crossed_and_normed)(self, hidden, summed)
        summed = down.exchange(run(activated)(self, self.mlp.up(found)))
        return run(added)(self, hidden, summed)


def whole_decoder(
    block: DecoderBlock, hidden: Tensor, text: Tensor, context: AttentionContext, cross_mask: Any
) -> Tensor:
    """All parts of a decoder's block, where nothing is cut."""
    cross = block.cross_attention
    fused = block.attention.query_key_value(input_normed(block, hidden))
    hidden, asking = added_and_normed(block, hidden, mixed(block, fused, context))
    crossed = cross_mixed(block, cross.query(asking), cross.key_value(text), cross_mask)
    hidden, found = crossed_and_normed(block, hidden, crossed)
    return added(block, hidden, activated(block, block.mlp.up(found)))


def cross_mixed(block: DecoderBlock, query: Tensor, key_value: Tensor, mask: Any) -> Tensor:
    cross = block.cross_attention
    return cross.dense.product(cross.mix(query, key_value, mask))


def crossed_and_normed(
    block: DecoderBlock, hidden: Tensor, summed: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden + block.cross_dropout.apply_to(block.cross_attention.dense.finish(summed))
    return hidden, block.post_cross_attention_norm(hidden)


class EncoderNorm(LayerNorm):
    """The LayerNorm behind the encoder's blocks. What goes to the decoder's blocks has passed it
    once.
    """

    def __init__(self, encoder: int, size: int, epsilon: float, mesh: Mesh):
        super().__init__(size, epsilon, mesh)
        self.encoder = encoder

    def forward(self, stream: Stream) -> Stream:
        hidden, marks = hidden_of(stream)
        text = super().forward(hidden[:, : self.encoder])
        return joined(torch.cat((text, hidden[:, self.encoder :]), dim=1), marks)


class DecoderNorm(EncoderNorm):
    """The LayerNorm behind the decoder's blocks. The encoder's side ends here."""

    def forward(self, stream: Stream) -> Tensor:
        hidden, _ = hidden_of(stream)
        answer: Tensor = LayerNorm.forward(self, hidden[:, self.encoder :])
        return answer


class SpanHead(LanguageModelHead):
    """The tied output projection with a bias of each word. See `LanguageModelHead` for what is done
    when.
    """

    def __init__(self, mesh: Mesh):
        super().__init__(mesh)
        self._bias: Tensor | None = None
        self._waiting: tuple[VocabularyParallelEmbedding, Slot, Tensor] | None = None

    def take(self, word_bias: Tensor) -> None:
        """The bias of this worker's words, which goes past the projection."""
        self._bias = word_bias

    def attach(self, embedding: VocabularyParallelEmbedding, stream: Stream) -> Tensor:
        """The decoder's hidden states, with the projection's weight and its bias attached."""
        assert self._bias is not None, "the bias comes before the projection"
        slot, bias = Slot(), self._bias
        self._waiting = (embedding, slot, bias)
        hidden, _ = hidden_of(stream)
        return Attach.apply(self._enter(hidden, self.group), embedding.weight, slot, bias)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the decoder's labels [batch, decoder]; an fp32 scalar, alike on
        all tensor ranks.

        Labels below zero do not count. Raises RuntimeError unless `attach` made `hidden` just
        before.
        """
        if self._waiting is None:
            raise RuntimeError("loss() needs hidden states that attach() has just prepared")
        (embedding, slot, bias), self._waiting = self._waiting, None
        flat = hidden.reshape(-1, hidden.shape[-1])
        return projection_loss(
            flat,
            embedding,
            wanted=labels.reshape(-1),
            slot=slot,
            group=self.group,
            bias=bias.detach(),
        )


class WordBias(nn.Module):
    """The projection's bias of each word, cut over tensor ranks as the words are. Hidden states
    pass as they are.
    """

    def __init__(self, vocabulary_size: int, mesh: Mesh, head: SpanHead):
        super().__init__()
        self.head = head
        self.word_bias = new_parameter((vocabulary_size,), mesh, 0, ZEROS)

    def forward(self, stream: Stream) -> Stream:
        self.head.take(self.word_bias)
        return stream


TIED_KEY = "embedding"
TOKEN_MARK = 1  # padding is marked 0


class T5Family(Family):
    """Spans that were cut out of a text. Layers hand on the hidden states of both sides, and a mark
    of each token.
    """

    tied_name: ClassVar[str] = "embedding.word.weight"
    fields: ClassVar[tuple[str, ...]] = (
        "text_enc",
        "text_dec",
        "labels",
        "loss_mask",
        "enc_mask",
        "dec_mask",
    )

    def head(self, config: TrainerConfig, mesh: Mesh) -> SpanHead:
        """The tied output projection, its bias and its cross-entropy."""
        return SpanHead(mesh)

    def layers(
        self, config: TrainerConfig, mesh: Mesh, head: SpanHead, compiler: Compiler | None
    ) -> list[Layer]:
        """Tokens of both sides and their marks in, hidden states of the decoder for `head.loss`
        out.
        """
        model, vocabulary, precision = (
            config.model,
            config.tokenizer.padded_vocabulary_size,
            config.precision,
        )
        size, std, encoder = model.hidden_size, model.init_std, model.sequence_length
        words = (VocabularyParallelEmbedding, (vocabulary, size, std, mesh), "embedding.word.")
        norm = (encoder, size, model.layernorm_epsilon, mesh)
        layers = [
            Layer(*words, tied_key=TIED_KEY, forward=embed_marked),
            Layer(
                PositionsOfBoth, (encoder, model.positions, size, std, mesh), "embedding.position."
            ),
        ]
        if model.hidden_dropout > 0.0:
            layers.append(Layer(Dropout, (model.hidden_dropout, mesh), "embedding.dropout."))
        padded = build_kernel(model, mesh, None, precision.dtype)
        causal = build_causal_kernel(model, mesh, precision.dtype)
        rest = [
            (recomputed_part(model, index), compiler, precision.float8)
            for index in range(model.layers)
        ]
        side = (encoder, model, mesh)
        layers += [
            Layer(EncoderBlock, (*side, padded, *last), f"blocks.{index}.")
            for index, last in enumerate(rest)
        ]
        layers.append(Layer(EncoderNorm, norm, "encoder_norm."))
        layers += [
            Layer(DecoderBlock, (*side, causal, padded, *last), f"blocks.{index}.")
            for index, last in enumerate(rest, model.layers)
        ]
        layers.append(Layer(DecoderNorm, norm, "final_norm."))
        layers.append(Layer(WordBias, (vocabulary, mesh, head), "head."))
        layers.append(Layer(*words, tied_key=TIED_KEY, forward=head.attach))
        return layers

    def plain_mark(self, data: DataSection) -> int | None:
        """That of a token."""
        return TOKEN_MARK

    def prepared(self, micro_batch: Any, length: int, config: TrainerConfig) -> Batch:
        """(tokens and marks of both sides, labels of the decoder); samples are not cut: see
        `family_rules`.
        """
        marks = torch.cat((micro_batch["enc_mask"], micro_batch["dec_mask"]), dim=1).to(torch.int32)
        labels = micro_batch["labels"].masked_fill(micro_batch["loss_mask"] <= 0, IGNORED)
        return (self.tokens(micro_batch), marks), labels

    def tokens(self, micro_batch: Any) -> Tensor:
        """Of both sides, the encoder's first."""
        return torch.cat((micro_batch["text_enc"], micro_batch["text_dec"]), dim=1)
