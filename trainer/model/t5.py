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
from msgspec.structs import replace
from torch import Tensor, nn

from trainer.config.card import DataSection, TrainerConfig
from trainer.config.kernel_choice import Recomputed
from trainer.model.attention import AttentionContext, BlockSetup, CrossAttention
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
from trainer.model.family import TIED_KEY, Family, Layer, block_layers
from trainer.model.initial import ZEROS
from trainer.model.kernels import Kernel, build_causal_kernel, build_kernel
from trainer.model.layers import (
    LayerNorm,
    LearnedPositions,
    VocabularyParallelEmbedding,
    embed_marked,
    new_parameter,
)
from trainer.model.loss import LanguageModelHead
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


def sides_of(stream: Stream, encoder: int) -> tuple[Tensor, Tensor]:
    """Hidden states of the encoder's tokens, so many, and of the decoder's."""
    hidden, _ = hidden_of(stream)
    return hidden[:, :encoder], hidden[:, encoder:]


class OneSidedBlock(TransformerBlock):
    """A block that works on one side and hands on the other as it is."""

    def __init__(self, setup: BlockSetup, recomputed: Recomputed):
        super().__init__(setup, recomputed)
        self.encoder = setup.model.sequence_length

    def forward(self, stream: Stream) -> Stream:
        _, marks = hidden_of(stream)
        assert marks is not None
        text, answer = self.worked_on(*sides_of(stream, self.encoder), marks[:, : self.encoder])
        return joined(torch.cat((text, answer), dim=1), marks)

    def worked_on(self, text: Tensor, answer: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides behind the block. `marks`: of the encoder's tokens; padding is marked 0."""
        raise NotImplementedError


class EncoderBlock(OneSidedBlock):
    """A block of the encoder: its tokens attend to one another, but to no padding."""

    def worked_on(self, text: Tensor, answer: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        return self._compute(text, self.attention.context(text, marks)), answer


class DecoderBlock(OneSidedBlock):
    """A block of the decoder: its tokens attend to those before them, then to the encoder's result;
    then the MLP. `cross_kernel`: for the encoder's tokens.
    """

    def __init__(self, setup: BlockSetup, recomputed: Recomputed, cross_kernel: Kernel):
        super().__init__(setup, recomputed)
        model, mesh = setup.model, setup.mesh
        self.cross_attention = CrossAttention(setup, cross_kernel, recomputed == "attention")
        self.cross_dropout = Dropout(model.hidden_dropout, mesh)
        self.post_cross_attention_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)

    def worked_on(self, text: Tensor, answer: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        context = self.attention.context(answer, None)
        cross_mask = self.cross_attention.kernel.mask(text, self.encoder, marks)
        return text, self._decode(answer, text, context, cross_mask)

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
        text, answer = sides_of(stream, self.encoder)
        return joined(torch.cat((super().forward(text), answer), dim=1), hidden_of(stream)[1])


class DecoderNorm(EncoderNorm):
    """The LayerNorm behind the decoder's blocks. The encoder's side ends here."""

    def forward(self, stream: Stream) -> Tensor:
        _, answer = sides_of(stream, self.encoder)
        normed: Tensor = LayerNorm.forward(self, answer)
        return normed


class WordBias(nn.Module):
    """The projection's bias of each word, cut over tensor ranks as the words are. Hidden states
    pass as they are.
    """

    def __init__(self, vocabulary_size: int, mesh: Mesh, head: LanguageModelHead):
        super().__init__()
        self.head = head
        self.word_bias = new_parameter((vocabulary_size,), mesh, 0, ZEROS)

    def forward(self, stream: Stream) -> Stream:
        self.head.take(self.word_bias)
        return stream


TOKEN_MARK = 1  # padding is marked 0


class T5Family(Family):
    """Spans that were cut out of a text. Layers hand on the hidden states of both sides, and a mark
    of each token.
    """

    fields: ClassVar[tuple[str, ...]] = (
        "text_enc",
        "text_dec",
        "labels",
        "loss_mask",
        "enc_mask",
        "dec_mask",
    )

    def head(self, config: TrainerConfig, mesh: Mesh) -> LanguageModelHead:
        """The tied output projection, its bias and its cross-entropy."""
        return LanguageModelHead(mesh)

    def layers(
        self, config: TrainerConfig, mesh: Mesh, head: LanguageModelHead, compiler: Compiler | None
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
        setup = BlockSetup(model, mesh, padded, compiler=compiler, in_float8=precision.float8)
        layers += block_layers(setup, EncoderBlock)
        layers.append(Layer(EncoderNorm, norm, "encoder_norm."))
        layers += block_layers(
            replace(setup, kernel=causal), DecoderBlock, padded, first=model.layers
        )
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
