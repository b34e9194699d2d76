"""AdamW over partitions: torch's numbers, and the same for an element wherever a partition begins
and ends.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.optim.accumulate import add_to_accumulated, clear_forgotten, forget_accumulated
from trainer.optim.build import LANES, AdamW
from trainer.optim.interface import MOMENTS, PartitionShare

RATE, BETAS, EPSILON, DECAY, STEPS = 1e-2, (0.9, 0.95), 1e-8, 0.1, 40


def course(size: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, generator=generator), [
        torch.randn(size, generator=generator) for _ in range(STEPS)
    ]


def stepped(start: Tensor, gradients: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and moments after all steps of one partition."""
    partition = torch.nn.Parameter(start.clone())
    optimizer = AdamW([{"params": [partition], "weight_decay": DECAY}], RATE, BETAS, EPSILON)
    share = PartitionShare("weight", 0, 0, start.numel(), 0, tuple(start.shape))
    optimizer.materialise([share])
    for gradient in gradients:
        partition.grad = gradient.clone()
        optimizer.step()
    assert optimizer.steps_done() == STEPS
    return partition.detach(), optimizer.moments(share)


@pytest.mark.parametrize("cut", [1, LANES - 1, LANES, 333, 995])
def test_a_partition_that_is_cut_steps_as_the_whole_one_does(cut: int) -> None:
    start, gradients = course(997)
    whole, moments = stepped(start, gradients)
    parts = [
        stepped(start[part], [gradient[part] for gradient in gradients])
        for part in (slice(cut), slice(cut, None))
    ]
    assert torch.equal(torch.cat([weights for weights, _ in parts]), whole)
    for name in MOMENTS:
        assert torch.equal(torch.cat([found[name] for _, found in parts]), moments[name])


@pytest.mark.parametrize("size", [5, 64, 997])
def test_it_is_torchs(size: int) -> None:
    start, gradients = course(size)
    found, _ = stepped(start, gradients)
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([parameter], RATE, BETAS, EPSILON, DECAY, fused=True)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        theirs.step()
    body = size - size % LANES
    assert torch.equal(found[:body], parameter.detach()[:body])
    torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------- accumulate
# Gradients in fp32: a step's first is written over what is there, and what had none in a step is
# zero.


def made(count: int) -> tuple[Any, list[nn.Parameter]]:
    """What the functions know of DeepSpeed's optimizer: a flat buffer, in parts of three."""
    flat = torch.zeros(3 * count)
    held = SimpleNamespace(
        fp32_groups_gradients=[list(flat.split(3))], fp32_groups_has_gradients=[[False] * count]
    )
    return held, [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(count)]


def add(held: Any, parameters: list[nn.Parameter], values: list[float | None]) -> None:
    for index, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        parameter.grad = None if value is None else torch.full((3,), value, dtype=torch.bfloat16)
        add_to_accumulated(held, parameter, 0, index)


def sums(held: Any) -> list[float]:
    return [float(part[0]) for part in held.fp32_groups_gradients[0]]


def test_a_step_begins_anew_without_a_pass_that_clears() -> None:
    held, parameters = made(3)
    add(held, parameters, [1.0, 2.0, float("nan")])
    add(held, parameters, [2.0**-10, 2.0, 1.0])
    assert sums(held)[:2] == [1.0 + 2.0**-10, 4.0], "in fp32"
    forget_accumulated(held)
    add(held, parameters, [5.0, None, 7.0])
    add(held, parameters, [1.0, None, 1.0])
    clear_forgotten(held)
    assert sums(held) == [6.0, 0.0, 8.0]
    forget_accumulated(held)
    clear_forgotten(held)
    assert sums(held) == [0.0, 0.0, 0.0]
