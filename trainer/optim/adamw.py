"""AdamW in fp32 on the master weights, with state that exists before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.optim.interface import MOMENTS, Share, TrainingOptimizer


class AdamW(torch.optim.AdamW, TrainingOptimizer):
    """torch's AdamW with decoupled decay; moments are fp32 partitions like the masters."""

    def materialise(self, shares: Iterable[Share]) -> None:
        """Create what the first step would create; changes no number."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    for name in MOMENTS:
                        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()

    def moments(self, share: Share) -> dict[str, Tensor]:
        """Live views."""
        state = self.state[self.partition(share.group)]
        return {name: state[name].narrow(0, share.start, share.numel) for name in MOMENTS}

    @torch.no_grad()
    def set_moments(self, share: Share, moments: Mapping[str, Tensor]) -> None:
        """Copy them into place; views that `moments` gave are there already."""
        for name, view in self.moments(share).items():
            if moments[name].data_ptr() != view.data_ptr():
                view.copy_(moments[name])
