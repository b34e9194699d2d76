"""Gradients of micro batches as autograd makes them, and as the optimizer is given them; to be run
by `run_ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.trainer.cases import CPU, batches
from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import sharding_of


@dataclass
class Made:
    """What one rank's micro batches gave a parameter: sums in fp64 of the gradients and of their
    sizes.
    """

    total: Tensor
    size: Tensor
    terms: int = 0


class Given(Record):
    """Elements [first, first + numel) of the flattened local slice, as the optimizer was given
    them.
    """

    name: str
    first: int
    gradient: Tensor


class Seen(Record):
    """One rank's part of one step. `cut`: whether a parameter is cut over tensor ranks."""

    tensor_rank: int
    data: int
    made: dict[str, Made]
    given: list[Given]
    cut: dict[str, bool]


def watch(engine: Engine) -> tuple[dict[str, Made], list[Given]]:
    """Two records that fill during each step of a bf16 engine."""
    made: dict[str, Made] = {}
    given: list[Given] = []
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    zero: Any = engine._pipeline.optimizer
    accumulate = zero._update_hp_grad

    def record(lp: Any, *arguments: Any, **options: Any) -> None:
        if lp.grad is not None:
            gradient = lp.grad.detach().flatten().double()
            entry = made.setdefault(
                names[id(lp)], Made(torch.zeros_like(gradient), torch.zeros_like(gradient))
            )
            entry.total += gradient
            entry.size += gradient.abs()
            entry.terms += 1
        accumulate(lp, *arguments, **options)

    def before(*_: Any) -> None:
        for share in engine._shares.values():
            gradient = engine._trained[0].partition(share.group).grad
            assert gradient is not None and gradient.dtype == torch.float32
            part = gradient.narrow(0, share.start, share.numel).clone()
            given.append(Given(share.name, share.first, part))

    zero._update_hp_grad = record
    engine._trained[0].register_step_pre_hook(before)
    return made, given


def steps(config: TrainerConfig, micro_batches: tuple[int, ...]) -> list[Seen]:
    """One step of a bf16 card that does not clip, for each number of micro batches a replica."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    cut = {
        name: sharding_of(parameter).dim is not None
        for name, parameter in engine.named_parameters()
    }
    made, given = watch(engine)
    seen = []
    for step, count in enumerate(micro_batches):
        made.clear()
        given.clear()
        size = count * config.batch.micro_batch_size * mesh.data
        engine.train_step(batches(config, mesh, step, size), size)
        seen.append(Seen(mesh.tensor_rank, mesh.data, dict(made), list(given), cut))
    engine._pipeline.destroy()
    return seen


def each(cards: list[TrainerConfig], micro_batches: tuple[int, ...]) -> list[list[Seen]]:
    """`steps` for topologies of one world, one after the other."""
    return [steps(config, micro_batches) for config in cards]


def worst(ranks: list[Seen]) -> tuple[float, str]:
    """The largest |given - exact| of any element, in units of fp32 rounding, and its parameter.

    The exact gradient is the sum of all micro batches' over all ranks that have a share of it, over
    the number of replicas. The unit of an element is 2^-24 x the sum of its terms' sizes x their
    number: the bound on the error of an fp32 sum, in whichever order it is taken.
    """
    exact: dict[tuple[str, int], Made] = {}
    for rank in ranks:
        for name, made in rank.made.items():
            key = (name, rank.tensor_rank if rank.cut[name] else 0)
            entry = exact.setdefault(
                key, Made(torch.zeros_like(made.total), torch.zeros_like(made.total))
            )
            entry.total += made.total / rank.data
            entry.size += made.size / rank.data
            entry.terms += made.terms
    largest = (0.0, "")
    covered: dict[tuple[str, int], int] = {}
    for rank in ranks:
        for part in rank.given:
            key = (part.name, rank.tensor_rank if rank.cut[part.name] else 0)
            entry, place = exact[key], slice(part.first, part.first + part.gradient.numel())
            gap = (part.gradient.double() - entry.total[place]).abs()
            unit = 2.0**-24 * entry.terms * entry.size[place]
            covered[key] = covered.get(key, 0) + part.gradient.numel()
            largest = max(largest, (float((gap / unit.clamp_min(1e-300)).max()), part.name))
    assert covered.keys() == exact.keys()
    assert all(count >= exact[key].total.numel() for key, count in covered.items())
    return largest
