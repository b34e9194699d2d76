"""What a kind of model is: the protocol that each family implements, and what all of them are made
of.

A family says of which layers a model consists and what their tensors are called, what of the data's
fields a micro batch is made of, what the loss is, and what is tied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from trainer.config.card import DataSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_part
from trainer.contract.record import Record
from trainer.model.attention import BlockSetup
from trainer.model.block import TransformerBlock
from trainer.model.compiled import Compiler
from trainer.model.initial import initialise
from trainer.model.loss import LanguageModelHead
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch
from trainer.parallel.shard import sharding_of

TIED_KEY, TIED_NAME = "embedding", "embedding.word.weight"


class Layer(Record):
    """One entry of the model: the module's class with its arguments, built by the stage that owns
    it.

    `prefix` makes the parameters' logical names. Layers with the same `tied_key` share one weight;
    `forward` replaces the module's own forward.
    """

    kind: type[nn.Module]
    arguments: tuple[Any, ...]
    prefix: str
    tied_key: str | None = None
    forward: Callable[[Any, Any], Any] | None = None


def block_layers(
    setup: BlockSetup,
    kind: type[TransformerBlock] = TransformerBlock,
    *rest: Any,
    first: int = 0,
) -> list[Layer]:
    """The model's blocks of a kind, numbered from `first` on. `rest`: what the kind takes beside
    the set-up, and what of a block is recomputed.
    """
    return [
        Layer(kind, (setup, recomputed_part(setup.model, index), *rest), f"blocks.{first + index}.")
        for index in range(setup.model.layers)
    ]


class LossParts(Record):
    """Names of what a head measures of each micro batch: `losses`, of which the loss is the sum,
    and `scores`, which it measures where nothing is trained. Each is a mean over the micro batch,
    as the loss is.

    The first of the losses is "lm".
    """

    losses: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()


class Family(ABC):
    """A kind of model. One object of each is in `trainer.model.families`.

    `tied_name`: the logical name of the weight of which the last stage has a copy, by default the
    word embedding's. `fields`: what
    the data gives of each micro batch, by name; a family may take them as a plain tuple in this
    order instead.
    """

    tied_name: ClassVar[str] = TIED_NAME
    fields: ClassVar[tuple[str, ...]]

    def parts(self, config: TrainerConfig) -> LossParts:
        """What the head measures beside the loss, see `LossParts`. By default nothing: the loss is
        one.
        """
        return LossParts()

    @abstractmethod
    def head(self, config: TrainerConfig, mesh: Mesh) -> LanguageModelHead:
        """The model's end, one object for each engine."""

    @abstractmethod
    def layers(
        self, config: TrainerConfig, mesh: Mesh, head: Any, compiler: Compiler | None
    ) -> list[Layer]:
        """The whole model, first layer first: a batch's first part in, what `head.loss` takes out.

        Between layers go hidden states [batch, sequence, features], or these and a number for each
        token, see `plain_mark`. Raises CardError for what is not possible on this device.
        """

    @abstractmethod
    def plain_mark(self, data: DataSection) -> int | None:
        """The number, int32, that goes with an ordinary token from layer to layer; None where none
        go with them.
        """

    @abstractmethod
    def prepared(self, micro_batch: Any, length: int, config: TrainerConfig) -> Batch:
        """What the data gave of a micro batch, as the stages take it, each sample cut to its first
        `length` tokens.
        """

    def begins_xavier(self, name: str, config: TrainerConfig) -> bool:
        """Whether the matrix `name` begins in Xavier's distribution, as the card says; else in the
        normal one.
        """
        own = config.optimizer.embedding_init if name == self.tied_name else None
        return (own or config.model.init_method) == "xavier"

    @abstractmethod
    def tokens(self, micro_batch: Any) -> Tensor:
        """Of what the data gave: the tokens [batch, sequence] by which a sample is known again."""


def replicated_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that every tensor rank holds whole, in a fixed order.

    Each tensor rank has a share of their gradients (see `layers.py`); the shares must be summed
    before a step.
    """
    every = {id(item): item for module in modules for item in module.parameters()}
    return [item for item in every.values() if sharding_of(item).dim is None]


def logical_parameters(
    stage: Sequence[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Logical name and parameter of everything on a stage, given its (prefix, module) pairs; each
    parameter once.
    """
    seen: set[str] = set()
    for prefix, module in stage:
        for name, parameter in module.named_parameters():
            if prefix + name not in seen:
                seen.add(prefix + name)
                yield prefix + name, parameter


def initialise_stage(
    stage: Sequence[tuple[str, nn.Module]],
    seed: int,
    mesh: Mesh,
    is_xavier: Callable[[str], bool] = lambda name: False,
) -> None:
    """Set the initial weights of a stage: functions of the seed, the logical names and `is_xavier`
    of them alone.
    """
    for name, parameter in logical_parameters(stage):
        initialise(
            name, parameter, seed=seed, tensor_rank=mesh.tensor_rank, is_xavier=is_xavier(name)
        )
