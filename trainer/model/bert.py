"""BERT as a list of layers, and the logical names of its tensors: an encoder that normalises before each part.

Names beside GPT's (`embedding.word.weight`, `embedding.position.weight`, `blocks.N.*`, `final_norm.*`):
`embedding.type.weight`, `heads.transform.*`, `heads.transform_norm.*`, `heads.pooler.*`, `heads.order.*`, and
`heads.word_bias`, the projection's bias of each word, cut over tensor ranks as the words are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.config.card import DataSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_part
from trainer.model.bert_heads import FIRST_MARK, LM, SOP, PretrainingHead, PretrainingHeads, TokenTypes
from trainer.model.block import TransformerBlock
from trainer.model.compiled import Compiler
from trainer.model.documents import IGNORED
from trainer.model.family import Family, Layer, LossParts
from trainer.model.kernels import build_kernel
from trainer.model.layers import Dropout, LayerNorm, LearnedPositions, VocabularyParallelEmbedding, embed_marked
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch
from trainer.schedule.ends import PLACES

TIED_KEY = "embedding"


class BertFamily(Family):
    """Masked words and the order of two sentences. Layers hand on hidden states and a mark of each token.

    A mark is 0 for padding, 1 for a token of the first type and 2 for one of the second.
    """

    tied_name: ClassVar[str] = "embedding.word.weight"
    fields: ClassVar[tuple[str, ...]] = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")

    def parts(self, config: TrainerConfig) -> LossParts:
        """That of the masked words and that of the order of sentences ("sop"), and how many of each are right.

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
            layers.append(Layer(Dropout, (model.hidden_dropout,), "embedding.dropout."))
        precision = config.precision
        block = (model, mesh, build_kernel(model, mesh, None, precision.dtype), None)
        layers += [
            Layer(
                TransformerBlock,
                (*block, recomputed_part(model, index), compiler, precision.float8),
                f"blocks.{index}.",
            )
            for index in range(model.layers)
        ]
        layers.append(Layer(LayerNorm, norm, "final_norm."))
        layers.append(Layer(PretrainingHeads, (model, vocabulary, mesh, head), "heads."))
        layers.append(Layer(*words, tied_key=TIED_KEY, forward=head.attach))
        return layers

    def plain_mark(self, data: DataSection) -> int | None:
        """That of the first type."""
        return FIRST_MARK

    def prepared(self, micro_batch: Any, length: int, config: TrainerConfig) -> Batch:
        """(tokens and marks, (places of masked tokens, their words, whether sentences were swapped)).

        The places are found here, in host memory, where to count them holds up no GPU.
        """
        text, types, labels, loss_mask, padding_mask = (
            micro_batch[name][:, :length] for name in ("text", "types", "labels", "loss_mask", "padding_mask")
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
