"""LAMB: Adam whose step of each tensor is as long as the tensor's own norm says (You et al., arXiv 1904.00962).

The variants differ in which tensors adapt, and in how a ratio is made; `LambRules` says it. Norms are of whole logical
tensors, so that tensor parallelism, pipeline stages and ZeRO-1 change nothing, but where `NormOf` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trainer.optim.flat_state import FlatStateOptimizer
from trainer.optim.interface import MOMENTS, PartitionShare, chunk_elements
from trainer.optim.tensor_norms import TensorNorms
from trainer.parallel.mesh import Mesh

FLOOR = 1e-5  # of a weight's norm, for each of its elements: a bias that begins at zero moves
WEIGHT = 0  # the first of the sums; the directions' follow


class NormOf(StrEnum):
    """Of what the norms in a ratio are, where tensor ranks hold slices. All but EXACT depend on their number."""

    EXACT = "exact"  # whole tensors
    LOCAL = "local"  # this rank's slices
    MEAN_WEIGHT = "mean-weight"  # the weight: the root mean square over the slices; the direction: this rank's slice


@dataclass(frozen=True)
class LambRules:
    """`adapts_all`: tensors without weight decay adapt too. `floor`: least norm of a weight, for each of its elements.

    `corrects_mean`: the first moment's bias is corrected. `embedding_alpha`: a tensor of n elements steps 1 + alpha x n
    / (elements of the largest tensor) times as far.
    """

    adapts_all: bool = True
    floor: float = 0.0
    corrects_mean: bool = True
    embedding_alpha: float = 0.0
    norm_of: NormOf = NormOf.EXACT


class LambStep(NamedTuple):
    """The numbers of one step of a parameter group. `mean_bias`, `root_bias`: what moments are divided by."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    learning_rate: float
    step: int
    mean_bias: float
    root_bias: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, corrects_mean: bool) -> LambStep:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        mean_bias = 1.0 - beta1**step if corrects_mean else 1.0
        return cls(beta1, beta2, group["eps"], decay, group["lr"], step, mean_bias, math.sqrt(1.0 - beta2**step))

    def scaled(self, moment: Tensor, squares: Tensor) -> Tensor:
        """A moment over the root of the second one, both with their biases corrected: a new tensor."""
        root = squares.sqrt().div_(self.root_bias).add_(self.epsilon)
        return (moment / self.mean_bias).div_(root)


class Chunk(NamedTuple):
    """Live views of some elements of one tensor: master weights, gradient, and the state by name."""

    weights: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class Lamb(FlatStateOptimizer):
    """LAMB with decoupled decay inside the ratio, on fp32 partitions.

    A ratio is 1 where the weight or its direction is zero. Gradients come clipped already. Only single multiplications,
    additions, divisions and roots: each is rounded alike wherever an element lies, so that tied copies stay equal.
    """

    state_names: ClassVar[tuple[str, ...]] = MOMENTS
    directions: ClassVar[int] = 1

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        rules: LambRules,
        mesh: Mesh,
        tied_copies: Collection[str] = (),
    ):
        """`tied_copies`: names of weights on this rank that another stage owns."""
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})
        self.rules = rules
        self._mesh, self._tied_copies = mesh, tied_copies
        self._shares: dict[Tensor, list[PartitionShare]] = {}
        self._norms: TensorNorms

    def materialise(self, shares: Iterable[PartitionShare]) -> None:
        """Zero state; agree with all ranks on the tensors that there are. What lies outside of shares never moves."""
        shares = list(shares)
        super().materialise(shares)
        for state in self.state.values():
            state["step"] = torch.zeros((), dtype=torch.float32)  # in host memory: it is read at every step
        for share in shares:
            self._shares.setdefault(self.partition(share.group), []).append(share)
        self._norms = TensorNorms(self._mesh, shares, 1 + self.directions, self._tied_copies)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the shares of every partition that has a gradient. Collective over all ranks."""
        loss = None if closure is None else closure()
        stepped = []
        for group in self.param_groups:
            for partition in group["params"]:
                if partition.grad is not None:
                    state = self.state[partition]
                    state["step"] += 1
                    numbers = LambStep.of(group, int(state["step"].item()), self.rules.corrects_mean)
                    stepped.append((partition, numbers))
        self._norms.clear()
        for partition, numbers in stepped:
            for share, chunk in self._chunks(partition):
                self.advance(chunk, numbers)
                for kind, values in enumerate((chunk.weights, *self.directions_of(chunk, numbers)), WEIGHT):
                    self._norms.add(kind, share, values)
        self._norms.reduce()
        for partition, numbers in stepped:
            rates = [self._rates(kind, numbers) for kind in range(WEIGHT + 1, WEIGHT + 1 + self.directions)]
            for share, chunk in self._chunks(partition):
                number = self._norms.number[share.name]
                self.move(chunk, numbers, [each[number] for each in rates])
        return loss

    # ------------------------------------------------------------------ one chunk
    def advance(self, chunk: Chunk, numbers: LambStep) -> None:
        """Take the gradient into the moments."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        mean.mul_(numbers.beta1).add_(chunk.gradient * (1.0 - numbers.beta1))
        squares.mul_(numbers.beta2).add_((chunk.gradient * chunk.gradient).mul_(1.0 - numbers.beta2))

    def directions_of(self, chunk: Chunk, numbers: LambStep) -> tuple[Tensor, ...]:
        """In which directions the weights go, each before its ratio: new tensors, made alike before and after norms."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        direction = numbers.scaled(mean, squares)
        return (direction.add_(chunk.weights * numbers.decay) if numbers.decay else direction,)

    def move(self, chunk: Chunk, numbers: LambStep, rates: list[Tensor]) -> None:
        """Move the weights along each direction, by its rate (a scalar)."""
        for direction, rate in zip(self.directions_of(chunk, numbers), rates, strict=True):
            chunk.weights.sub_(direction.mul_(rate))

    def _chunks(self, partition: Tensor) -> Iterator[tuple[PartitionShare, Chunk]]:
        size = chunk_elements(partition.device)
        state = {name: self.state[partition][name] for name in self.state_names}
        assert partition.grad is not None
        for share in self._shares.get(partition, ()):
            for start in range(share.start, share.start + share.numel, size):
                place = slice(start, min(start + size, share.start + share.numel))
                held = {name: tensor[place] for name, tensor in state.items()}
                yield share, Chunk(partition.data[place], partition.grad[place], held)

    # ------------------------------------------------------------------ ratios
    def _rates(self, kind: int, numbers: LambStep) -> Tensor:
        """What each tensor's direction is multiplied by: learning rate, ratio and embedding factor, fp32 [tensors]."""
        norms, rules = self._norms, self.rules
        first = numbers.step == 1 and rules.norm_of is NormOf.MEAN_WEIGHT
        if rules.norm_of is NormOf.EXACT:
            weight, direction = norms.whole(WEIGHT), norms.whole(kind)
        elif rules.norm_of is NormOf.LOCAL or first:
            weight, direction = norms.of_slice(WEIGHT), norms.of_slice(kind)
        else:
            slices = torch.where(norms.is_sharded, float(self._mesh.tensor), 1.0)
            weight, direction = norms.whole(WEIGHT) / slices.sqrt(), norms.of_slice(kind)
        floor = FLOOR if first else rules.floor
        if floor:
            weight = torch.maximum(weight, norms.elements * floor)
        ratio = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)
        if not (rules.adapts_all or numbers.decay):
            ratio = torch.ones_like(ratio)
        factor = 1.0 + rules.embedding_alpha * norms.elements / norms.elements.max()
        return (ratio * factor * numbers.learning_rate).float()
