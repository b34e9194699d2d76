"""Adam with eight-bit moments: the code, the blocks, and its steps beside bitsandbytes' and
torch's.

The vectors of bitsandbytes 0.50.2 were recorded by tests/data/adam8bit/record.py.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data.adam8bit.inputs import (
    BETAS,
    ELEMENTS,
    EPSILON,
    KEPT_STEPS,
    LEARNING_RATE,
    STEPS,
    WEIGHT_DECAY,
    gradient,
    weights,
)
from trainer.optim import interface
from trainer.optim.adam8bit import (
    BLOCK,
    SMALLEST_SCALE,
    Adam8bit,
    CodedMoment,
    DynamicCode,
    FullMoment,
    code_values,
    spans_of,
)
from trainer.optim.interface import MOMENTS, PartitionShare

CPU = torch.device("cpu")
RECORDED = Path(__file__).parents[2] / "data" / "adam8bit" / "bitsandbytes.npz"
CODES = {signed: DynamicCode.build(signed, CPU) for signed in (True, False)}
# of a block's scale: half of the widest gap between two codes
HALF_GAP = {True: 0.9 / 64 / 2, False: 0.9 / 128 / 2}


# ----------------------------------------------------------------------------- the code
def test_the_code_is_that_of_bitsandbytes() -> None:
    recorded = np.load(RECORDED)
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        theirs, ours = recorded[f"{name}_values"], code_values(signed)
        assert len(set(ours.tolist())) == 256
        assert np.abs(ours - theirs).max() <= 2.0**-24  # theirs are computed in fp32
    assert CODES[True].values[CODES[True].zero] == 0 and CODES[False].values[CODES[False].zero] == 0
    # hence scales with a sign
    assert code_values(True).min() > -1.0 and code_values(True).max() == 1.0


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """[blocks, width] of numbers of very different sizes, some of them zero, one huge if it likes."""
    width, count = draw(st.sampled_from([1, 7, BLOCK])), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numbers = torch.randn(count, width, generator=generator)
    numbers *= 10.0 ** (
        torch.rand(count, width, generator=generator) * draw(st.integers(0, 20)) - 10
    )
    numbers *= 2.0 ** draw(st.integers(-140, 90))  # down to denormal numbers
    numbers[
        torch.rand(count, width, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    ] = 0.0
    if draw(st.booleans()):
        numbers[0, 0] = draw(st.sampled_from([1e38, -1e38, 3e-45, -3e-45]))
    return numbers


@given(blocks(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_was_decoded_is_encoded_to_itself(numbers: Tensor, signed: bool) -> None:
    numbers = numbers if signed else numbers.abs()
    code = CODES[signed]
    codes, scales = code.encode(numbers)
    decoded = code.decode(codes, scales)
    again, scales_again = code.encode(decoded)
    assert torch.equal(codes, again) and torch.equal(scales, scales_again)
    assert torch.equal(decoded, code.decode(again, scales_again))
    largest = numbers.abs().amax(1, keepdim=True)
    # Half a gap, and the rounding in fp32 of the quotient, of the codes' middles and of the
    # product: below 2^-22 together.
    bound = largest.double() * (HALF_GAP[signed] + 2**-22) + SMALLEST_SCALE
    assert ((decoded.double() - numbers.double()).abs() <= bound).all()
    exact = largest.squeeze(1) >= SMALLEST_SCALE
    # a block's largest number is kept
    assert torch.equal(decoded.abs().amax(1)[exact], largest.squeeze(1)[exact])


@given(blocks(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_number_gets_the_nearest_code(numbers: Tensor, signed: bool) -> None:
    numbers = numbers if signed else numbers.abs()
    code = CODES[signed]
    codes, scales = code.encode(numbers)
    relative = (numbers / scales.masked_fill(scales == 0, math.inf).unsqueeze(1)).flatten().double()
    distances = (relative.unsqueeze(1) - code.values.double()).abs()
    chosen = distances.gather(1, codes.long().unsqueeze(1)).squeeze(1)
    nearest = distances.amin(1)
    if not signed:  # a second moment that is not zero is not made zero
        assert ((codes > 0) == (relative > 0)).all()
        nearest = torch.where((codes == 1) & (relative < code.values[1]), chosen, nearest)
    assert (chosen <= nearest * (1 + 1e-6)).all()


# ----------------------------------------------------------------------------- the blocks
@given(st.integers(0, 3000), st.integers(0, 5000), st.sampled_from([BLOCK, 4 * BLOCK, 1 << 16]))
@settings(max_examples=200, deadline=None)
def test_blocks_lie_on_the_parameters_own_grid(first: int, numel: int, chunk: int) -> None:
    spans = list(spans_of(first, numel, chunk))
    ends = [0]
    for span in spans:
        assert (
            span.start == ends[-1]
            and span.block == len(ends) - 1
            and span.blocks * span.width <= chunk
        )
        ends += [span.start + (number + 1) * span.width for number in range(span.blocks)]
        assert span.stop == ends[-1]
    grid = [place for place in range(1, numel) if (first + place) % BLOCK == 0]
    assert ends == ([0, *grid, numel] if numel else [0])


def stepping(
    pieces: list[tuple[Tensor, list[Tensor]]],
    shares: list[PartitionShare],
    in_full: tuple[str, ...] = (),
) -> tuple[Adam8bit, list[torch.nn.Parameter]]:
    """An optimizer over partitions (one group each) after one step for every gradient of its."""
    partitions = [torch.nn.Parameter(start.clone()) for start, _ in pieces]
    groups = [{"params": [partition], "weight_decay": WEIGHT_DECAY} for partition in partitions]
    optimizer = Adam8bit(groups, LEARNING_RATE, BETAS, EPSILON, in_full)
    optimizer.materialise(shares)
    for step in range(len(pieces[0][1])):
        for partition, (_, gradients) in zip(partitions, pieces, strict=True):
            partition.grad = gradients[step].clone()
        optimizer.step()
    return optimizer, partitions


def random_course(shape: tuple[int, ...], steps: int = 6) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(shape, generator=generator)
    return start, [torch.randn(shape, generator=generator) * 10.0**-step for step in range(steps)]


@pytest.mark.parametrize("cut", [256, 5 * 256, 1000, 9999])
def test_a_partition_that_is_cut_steps_as_the_whole_one_does(cut: int) -> None:
    """At multiples of 256 no bit differs; else the cut block alone does, by one gap of the code for
    each step.
    """
    start, gradients = random_course((10_000,))
    whole = [PartitionShare("weight", 0, 0, 10_000, 0, (10_000,))]
    parts = [
        PartitionShare("weight", 0, 0, cut, 0, (10_000,)),
        PartitionShare("weight", 1, 3, 10_000 - cut, cut, (10_000,)),
    ]
    _, (expected,) = stepping([(start, gradients)], whole)
    pad = torch.zeros(3)
    pieces = [
        (start[:cut], [item[:cut] for item in gradients]),
        (torch.cat([pad, start[cut:]]), [torch.cat([pad, item[cut:]]) for item in gradients]),
    ]
    _, partitions = stepping(pieces, [parts[0], parts[1]])
    assert partitions[1][:3].eq(0).all()  # what no share covers is not stepped
    found = torch.cat([partitions[0], partitions[1][3:]]).detach()
    inside = torch.arange(10_000) // BLOCK == cut // BLOCK
    assert torch.equal(found[~inside], expected.detach()[~inside])
    if cut % BLOCK == 0:
        assert torch.equal(found, expected.detach())
    else:
        gap = (found - expected.detach()).abs().max()
        assert 0 < gap < LEARNING_RATE * len(gradients)


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_ranks_of_whole_row_blocks_step_as_one_does(dim: int) -> None:
    start, gradients = random_course((6, 1024))
    _, (expected,) = stepping(
        [(start.flatten(), [item.flatten() for item in gradients])],
        [PartitionShare("w", 0, 0, 6144, 0, (6, 1024))],
    )
    halves = []
    for index in range(2):
        local = [item.chunk(2, dim)[index].flatten() for item in (start, *gradients)]
        _, (half,) = stepping(
            [(local[0], local[1:])], [PartitionShare("w", 0, 0, 3072, 0, (6, 1024))]
        )
        halves.append(half.detach().view(start.chunk(2, dim)[index].shape))
    assert torch.equal(torch.cat(halves, dim), expected.detach().view(6, 1024))


def test_small_tensors_and_the_embedding_keep_fp32() -> None:
    sizes = {"small": 4095, "large": 4096, "embedding": 8192}
    shares, start = [], 0
    for name, size in sizes.items():
        shares.append(PartitionShare(name, 0, start, size, 0, (size,)))
        start += size
    # 8 bits: it is a part of a larger parameter
    half = PartitionShare("half", 0, start, 2048, 0, (2, 2048))
    partition, gradients = random_course((start + 2048,))
    optimizer, (found,) = stepping(
        [(partition, gradients)], [*shares, half], in_full=("embedding",)
    )
    runs = optimizer.state[found]["runs"]
    kinds = {name: {type(moment) for moment in run.moments} for name, run in runs.items()}
    assert kinds == {
        "small": {FullMoment}, "large": {CodedMoment}, "embedding": {FullMoment}, "half": {CodedMoment}
    }  # fmt: skip
    reference = torch.nn.Parameter(partition.clone())
    plain = torch.optim.AdamW([reference], LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)
    for item in gradients:
        reference.grad = item.clone()
        plain.step()
    for share in (shares[0], shares[2]):
        run = slice(share.start, share.start + share.numel)
        torch.testing.assert_close(found.detach()[run], reference.detach()[run], rtol=0, atol=1e-6)
        for name, moment in optimizer.moments(share).items():
            torch.testing.assert_close(
                moment, plain.state[reference][name][run], rtol=1e-5, atol=1e-8
            )


# ----------------------------------------------------------------------------- beside others
@cache
def own_course() -> dict[int, dict[str, Any]]:
    """What the recorded gradients make of the recorded tensor here: weights, codes and scales at
    the kept steps.
    """
    parameter = torch.nn.Parameter(torch.from_numpy(weights()))
    optimizer = Adam8bit(
        [{"params": [parameter], "weight_decay": WEIGHT_DECAY}], LEARNING_RATE, BETAS, EPSILON
    )  # fmt: skip
    optimizer.materialise([PartitionShare("weight", 0, 0, ELEMENTS, 0, (ELEMENTS,))])
    kept = {}
    for step in range(1, STEPS + 1):
        parameter.grad = torch.from_numpy(gradient(step))
        optimizer.step()
        run = optimizer.state[parameter]["runs"]["weight"]
        held = {
            name: (moment.codes.clone(), moment.scales.clone())
            for name, moment in zip(MOMENTS, run.moments, strict=True)
        }
        kept[step] = {"weights": parameter.detach().clone(), **held}
    assert optimizer.steps_done() == STEPS
    return kept


@cache
def torch_course() -> dict[int, Tensor]:
    parameter = torch.nn.Parameter(torch.from_numpy(weights()))
    optimizer = torch.optim.AdamW([parameter], LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)
    kept = {}
    for step in range(1, STEPS + 1):
        parameter.grad = torch.from_numpy(gradient(step))
        optimizer.step()
        kept[step] = parameter.detach().clone()
    return kept


def test_first_step_equals_bitsandbytes_and_torch() -> None:
    recorded, ours = np.load(RECORDED), own_course()[1]
    assert (ours["weights"] - torch.from_numpy(recorded["weights_1"])).abs().max() <= 1.2e-7
    assert (ours["weights"] - torch_course()[1]).abs().max() <= 1.2e-7
    codes, scales = ours["exp_avg"]
    theirs = torch.from_numpy(recorded["exp_avg_codes_1"])
    torch.testing.assert_close(
        scales.abs(), torch.from_numpy(recorded["exp_avg_scales_1"]), rtol=1e-6, atol=0
    )
    mirrored = (scales < 0).repeat_interleave(BLOCK)[:ELEMENTS]
    assert 0 < mirrored.sum() < ELEMENTS
    same = torch.where(mirrored, 254 - codes.int(), codes.int()) == theirs.int()
    assert same.float().mean() > 0.995  # theirs are not always the nearest code
    torch.testing.assert_close(
        ours["exp_avg_sq"][1], torch.from_numpy(recorded["exp_avg_sq_scales_1"]), rtol=1e-6, atol=0
    )


def test_gap_to_fp32_adam_is_that_of_bitsandbytes() -> None:
    """30 steps at a constant rate, blocks of scales from 1e-5 to 1: weights move by up to 30 rates."""
    recorded = np.load(RECORDED)
    for step in KEPT_STEPS[1:]:
        theirs = (torch.from_numpy(recorded[f"weights_{step}"]) - torch_course()[step]).abs()
        ours = (own_course()[step]["weights"] - torch_course()[step]).abs()
        assert ours.mean() <= 1.02 * theirs.mean() and ours.max() <= 1.1 * theirs.max()
    assert ours.mean() < 0.2 * LEARNING_RATE and ours.max() < 2 * LEARNING_RATE
    moved = (torch_course()[STEPS] - torch.from_numpy(weights())).abs().mean()
    assert ours.mean() < 0.02 * moved


# ----------------------------------------------------------------------------- memory and state
class Largest(TorchDispatchMode):
    """Elements of the largest new fp32 tensor that operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {item.untyped_storage().data_ptr() for item in args if isinstance(item, Tensor)}
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor) and item.untyped_storage().data_ptr() not in inputs:
                self.elements = max(self.elements, item.numel())
        return result


