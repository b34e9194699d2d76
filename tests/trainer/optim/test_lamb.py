"""LAMB over partitions: the numbers of timm, the formulas of the other variants, nothing that depends on
partitions; and the four ways of taking its norms, on slices and on cut partitions, beside one process
that follows the formulas.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import FP32_LOSS, LEARNS, equal, tiny, train
from tests.trainer.resumes import END, HALF, resumed, straight, stretches
from tests.trainer.saved_layouts import saved_and_loaded
from tests.trainer.spawn import run_ranks
from tests.trainer.timm_lamb import timm_lamb
from trainer.config.card import TrainerConfig
from trainer.config.model import OptimizerSection
from trainer.optim.build import build_optimizer
from trainer.optim.interface import PartitionShare, TrainingOptimizer, UpdateNumbers
from trainer.optim.lamb import Chunk, LayerNoiseLamb
from trainer.parallel.mesh import Mesh

RATE, BETAS, EPSILON, DECAY, STEPS = 1e-2, (0.9, 0.999), 1e-6, 0.1, 12
SHAPES = {"decayed": ((40, 30), (17,)), "kept": ((30,), (5,))}  # tensors of the two groups
VARIANTS = ("paper", "apex", "floored", "embedding-lr", "layer-noise")
KINDS = [(variant, {}) for variant in VARIANTS]
KINDS += [("paper", {"lamb_norms": "stale"}), ("layer-noise", {"lamb_norms": "stale"})]


def course() -> tuple[dict[str, list[Tensor]], list[dict[str, list[Tensor]]]]:
    """Tensors of both groups, one of which begins at zero, and their gradients at every step."""
    generator = torch.Generator().manual_seed(5)

    def random() -> dict[str, list[Tensor]]:
        return {
            group: [torch.randn(shape, generator=generator) for shape in SHAPES[group]]
            for group in SHAPES
        }

    start = random()
    start["kept"][1].zero_()
    return start, [random() for _ in range(STEPS)]


def section(variant: str, **keys: Any) -> OptimizerSection:
    return OptimizerSection.model_validate(
        {"type": "lamb", "lamb_variant": variant, "epsilon": EPSILON, **keys}
    )


def cut(tensors: list[Tensor], first: int, last: int) -> Tensor:
    """Elements [first, last) of the group as ZeRO-1 lays it out."""
    return torch.cat([tensor.flatten() for tensor in tensors])[first:last].clone()


def shares_in(group: int, first: int, last: int) -> Iterator[PartitionShare]:
    """What elements [first, last) of a group are."""
    begin = 0
    for number, shape in enumerate(SHAPES[list(SHAPES)[group]]):
        end = begin + math.prod(shape)
        low, high = max(begin, first), min(end, last)
        if low < high:
            yield PartitionShare(
                f"{group}.{number}", group, low - first, high - low, low - begin, shape
            )
        begin = end


def stepped(
    variant: str, steps: int = STEPS, apart: bool = False, **keys: Any
) -> tuple[list[Tensor], TrainingOptimizer]:
    """All weights of both groups, flat, after so many steps on one rank; and the optimizer.

    `apart`: one group after the other, as ZeRO-1 steps fp32 and fp16.
    """
    start, gradients = course()
    sizes = [sum(math.prod(shape) for shape in shapes) for shapes in SHAPES.values()]
    partitions = [
        torch.nn.Parameter(cut(start[name], 0, size))
        for name, size in zip(SHAPES, sizes, strict=True)
    ]
    groups = [
        {"params": [partition], "weight_decay": decay}
        for partition, decay in zip(partitions, (DECAY, 0.0), strict=True)
    ]
    mesh = Mesh.single(torch.device("cpu"))
    optimizer = build_optimizer(groups, section(variant, **keys), RATE, (), mesh)
    optimizer.materialise(
        [share for group, size in enumerate(sizes) for share in shares_in(group, 0, size)]
    )
    every = optimizer.param_groups
    for each in gradients[:steps]:
        for name, partition in zip(SHAPES, partitions, strict=True):
            partition.grad = cut(each[name], 0, partition.numel())
        for chosen in [[group] for group in every] if apart else [every]:
            optimizer.param_groups = chosen
            optimizer.step()
    optimizer.param_groups = every
    assert optimizer.steps_done() == steps
    return [partition.detach() for partition in partitions], optimizer


# ----------------------------------------------------------------------------- timm
def clipped(gradients: list[Tensor], most: float) -> list[Tensor]:
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return [gradient / torch.clamp(norm / most, min=1.0) for gradient in gradients]


@pytest.mark.parametrize("variant, adapts_all", [("paper", True), ("apex", False)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_is_timms(
    monkeypatch: pytest.MonkeyPatch, variant: str, adapts_all: bool, clip: float | None
) -> None:
    start, gradients = course()
    theirs = {
        name: [torch.nn.Parameter(tensor.clone()) for tensor in start[name]] for name in SHAPES
    }
    lamb = timm_lamb()(
        [{"params": theirs["decayed"], "weight_decay": DECAY}, {"params": theirs["kept"], "weight_decay": 0.0}],
        lr=RATE, betas=BETAS, eps=EPSILON, max_grad_norm=clip, always_adapt=adapts_all,
    )  # fmt: skip
    for each in gradients:
        for name in SHAPES:
            for parameter, gradient in zip(theirs[name], each[name], strict=True):
                parameter.grad = gradient.clone()
        lamb.step()
    if clip is not None:  # the engine clips before the optimizer steps
        for each in gradients:
            small = clipped([gradient for name in SHAPES for gradient in each[name]], clip)
            for name, shapes in SHAPES.items():
                each[name] = [small.pop(0) for _ in shapes]
    monkeypatch.setattr(sys.modules[__name__], "course", lambda: (start, gradients))
    found, _ = stepped(variant)
    for ours, name in zip(found, SHAPES, strict=True):
        flat = cut([parameter.detach() for parameter in theirs[name]], 0, ours.numel())
        torch.testing.assert_close(ours, flat, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------ the other variants, by their formulas
def by_formula(variant: str, alpha: float) -> list[Tensor]:
    """Tensor by tensor in fp64: `mylamb`, `mylamb2` and `mylamb3`."""
    start, gradients = course()
    beta1, beta2 = BETAS
    largest = max(tensor.numel() for tensors in start.values() for tensor in tensors)
    found = []
    for name, decay in zip(SHAPES, (DECAY, 0.0), strict=True):
        ended = []
        for number, tensor in enumerate(start[name]):
            w, n = tensor.double(), tensor.numel()
            m, v, s = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
            for t, each in enumerate(gradients, 1):
                g = each[name][number].double()
                c1, c2 = 1 - beta1**t, 1 - beta2**t
                size = max(float(w.norm()), 1e-5 * n)
                if variant == "layer-noise":
                    d = g - m
                    v, s = beta2 * v + (1 - beta2) * g * g, beta2 * s + (1 - beta2) * d * d
                    a = (m / c1) / (v.sqrt() / math.sqrt(c2) + EPSILON)
                    b = (d / c1) / (s.sqrt() / math.sqrt(c2) + EPSILON)
                    w = w * (1 - RATE * decay)
                    if t > 1:
                        w = w - RATE * size / a.norm() * a
                    w = w - RATE * size / b.norm() * b
                    m = beta1 * m + (1 - beta1) * g
                    continue
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                mean = m if variant == "embedding-lr" else m / c1
                u = mean / (v.sqrt() / math.sqrt(c2) + EPSILON) + decay * w
                factor = 1 + alpha * n / largest if variant == "embedding-lr" else 1.0
                w = w - RATE * factor * size / u.norm() * u
            ended.append(w.flatten())
        found.append(torch.cat(ended))
    return found


@pytest.mark.parametrize(
    "variant, alpha",
    [("floored", 1.0), ("embedding-lr", 1.0), ("embedding-lr", 2.5), ("layer-noise", 1.0)],
)
def test_it_is_the_formula(variant: str, alpha: float) -> None:
    keys = {"embedding_alpha": alpha} if variant == "embedding-lr" else {}
    found, _ = stepped(variant, **keys)
    for ours, theirs in zip(found, by_formula(variant, alpha), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("variant", "keys"), KINDS, ids=str)
def test_a_bias_that_begins_at_zero_moves(variant: str, keys: dict[str, str]) -> None:
    (_, kept), _ = stepped(variant, **keys)
    assert bool((kept[-5:] != 0).all())


# ----------------------------------------------------------------------------- state
def gone_on(variant: str, with_sums: bool, **keys: Any) -> list[Tensor]:
    """The weights after all steps, of which the second half was made with the state of another
    optimizer.
    """
    halfway, first = stepped(variant, STEPS // 2, **keys)
    _, gradients = course()
    again, second = stepped(variant, 1, **keys)
    sizes = [partition.numel() for partition in halfway]
    for group, size in enumerate(sizes):
        second.partition(group).data.copy_(first.partition(group).data)
        for share in shares_in(group, 0, size):
            second.set_moments(
                share, {name: values.clone() for name, values in first.moments(share).items()}
            )
    second.set_steps_done(first.steps_done())
    second.set_tensor_sums(json.loads(json.dumps(first.tensor_sums())) if with_sums else {})
    for each in gradients[STEPS // 2 :]:
        for group, name in enumerate(SHAPES):
            second.partition(group).grad = cut(each[name], 0, sizes[group])
        second.step()
    return [partition.detach() for partition in again]


@pytest.mark.parametrize(("variant", "keys"), KINDS, ids=str)
def test_state_given_back_goes_on_alike(variant: str, keys: dict[str, str]) -> None:
    whole, optimizer = stepped(variant, **keys)
    assert bool(optimizer.tensor_sums()) == ("lamb_norms" in keys)
    assert all(map(torch.equal, gone_on(variant, True, **keys), whole))


@pytest.mark.parametrize(("variant", "keys"), KINDS, ids=str)
def test_groups_may_step_one_by_one(variant: str, keys: dict[str, str]) -> None:
    together, _ = stepped(variant, **keys)
    one_by_one, _ = stepped(variant, apart=True, **keys)
    assert all(map(torch.equal, one_by_one, together))


def test_lost_norms_are_made_anew() -> None:
    """One step of six then takes its own directions' norms."""
    whole, _ = stepped("paper", lamb_norms="stale")
    found = gone_on("paper", False, lamb_norms="stale")
    for one, other in zip(found, whole, strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < RATE


def test_the_noise_has_a_state_of_its_own() -> None:
    _, optimizer = stepped("layer-noise", 2)
    (share,) = (share for share in shares_in(1, 0, 30))
    held = optimizer.moments(share)
    assert list(held) == list(LayerNoiseLamb.state_names) and bool((held["exp_noise_sq"] > 0).all())


def test_a_step_is_no_longer_than_the_rate_says() -> None:
    before, _ = stepped("paper", STEPS - 1)
    after, _ = stepped("paper")
    matrix = slice(0, math.prod(SHAPES["decayed"][0]))
    moved = (after[0] - before[0])[matrix].norm() / before[0][matrix].norm()
    assert float(moved) == pytest.approx(RATE, rel=1e-4)


def test_the_gradient_is_left_as_it_was() -> None:
    numbers = UpdateNumbers.of(
        {"betas": BETAS, "eps": EPSILON, "weight_decay": DECAY, "lr": RATE}, 1, True
    )
    _, optimizer = stepped("layer-noise", 1)
    assert isinstance(optimizer, LayerNoiseLamb)
    gradient = torch.arange(1.0, 6.0)
    state = {name: torch.zeros(5) for name in optimizer.state_names}
    chunk = Chunk(torch.ones(5), gradient.clone(), state)
    optimizer.advance(chunk, numbers)
    optimizer.move(
        chunk,
        numbers,
        optimizer.directions_of(chunk, numbers),
        [torch.tensor(0.1), torch.tensor(0.1)],
    )
    assert torch.equal(chunk.gradient, gradient)


# ----------------------------------------------------------------------------- lamb engine
# LAMB inside the engine: resume on the same topology and on another one, both layouts of a
# checkpoint. That every shape has one curve is test_every_shape's; its bound holds here too.

CARDS = {
    "paper": {},
    "layer-noise": {"lamb_variant": "layer-noise"},
    "stale": {"lamb_norms": "stale"},
}


def card(pipeline: int, tensor: int, kind: str, dtype: str = "fp32") -> TrainerConfig:
    config = tiny(pipeline, tensor, dtype)
    changes = {"type": "lamb", "epsilon": 1e-6, **CARDS[kind]}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=changes)})


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def test_it_learns() -> None:
    (curve,) = run_ranks(train, 1, card(1, 1, "stale"), LEARNS)
    assert curve.losses[-1] < curve.losses[0] - 0.05


