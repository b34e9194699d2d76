"""AdamW over partitions: torch's numbers, and the same for an element wherever a partition begins
and ends.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
