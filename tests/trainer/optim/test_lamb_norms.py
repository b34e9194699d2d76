"""The four ways of taking LAMB's norms, on slices and on cut partitions, beside one process that
follows the formulas.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import tiny
from tests.trainer.spawn import run_ranks
from trainer.config.model import OptimizerSection
from trainer.optim.build import build_optimizer
from trainer.optim.interface import PartitionShare
from trainer.parallel.mesh import Mesh

RATE, BETAS, EPSILON, DECAY, STEPS = 1e-2, (0.9, 0.999), 1e-6, 0.1, 8
# of the first each tensor rank has half of the rows, the second all hold
SHAPES = {"cut": (12, 10), "alike": (7,)}
NORMS = ("exact", "local", "mean-weight", "stale")


def course() -> list[dict[str, Tensor]]:
    """The weights at the start, and the gradients of every step."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.linspace(0.2, 2.0, 12).unsqueeze(1)  # slices whose norms differ
    drawn = [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(1 + STEPS)
    ]
    return [{"cut": each["cut"] * spread, "alike": each["alike"]} for each in drawn]


def by_formula(norms: str, tensor: int) -> Tensor:
    """Both weights, flat and one behind the other, in fp64: what `lambtp` does on so many tensor
    ranks.
    """
    (start, *gradients), (beta1, beta2) = course(), BETAS
    ended = []
    for name in SHAPES:
        pieces = tensor if name == "cut" else 1
        whole = start[name].double()
        w, m, v = (
            list(one.chunk(pieces))
            for one in (whole, torch.zeros_like(whole), torch.zeros_like(whole))
        )
        before = 0.0  # the whole direction's norm, one step ago
        for t, each in enumerate(gradients, 1):
            u = []
            for rank, g in enumerate(each[name].double().chunk(pieces)):
                m[rank], v[rank] = (
                    beta1 * m[rank] + (1 - beta1) * g,
                    beta2 * v[rank] + (1 - beta2) * g * g,
                )
                root = (v[rank] / (1 - beta2**t)).sqrt() + EPSILON
                u.append(m[rank] / (1 - beta1**t) / root + DECAY * w[rank])
            sizes, lengths = ([float(one.norm()) for one in several] for several in (w, u))
            size, length = math.hypot(*sizes), math.hypot(*lengths)
            for rank in range(pieces):
                if norms == "exact":
                    ratio = size / length
                elif norms == "local":
                    ratio = sizes[rank] / lengths[rank]
                elif t == 1:
                    ratio = max(sizes[rank], 1e-5 * whole.numel()) / lengths[rank]
                elif norms == "mean-weight":
                    ratio = size / math.sqrt(pieces) / lengths[rank]
                else:
                    ratio = size / before
                w[rank] = w[rank] - RATE * ratio * u[rank]
            before = length
        ended.append(torch.cat(w).flatten())
    return torch.cat(ended)


def stepped(tensor: int) -> dict[str, tuple[int, int, list[Tensor]]]:
    """By the norms: tensor rank, data rank, and this rank's elements of both weights after all
    steps.
    """
    mesh = Mesh.create(tiny(1, tensor).parallel, torch.device("cpu"))
    return {norms: (mesh.tensor_rank, mesh.data_rank, _stepped(norms, mesh)) for norms in NORMS}


def _stepped(norms: str, mesh: Mesh) -> list[Tensor]:
    def mine(whole: dict[str, Tensor]) -> Tensor:
        flat = torch.cat(
            [whole["cut"].chunk(mesh.tensor)[mesh.tensor_rank].flatten(), whole["alike"]]
        )
        return flat.tensor_split(mesh.data)[mesh.data_rank].clone()

    start, *gradients = course()
    partition = torch.nn.Parameter(mine(start))
    section = OptimizerSection.model_validate(
        {"type": "lamb", "lamb_norms": norms, "epsilon": EPSILON}
    )
    optimizer = build_optimizer(
        [{"params": [partition], "weight_decay": DECAY}], section, RATE, (), mesh
    )
    rows = math.prod(SHAPES["cut"]) // mesh.tensor
    places = torch.arange(rows + SHAPES["alike"][0]).tensor_split(mesh.data)[mesh.data_rank]
    first, last = int(places[0]), int(places[-1]) + 1
    shares, begin = [], 0
    for name, numel in (("cut", rows), ("alike", SHAPES["alike"][0])):
        low, high = max(begin, first), min(begin + numel, last)
        if low < high:
            shares.append(
                PartitionShare(
                    name, 0, low - first, high - low, low - begin, SHAPES[name], name == "cut"
                )
            )
        begin += numel
    optimizer.materialise(shares)
    for each in gradients:
        partition.grad = mine(each)
        optimizer.step()
    return [partition.detach().narrow(0, share.start, share.numel).clone() for share in shares]


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1), (2, 2)])
def test_each_kind_of_norms_is_its_formula(tensor: int, data: int) -> None:
    ranks = run_ranks(stepped, tensor * data, tensor)
    for norms in NORMS:
        found = sorted((rank[norms] for rank in ranks), key=lambda item: item[:2])
        slices = [
            torch.cat([part for rank, _, parts in found if rank == number for part in parts])
            for number in range(tensor)
        ]
        rows = math.prod(SHAPES["cut"]) // tensor
        assert all(torch.equal(one[rows:], slices[0][rows:]) for one in slices)
        whole = torch.cat([*(one[:rows] for one in slices), slices[0][rows:]])
        torch.testing.assert_close(whole.double(), by_formula(norms, tensor), rtol=2e-6, atol=2e-6)
