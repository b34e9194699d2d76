"""What the engine needs of an optimizer beside torch's interface, and where parameters lie in
ZeRO-1's partitions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.contract.record import Record
from trainer.parallel.shard import sharding_of
from trainer.parallel.state import EXTRA_KINDS

MOMENTS = ("exp_avg", "exp_avg_sq")
(NOISE,) = EXTRA_KINDS
# elements worked on at a time: what a cache holds, or many for few launches
CPU_CHUNK, CHUNK = 1 << 18, 1 << 22


class PartitionShare(Record):
    """One parameter's elements in this rank's flat partition of a parameter group.

    `name`: logical. `group`: number of the group. `start`, `numel`: the run of the partition.
    `first`: the run's first element, counted in the flattened local slice. `global_shape`: of the
    logical weight. `is_sharded`: each tensor rank holds a slice of its own; else all hold the whole
    weight.
    """

    name: str
    group: int
    start: int
    numel: int
    first: int
    global_shape: tuple[int, ...]
    is_sharded: bool = False

    @property
    def whole_numel(self) -> int:
        """Elements of the logical weight."""
        return math.prod(self.global_shape)


def shares_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[PartitionShare]:
    """This rank's share of each parameter, after ZeRO has cut the groups; none of what it holds no
    element of.
    """
    shares = []
    for name, parameter in named:
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            flat, local = mapping.hp_fragment_address, mapping.lp_fragment_address
            sharding = sharding_of(parameter)
            whole, sharded = sharding.global_shape(tuple(parameter.shape)), sharding.dim is not None
            group = mapping.param_group_index
            shares.append(
                PartitionShare(
                    name,
                    group,
                    flat.start,
                    numel=flat.numel,
                    first=local.start,
                    global_shape=whole,
                    is_sharded=sharded,
                )
            )
    return shares


class UpdateNumbers(Record):
    """The numbers of one step of a parameter group. `mean_bias`, `root_bias`: what moments are
    divided by.
    """

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    learning_rate: float
    step: int
    mean_bias: float
    root_bias: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, corrects_mean: bool = True) -> UpdateNumbers:
        beta1, beta2 = group["betas"]
        return cls(
            beta1=beta1,
            beta2=beta2,
            epsilon=group["eps"],
            decay=group["weight_decay"],
            learning_rate=group["lr"],
            step=step,
            mean_bias=1.0 - beta1**step if corrects_mean else 1.0,
            root_bias=math.sqrt(1.0 - beta2**step),
        )

    def advance(self, mean: Tensor, squares: Tensor, gradient: Tensor) -> None:
        """Take a gradient into the moments."""
        mean.mul_(self.beta1).add_(gradient * (1.0 - self.beta1))
        squares.mul_(self.beta2).add_((gradient * gradient).mul_(1.0 - self.beta2))

    def root(self, squares: Tensor) -> Tensor:
        """What a step divides by: a new tensor."""
        return squares.sqrt().div_(self.root_bias).add_(self.epsilon)

    def scaled(self, moment: Tensor, squares: Tensor) -> Tensor:
        """A moment over the root of the second one, both with their biases corrected: a new tensor."""
        return (moment / self.mean_bias).div_(self.root(squares))


def chunk_elements(device: torch.device) -> int:
    """How many elements of a partition are worked on at a time where that takes temporary tensors."""
    if device.type == "cpu":
        return CPU_CHUNK
    return CHUNK


class TrainingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer with some numbers per element, whose parameters are ZeRO-1's flat partitions,
    one per group.

    `state_names`: of these numbers, of those in `trainer.parallel.state`. A checkpoint holds a
    tensor of each. `state[partition]["step"]` counts the updates; all partitions agree.
    """

    state_names: ClassVar[tuple[str, ...]] = MOMENTS

    @abstractmethod
    def materialise(self, shares: Iterable[PartitionShare]) -> None:
        """Create the state before the first step: all zero, and no update counted. Once, after ZeRO
        has cut.

        Collective: an optimizer may have to know what the other ranks hold.
        """

    @abstractmethod
    def moments(self, share: PartitionShare) -> dict[str, Tensor]:
        """The state of a share, under `state_names`: fp32 [share.numel] each, to be read, or filled
        by a load.

        They may be copies: what is filled in counts after `set_moments`.
        """

    @abstractmethod
    def set_moments(self, share: PartitionShare, moments: Mapping[str, Tensor]) -> None:
        """Take the moments of a share, shaped as `moments` gives them, on any device."""

    def tensor_sums(self) -> dict[str, list[float]]:
        """What a resume needs beside the state of the elements: some numbers of each whole tensor,
        by its name.

        The same on all ranks; empty where an optimizer keeps none.
        """
        return {}

    def set_tensor_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Go on with what `tensor_sums` gave, on whatever topology. Collective; after
        `set_steps_done`.

        Where nothing was kept (`sums` is empty), an optimizer makes them again as well as it can.
        """

    def partition(self, group: int) -> Tensor:
        """The flat fp32 master weights of a group."""
        found: Tensor = self.param_groups[group]["params"][0]
        return found

    def steps_done(self) -> int:
        """Updates so far; 0 before the first."""
        return max(
            (int(state["step"].item()) for state in self.state.values() if "step" in state),
            default=0,
        )

    def set_steps_done(self, steps: int) -> None:
        """Set the update count that the bias correction reads. Call after `materialise`."""
        for state in self.state.values():
            state["step"].fill_(float(steps))


class FlatStateOptimizer(TrainingOptimizer):
    """Keeps `state[partition][NAME]`, fp32 and of the partition's shape, for each of `state_names`."""

    def materialise(self, shares: Iterable[PartitionShare]) -> None:
        """Create what the first step would create; changes no number."""
        for group in self.param_groups:
            for partition in group["params"]:
                state = self.state[partition]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=partition.device)
                    for name in self.state_names:
                        state[name] = torch.zeros_like(
                            partition, memory_format=torch.preserve_format
                        ).detach()

    def moments(self, share: PartitionShare) -> dict[str, Tensor]:
        """Live views."""
        state = self.state[self.partition(share.group)]
        return {name: state[name].narrow(0, share.start, share.numel) for name in self.state_names}

    @torch.no_grad()
    def set_moments(self, share: PartitionShare, moments: Mapping[str, Tensor]) -> None:
        """Copy them into place; views that `moments` gave are there already."""
        for name, view in self.moments(share).items():
            if moments[name].data_ptr() != view.data_ptr():
                view.copy_(moments[name])