@pytest.mark.parametrize(
    ("kind", "tensor", "dtype"), [("layer-noise", 1, "bf16"), ("stale", 2, "fp32")]
)
def test_resume_on_the_same_topology_is_bitwise(kind: str, tensor: int, dtype: str) -> None:
    config = card(2 // tensor, tensor, kind, dtype)
    whole = straight(config, 2)
    rest = resumed(config, whole.half, 2, whole.sums)
    assert rest.losses == whole.losses[HALF:] and equal(rest.final, whole.final)
    assert bool(whole.sums) == (kind == "stale")
    assert all(
        ("exp_noise_sq" in kinds) == (kind == "layer-noise") for kinds in whole.final.values()
    )


@pytest.mark.parametrize("kind", ["layer-noise", "stale"])
def test_resume_on_another_topology(kind: str) -> None:
    alone = straight(card(1, 1, kind)).losses
    (first,) = stretches([card(2, 1, kind)], 1, 0, HALF, None)
    (other,) = stretches([card(1, 2, kind)], 1, HALF, END, first.final, first.sums)
    assert gap(first.losses + other.losses, alone) <= FP32_LOSS


@pytest.mark.parametrize("kind", CARDS)
def test_both_layouts_bring_a_training_back_bitwise(tmp_path: Path, kind: str) -> None:
    for on, ours, original in run_ranks(saved_and_loaded, 2, card(2, 1, kind, "bf16"), tmp_path):
        assert on == ours == original


NORM_STEPS = 8
# of the first each tensor rank has half of the rows, the second all hold
SLICED = {"cut": (12, 10), "alike": (7,)}
NORMS = ("exact", "local", "mean-weight", "stale")


def sliced_course() -> list[dict[str, Tensor]]:
    """The weights at the start, and the gradients of every step."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.linspace(0.2, 2.0, 12).unsqueeze(1)  # slices whose norms differ
    drawn = [
        {name: torch.randn(shape, generator=generator) for name, shape in SLICED.items()}
        for _ in range(1 + NORM_STEPS)
    ]
    return [{"cut": each["cut"] * spread, "alike": each["alike"]} for each in drawn]


def norms_by_formula(norms: str, tensor: int) -> Tensor:
    """Both weights, flat and one behind the other, in fp64: what `lambtp` does on so many tensor
    ranks.
    """
    (start, *gradients), (beta1, beta2) = sliced_course(), BETAS
    ended = []
    for name in SLICED:
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


def stepped_by_norms(tensor: int) -> dict[str, tuple[int, int, list[Tensor]]]:
    """By the norms: tensor rank, data rank, and this rank's elements of both weights after all
    steps.
    """
    mesh = Mesh.create(tiny(1, tensor).parallel, torch.device("cpu"))
    return {
        norms: (mesh.tensor_rank, mesh.data_rank, _stepped_with(norms, mesh)) for norms in NORMS
    }


def _stepped_with(norms: str, mesh: Mesh) -> list[Tensor]:
    def mine(whole: dict[str, Tensor]) -> Tensor:
        flat = torch.cat(
            [whole["cut"].chunk(mesh.tensor)[mesh.tensor_rank].flatten(), whole["alike"]]
        )
        return flat.tensor_split(mesh.data)[mesh.data_rank].clone()

    start, *gradients = sliced_course()
    partition = torch.nn.Parameter(mine(start))
    section = OptimizerSection.model_validate(
        {"type": "lamb", "lamb_norms": norms, "epsilon": EPSILON}
    )
    optimizer = build_optimizer(
        [{"params": [partition], "weight_decay": DECAY}], section, RATE, (), mesh
    )
    rows = math.prod(SLICED["cut"]) // mesh.tensor
    places = torch.arange(rows + SLICED["alike"][0]).tensor_split(mesh.data)[mesh.data_rank]
    first, last = int(places[0]), int(places[-1]) + 1
    shares, begin = [], 0
    for name, numel in (("cut", rows), ("alike", SLICED["alike"][0])):
        low, high = max(begin, first), min(begin + numel, last)
        if low < high:
            shares.append(
                PartitionShare(
                    name, 0, low - first, high - low, low - begin, SLICED[name], name == "cut"
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
    ranks = run_ranks(stepped_by_norms, tensor * data, tensor)
    for norms in NORMS:
        found = sorted((rank[norms] for rank in ranks), key=lambda item: item[:2])
        slices = [
            torch.cat([part for rank, _, parts in found if rank == number for part in parts])
            for number in range(tensor)
        ]
        rows = math.prod(SLICED["cut"]) // tensor
        assert all(torch.equal(one[rows:], slices[0][rows:]) for one in slices)
        whole = torch.cat([*(one[:rows] for one in slices), slices[0][rows:]])
        torch.testing.assert_close(
            whole.double(), norms_by_formula(norms, tensor), rtol=2e-6, atol=2e-6
        )
