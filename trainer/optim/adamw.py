"""AdamW in fp32 on the master weights, with state that exists before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from trainer.contract.record import Record
from trainer.optim.interface import MOMENTS, FlatStateOptimizer

LANES = 16  # fp32 numbers in the widest vector register of a CPU


class _Tail(Record):
    """The last elements of a partition that fill no vector register, before a step: in the order of
    the kernel.
    """

    group: dict[str, Any]
    elements: int
    live: list[Tensor]
    padded: list[Tensor]
    step: Tensor


class AdamW(torch.optim.AdamW, FlatStateOptimizer):
    """torch's AdamW with decoupled decay; moments are fp32 partitions like the masters.

    It steps with the fused kernel: one pass over memory. On CPUs that kernel takes the last
    elements of a tensor, where they fill no vector register, one by one, and rounds them otherwise
    than all others. Here they are stepped in a full register of their own, so that an element's
    update does not depend on where in a partition it lies, and tied copies of a weight stay equal.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
    ):
        super().__init__(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
        self._tails: list[_Tail] = []
        self.register_step_pre_hook(self._keep_tails)
        self.register_step_post_hook(self._step_tails)

    @torch.no_grad()
    def _keep_tails(self, *_: Any) -> None:
        self._tails = []
        for group in self.param_groups:
            for partition in group["params"]:
                elements = partition.numel() % LANES
                if not elements or not partition.is_cpu or partition.grad is None:
                    continue
                state = self.state[partition]
                live = [
                    tensor[-elements:]
                    for tensor in (partition.data, partition.grad, *map(state.get, MOMENTS))
                ]
                padded = [pad(tensor, (0, LANES - elements)) for tensor in live]
                self._tails.append(_Tail(group, elements, live, padded, step=state["step"].clone()))

    @torch.no_grad()
    def _step_tails(self, *_: Any) -> None:
        for tail in self._tails:
            group, (beta1, beta2) = tail.group, tail.group["betas"]
            weights, gradient, mean, square = tail.padded
            adamw(
                params=[weights],
                grads=[gradient],
                exp_avgs=[mean],
                exp_avg_sqs=[square],
                max_exp_avg_sqs=[],
                state_steps=[tail.step],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            for live, stepped in zip(tail.live, tail.padded, strict=True):
                live.copy_(stepped[: tail.elements])
        self._tails = []
