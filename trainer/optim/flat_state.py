"""State that lies in flat fp32 tensors beside the masters: one of a partition's size for each number of an element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.optim.interface import PartitionShare, TrainingOptimizer


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
                        state[name] = torch.zeros_like(partition, memory_format=torch.preserve_format).detach()

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