def test_two_bytes_an_element_and_no_large_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "CPU_CHUNK", 8 * BLOCK)
    size = 100_000
    start, gradients = random_course((size,), steps=1)
    partition = torch.nn.Parameter(start)
    partition.grad = gradients[0]
    optimizer = Adam8bit(
        [{"params": [partition], "weight_decay": 0.1}], LEARNING_RATE, BETAS, EPSILON
    )
    optimizer.materialise([PartitionShare("weight", 0, 0, size, 0, (size,))])
    with Largest() as largest:
        optimizer.step()
    assert largest.elements == 8 * BLOCK
    run = optimizer.state[partition]["runs"]["weight"]
    held = sum(tensor.nbytes for moment in run.moments for tensor in (moment.codes, moment.scales))
    assert held == pytest.approx(2 * (1 + 4 / BLOCK) * size, rel=0.001)


def test_moments_given_back_change_nothing() -> None:
    start, gradients = random_course((20_000,))
    shares = [
        PartitionShare("weight", 0, 0, 15_000, 100, (20_000,)),
        PartitionShare("bias", 0, 15_000, 3000, 0, (3000,)),
    ]
    optimizer, (partition,) = stepping([(start, gradients)], shares)
    other = Adam8bit(
        [{"params": [torch.nn.Parameter(start)], "weight_decay": 0.1}],
        LEARNING_RATE,
        BETAS,
        EPSILON,
    )
    other.materialise(shares)
    for share in shares:
        moments = optimizer.moments(share)
        assert all(item.dtype == torch.float32 and item.any() for item in moments.values())
        other.set_moments(share, moments)
        for name, item in other.moments(share).items():
            assert torch.equal(item, moments[name])
    mine = optimizer.state[partition]["runs"]["weight"].moments
    theirs = other.state[other.partition(0)]["runs"]["weight"].moments
    for one, two in zip(mine, theirs, strict=True):
        assert torch.equal(one.codes, two.codes) and torch.equal(one.scales, two.scales)
    assert (optimizer.steps_done(), other.steps_done()) == (6, 0)
    other.set_steps_done(6)
    assert other.steps_done() == 6


def test_a_partition_without_a_gradient_is_left_alone() -> None:
    start, _ = random_course((5000,))
    optimizer, (partition,) = stepping(
        [(start, [])], [PartitionShare("weight", 0, 0, 5000, 0, (5000,))]
    )
    optimizer.step()
    assert torch.equal(partition.detach(), start) and optimizer.steps_done() == 0
