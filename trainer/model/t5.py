"""T5 as a list of layers, and the logical names of its tensors: Megatron's, an encoder and a decoder of L blocks each.

It normalises before each part; positions are learned, and shared by both sides. Names beside GPT's: `blocks.0` to
`blocks.L-1` are the encoder's, behind which comes `encoder_norm.*`; those from `blocks.L` on are the decoder's and have
`post_attention_norm.*`, `cross_attention.{query,key_value,dense}.*` and `post_cross_attention_norm.*` between attention
and MLP; `head.word_bias`, the projection's bias of each word, is cut over tensor ranks as the words are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.config.card import DataSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_part
from trainer.model.compiled import Compiler
from trainer.model.documents import IGNORED
from trainer.model.family import Family, Layer
from trainer.model.kernels import build_causal_kernel, build_kernel
from trainer.model.layers import Dropout, VocabularyParallelEmbedding, embed_marked
from trainer.model.t5_parts import (
    DecoderBlock,
    DecoderNorm,
    EncoderBlock,
    EncoderNorm,
    PositionsOfBoth,
    SpanHead,
    WordBias,
)
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch

TIED_KEY = "embedding"
TOKEN_MARK = 1  # padding is marked 0


class T5Family(Family):
    """Spans that were cut out of a text. Layers hand on the hidden states of both sides, and a mark of each token."""

    tied_name: ClassVar[str] = "embedding.word.weight"
    fields: ClassVar[tuple[str, ...]] = ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask")

    def head(self, config: TrainerConfig, mesh: Mesh) -> SpanHead:
        """The tied output projection, its bias and its cross-entropy."""
        return SpanHead(mesh)

    def layers(self, config: TrainerConfig, mesh: Mesh, head: SpanHead, compiler: Compiler | None) -> list[Layer]:
        """Tokens of both sides and their marks in, hidden states of the decoder for `head.loss` out."""
        model, vocabulary, precision = config.model, config.tokenizer.padded_vocabulary_size, config.precision
        size, std, encoder = model.hidden_size, model.init_std, model.sequence_length
        words = (VocabularyParallelEmbedding, (vocabulary, size, std, mesh), "embedding.word.")
        norm = (encoder, size, model.layernorm_epsilon, mesh)
        layers = [
            Layer(*words, tied_key=TIED_KEY, forward=embed_marked),
            Layer(PositionsOfBoth, (encoder, model.positions, size, std, mesh), "embedding.position."),
        ]
        if model.hidden_dropout > 0.0:
            layers.append(Layer(Dropout, (model.hidden_dropout,), "embedding.dropout."))
        padded = build_kernel(model, mesh, None, precision.dtype)
        causal = build_causal_kernel(model, mesh, precision.dtype)
        rest = [(recomputed_part(model, index), compiler, precision.float8) for index in range(model.layers)]
        side = (encoder, model, mesh)
        layers += [Layer(EncoderBlock, (*side, padded, *last), f"blocks.{index}.") for index, last in enumerate(rest)]
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
        """(tokens and marks of both sides, labels of the decoder); samples are not cut: see `family_rules`."""
        marks = torch.cat((micro_batch["enc_mask"], micro_batch["dec_mask"]), dim=1).to(torch.int32)
        labels = micro_batch["labels"].masked_fill(micro_batch["loss_mask"] <= 0, IGNORED)
        return (self.tokens(micro_batch), marks), labels

    def tokens(self, micro_batch: Any) -> Tensor:
        """Of both sides, the encoder's first."""
        return torch.cat((micro_batch["text_enc"], micro_batch["text_dec"]), dim=1)
