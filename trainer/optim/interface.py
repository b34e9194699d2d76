"""What the engine needs of an optimizer beside torch's interface, and where parameters lie in ZeRO-1's partitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.shard import sharding_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Share:
    """One parameter's elements in this rank's flat partition of a parameter group.

    `name`: logical. `group`: number of the group. `start`, `numel`: the run of the partition. `first`: the run's first
    element, counted in the flattened local slice. `global_shape`: of the logical weight.
    """

    name: str
    group: int
    start: int
    numel: int
    first: int
    global_shape: tuple[int, ...]


def shares_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[Share]:
    """This rank's share of each parameter, after ZeRO has cut the groups; none of what it holds no element of."""
    shares = []
    for name, parameter in named:
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            flat, local = mapping.hp_fragment_address, mapping.lp_fragment_address
            whole = sharding_of(parameter).global_shape(tuple(parameter.shape))
            shares.append(Share(name, mapping.param_group_index, flat.start, flat.numel, local.start, whole))
    return shares


class TrainingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer with two moments per element, whose parameters are ZeRO-1's flat partitions, one per group.

    `state[partition]["step"]` counts the updates; all partitions agree.
    """

    @abstractmethod
    def materialise(self, shares: Iterable[Share]) -> None:
        """Create the state before the first step: zero moments, zero step count. Once, after ZeRO has cut."""

    @abstractmethod
    def moments(self, share: Share) -> dict[str, Tensor]:
        """The moments of a share, under the names of MOMENTS: fp32 [share.numel], to be read, or filled by a load.

        They may be copies: what is filled in counts after `set_moments`.
        """

    @abstractmethod
    def set_moments(self, share: Share, moments: Mapping[str, Tensor]) -> None:
        """Take the moments of a share, shaped as `moments` gives them, on any device."""

    def partition(self, group: int) -> Tensor:
        """The flat fp32 master weights of a group."""
        found: Tensor = self.param_groups[group]["params"][0]
        return found

    def steps_done(self) -> int:
        """Updates so far; 0 before the first."""
        return max((int(state["step"].item()) for state in self.state.values() if "step" in state), default=0)

    def set_steps_done(self, steps: int) -> None:
        """Set the update count that the bias correction reads. Call after `materialise`."""
        for state in self.state.values():
            state["step"].fill_(float(steps))
