"""AdamW in fp32 on the master weights, with state that exists before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.config import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(groups: list[dict[str, Any]], section: OptimizerSection, learning_rate: float) -> torch.optim.AdamW:
    """torch's AdamW with decoupled decay; one pass over memory per step (the fused kernel of CPU and CUDA)."""
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(section.beta1, section.beta2), eps=section.epsilon, fused=True
    )


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create: zero moments, zero step count. Changes no number."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name in MOMENTS:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()


def steps_done(optimizer: torch.optim.Optimizer) -> int:
    """Updates so far, the same for all parameters; 0 before the first."""
    counts = [int(state["step"].item()) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0)


def set_steps_done(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the update count that AdamW's bias correction reads. Call after `materialise`."""
    for state in optimizer.state.values():
        count: Tensor = state["step"]
        count.fill_(float(steps))
