"""Which optimizer a card asks for; AdamW, which most ask for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from trainer.config.card import OptimizerSection
from trainer.contract.record import Record
from trainer.optim.adam8bit import Adam8bit
from trainer.optim.interface import MOMENTS, FlatStateOptimizer, TrainingOptimizer
from trainer.optim.lamb import FLOOR, Lamb, LambRules, LayerNoiseLamb, NormOf
from trainer.parallel.mesh import Mesh

# Torch has its compiler leave these alone, and loads it for that with the first optimizer: a seventh
# of a worker's start. No compiled code of this trainer calls them.
for _method in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _plain = inspect.unwrap(getattr(torch.optim.Optimizer, _method))
    setattr(_plain, "__dynamo_disable", _plain)

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


def build_optimizer(
    groups: list[dict[str, Any]],
    section: OptimizerSection,
    learning_rate: float,
    embeddings: Collection[str],
    mesh: Mesh,
) -> TrainingOptimizer:
    """The optimizer of `section` over `groups`. `embeddings`: names of weights whose moments are
    never in 8 bits.

    They are also those that the last stage holds copies of.
    """
    betas = (section.beta1, section.beta2)
    if section.type == "adam8bit":
        return Adam8bit(groups, learning_rate, betas, epsilon=section.epsilon, in_full=embeddings)
    if section.type == "lamb":
        tied_copies = () if mesh.is_first_stage else embeddings
        kind = LayerNoiseLamb if section.lamb_variant == "layer-noise" else Lamb
        return kind(
            groups, learning_rate, betas, section.epsilon, lamb_rules(section), mesh, tied_copies
        )
    return AdamW(groups, learning_rate, betas, section.epsilon)


VARIANTS = {
    "paper": LambRules(),
    "apex": LambRules(adapts_all=False),
    "floored": LambRules(floor=FLOOR),
    "embedding-lr": LambRules(floor=FLOOR, corrects_mean=False),
    "layer-noise": LambRules(floor=FLOOR),
}


def lamb_rules(section: OptimizerSection) -> LambRules:
    """What a card's variant of LAMB means."""
    rules = replace(VARIANTS[section.lamb_variant], norm_of=NormOf(section.lamb_norms))
    if section.lamb_variant == "embedding-lr":
        return replace(rules, embedding_alpha=section.embedding_alpha)
    return rules


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for torch optimizers, decayed first, each in the given order.

    Every pipeline stage must have both, because the stages add up their gradient norms group by group.
    Raises ValueError when one would be empty.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for _, parameter in named:
        (kept if parameter.dim() == 1 else decayed).append(parameter)
    if not decayed or not kept:
        raise ValueError(
            "parallel.partition: a pipeline stage has no weights or no LayerNorm and biases; every stage needs a "
            "transformer block, use type:transformer|embedding"
        )
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
