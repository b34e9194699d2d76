"""The GPT as a list of layers, and the logical names of its tensors. The only place that knows what
a GPT is.

Names: `embedding.word.weight`, `embedding.position.weight`, `embedding.norm.*`,
`blocks.N.input_norm.*`, `blocks.N.attention.{query_key_value,dense}.*`,
`blocks.N.attention.{query,key}_norm.weight`, `blocks.N.post_attention_norm.*`,
`blocks.N.mlp.{up,down}.*`, `final_norm.*`, and `head.weight` where the output projection is not the
word embedding again.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from trainer.config.card import DataSection, TrainerConfig
from trainer.model.attention import BlockSetup
from trainer.model.compiled import Compiler, compiles_small_parts
from trainer.model.documents import DocumentRules, labels_without_ends
from trainer.model.family import TIED_KEY, Family, Layer, LossParts, block_layers
from trainer.model.kernels import build_kernel
from trainer.model.layers import LearnedPositions, VocabularyParallelEmbedding, norm_class
from trainer.model.loss import LM, LanguageModelHead, Z
from trainer.model.positions import Rotary, rotary_frequencies
from trainer.model.random import Dropout
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch


class GPTFamily(Family):
    """A causal language model. Its micro batches are pairs of tensors [batch, sequence]."""

    fields: ClassVar[tuple[str, ...]] = ("tokens", "labels")

    def parts(self, config: TrainerConfig) -> LossParts:
        """With a z-loss the cross-entropy and that; else the loss is one."""
        if config.model.z_loss:
            return LossParts((LM, Z))
        return LossParts()

    def head(self, config: TrainerConfig, mesh: Mesh) -> LanguageModelHead:
        """The output projection and its cross-entropy."""
        return LanguageModelHead(mesh, config.model.z_loss)

    def layers(
        self, config: TrainerConfig, mesh: Mesh, head: LanguageModelHead, compiler: Compiler | None
    ) -> list[Layer]:
        """The whole model, first layer first: token ids [batch, sequence] in, hidden states for
        `head.loss` out.

        Where the data has rules for documents, the layers between hand on (hidden states, document numbers) instead of
        hidden states alone.
        Raises CardError when the attention that the card requires is not possible here.
        """
        model, precision, documents = config.model, config.precision, DocumentRules.of(config.data)
        vocabulary = config.tokenizer.padded_vocabulary_size
        embedding = (
            VocabularyParallelEmbedding,
            (vocabulary, model.hidden_size, model.init_std, mesh, documents),
            "embedding.word.",
        )
        resets_positions = documents is not None and documents.reset_positions
        rotary = None
        if model.position_embedding == "rotary":
            compiled = compiles_small_parts(mesh.device)
            rotary = Rotary(rotary_frequencies(model, mesh.device), resets_positions, compiled)
        layers = [Layer(*embedding, tied_key=TIED_KEY if model.tied_embeddings else None)]
        if model.position_embedding == "absolute":
            arguments = (model.positions, model.hidden_size, model.init_std, mesh, documents)
            layers.append(Layer(LearnedPositions, arguments, "embedding.position."))
        norm = norm_class(model), (model.hidden_size, model.layernorm_epsilon, mesh)
        if model.embedding_layernorm:
            layers.append(Layer(*norm, "embedding.norm."))
        if model.hidden_dropout > 0.0:
            layers.append(Layer(Dropout, (model.hidden_dropout, mesh), "embedding.dropout."))
        kernel = build_kernel(model, mesh, documents, precision.dtype)
        layers += block_layers(
            BlockSetup(model, mesh, kernel, rotary, compiler=compiler, in_float8=precision.float8)
        )
        layers.append(Layer(*norm, "final_norm."))
        if model.tied_embeddings:
            layers.append(Layer(*embedding, tied_key=TIED_KEY, forward=head.attach))
        else:
            kind, arguments, _ = embedding
            layers.append(Layer(kind, (*arguments, head.attach), "head."))
        return layers

    def plain_mark(self, data: DataSection) -> int | None:
        """The number of a sample's first document, where the layers must know documents."""
        if DocumentRules.of(data) is None:
            return None
        return 0

    def prepared(self, micro_batch: Any, length: int, config: TrainerConfig) -> Batch:
        """Tokens and labels; those labels that the card leaves out of the loss are marked so."""
        tokens, labels = micro_batch
        if length != config.model.sequence_length:
            tokens, labels = tokens[:, :length].contiguous(), labels[:, :length].contiguous()
        end = config.data.end_of_document_id
        if end is not None and config.data.mask_end_of_document_loss:
            labels = labels_without_ends(tokens, labels, end)
        return tokens, labels

    def tokens(self, micro_batch: Any) -> Tensor:
        """The pair's first."""
        tokens: Tensor = micro_batch[0]
        return tokens
