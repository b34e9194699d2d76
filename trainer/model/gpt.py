"""The GPT as a list of layers, and the logical names of its tensors. The only place that knows what the model is.

Names: `embedding.word.weight`, `embedding.position.weight`, `embedding.norm.*`, `blocks.N.input_norm.*`,
`blocks.N.attention.{query_key_value,dense}.*`, `blocks.N.post_attention_norm.*`, `blocks.N.mlp.{up,down}.*`,
`final_norm.*`. The output projection is the word embedding again and has no name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer.config.card import ModelSection
from trainer.config.recompute_choice import recomputed_part
from trainer.model.block import TransformerBlock
from trainer.model.compiled import Compiler
from trainer.model.documents import DocumentRules
from trainer.model.initial import initialise
from trainer.model.kernels import build_kernel
from trainer.model.layers import Dropout, LayerNorm, LearnedPositions, VocabularyParallelEmbedding
from trainer.model.loss import LanguageModelHead
from trainer.model.positions import Rotary
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import sharding_of

TIED_KEY = "embedding"
TIED_NAME = "embedding.word.weight"


@dataclass(frozen=True)
class Layer:
    """One entry of the model: the module's class with its arguments, built by the stage that owns it.

    `prefix` makes the parameters' logical names. Layers with the same `tied_key` share one weight; `forward`
    replaces the module's own forward in the later of them.
    """

    kind: type[nn.Module]
    arguments: tuple[Any, ...]
    prefix: str
    tied_key: str | None = None
    forward: Callable[[Any, Any], Any] | None = None


def gpt_layers(
    model: ModelSection,
    vocabulary_size: int,
    mesh: Mesh,
    head: LanguageModelHead,
    documents: DocumentRules | None = None,
    dtype: str = "fp32",
    compiler: Compiler | None = None,
    in_float8: bool = False,
) -> list[Layer]:
    """The whole model, first layer first: token ids [batch, sequence] in, hidden states for `head.loss` out.

    With `documents` the layers between hand on (hidden states, document numbers) instead of hidden states alone.
    `dtype`: the card's `precision.dtype`, by which the attention kernel is chosen. `compiler`: compiles the blocks.
    `in_float8`: their linear layers multiply in 8-bit floats.
    Raises CardError when the attention that the card requires is not possible here.
    """
    embedding = (
        VocabularyParallelEmbedding,
        (vocabulary_size, model.hidden_size, model.init_std, mesh, documents),
        "embedding.word.",
    )
    resets_positions = documents is not None and documents.reset_positions
    rotary = None
    if model.position_embedding == "rotary":
        rotary = Rotary(model.head_size, model.rotary_base, mesh.device, resets_positions)
    layers = [Layer(*embedding, tied_key=TIED_KEY)]
    if model.position_embedding == "absolute":
        arguments = (model.positions, model.hidden_size, model.init_std, mesh, documents)
        layers.append(Layer(LearnedPositions, arguments, "embedding.position."))
    norm = (model.hidden_size, model.layernorm_epsilon, mesh)
    if model.embedding_layernorm:
        layers.append(Layer(LayerNorm, norm, "embedding.norm."))
    if model.hidden_dropout > 0.0:
        layers.append(Layer(Dropout, (model.hidden_dropout,), "embedding.dropout."))
    block = (model, mesh, build_kernel(model, mesh, documents, dtype), rotary)
    layers += [
        Layer(TransformerBlock, (*block, recomputed_part(model, index), compiler, in_float8), f"blocks.{index}.")
        for index in range(model.layers)
    ]
    layers.append(Layer(LayerNorm, norm, "final_norm."))
    layers.append(Layer(*embedding, tied_key=TIED_KEY, forward=head.attach))
    return layers


def replicated_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that every tensor rank holds whole, in a fixed order.

    Each tensor rank has a share of their gradients (see `layers.py`); the shares must be summed before a step.
    """
    every = {id(item): item for module in modules for item in module.parameters()}
    return [item for item in every.values() if sharding_of(item).dim is None]


def logical_parameters(stage: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Logical name and parameter of everything on a stage, given its (prefix, module) pairs; each parameter once."""
    seen: set[str] = set()
    for prefix, module in stage:
        for name, parameter in module.named_parameters():
            if prefix + name not in seen:
                seen.add(prefix + name)
                yield prefix + name, parameter


def initialise_stage(stage: Sequence[tuple[str, nn.Module]], seed: int, mesh: Mesh) -> None:
    """Set the initial weights of a stage: functions of the seed and the logical names alone."""
    for name, parameter in logical_parameters(stage):
        initialise(name, parameter, seed, mesh.tensor_rank)
