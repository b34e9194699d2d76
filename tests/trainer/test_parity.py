"""Topology changes speed, never the numbers: every shape of pipeline x data x tensor against one
process.

fp32 tolerances. Sums over tensor ranks, stages and replicas are taken in another order than in one process; each fp32
sum of n terms may then differ by a few units of 2^-24 of its size, and losses here are near ln 64 = 4.2, where one
unit in the last place is 4.8e-7. Four units (2e-6) is the bound on losses over some steps, 1e-5 (relative) on gradient
norms. Gathered master weights: 1e-5, where Adam divides tiny gradients by their own size (the key biases, whose true
gradient is zero, reach 6.5e-6; all others 3e-7). bf16: weights and activations are rounded to 8 bits (2^-9 relative). A
loss averages over 128 to 256 tokens, so roundings partly cancel; the bound is one rounding of the loss,
2^-9 x 4.2 = 8e-3, taken over 8 for that averaging.
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch

from tests.trainer.cases import (
    BF16_LOSS,
    FP32_LOSS,
    FP32_NORM,
    FP32_WEIGHT,
    LEARNS,
    RAMP,
    TOPOLOGIES,
    Curve,
    assemble,
    tiny,
    train,
    train_in_fp16,
)
from tests.trainer.spawn import run_ranks


@cache
def curves(
    topology: tuple[int, int, int],
    dtype: str = "fp32",
    recompute: bool = False,
    positions: str = "alibi",
) -> list[Curve]:
    pipeline, tensor, data = topology
    card = tiny(
        pipeline, tensor, dtype, activation_checkpointing=recompute, position_embedding=positions
    )
    return run_ranks(train, pipeline * tensor * data, card)


def furthest(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == len(RAMP)
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def norms(curve: Curve) -> list[float]:
    assert None not in curve.norms
    return [norm for norm in curve.norms if norm is not None]


def check_replicas(ranks: list[Curve]) -> None:
    """All ranks report the same numbers, and copies of weights are bit-equal."""
    for rank in ranks:
        assert rank.losses == ranks[0].losses
        assert rank.norms == ranks[0].norms
        assert rank.evaluation == ranks[0].evaluation
        assert rank.params_norm == ranks[0].params_norm
        assert rank.disagreements == []


def test_reference_learns_and_clips() -> None:
    (reference,) = run_ranks(train, 1, tiny(), LEARNS)
    assert reference.losses[: len(RAMP)] == curves((1, 1, 1))[0].losses
    assert abs(reference.losses[0] - 4.16) < 0.1
    assert reference.losses[-1] < 3.4
    assert min(norms(reference)) > 0.3  # every step is clipped


@pytest.mark.parametrize("topology", TOPOLOGIES[1:], ids=str)
def test_fp32_equals_one_process(topology: tuple[int, int, int]) -> None:
    reference = curves((1, 1, 1))[0]
    ranks = curves(topology, recompute=topology[0] == 2)
    check_replicas(ranks)
    curve = ranks[0]
    assert furthest(curve.losses, reference.losses) <= FP32_LOSS
    relative = [
        abs(left - right) / right
        for left, right in zip(norms(curve), norms(reference), strict=True)
    ]
    assert max(relative) <= FP32_NORM
    assert abs(curve.evaluation - reference.evaluation) <= FP32_LOSS
    assert abs(curve.params_norm - reference.params_norm) <= 1e-6 * reference.params_norm
    whole, gathered = (
        assemble([rank.pieces for rank in found]) for found in (curves((1, 1, 1)), ranks)
    )
    assert gathered.keys() == whole.keys()
    for name, kinds in whole.items():
        torch.testing.assert_close(
            gathered[name]["fp32"], kinds["fp32"], rtol=0, atol=FP32_WEIGHT, msg=name
        )


@pytest.mark.parametrize("topology", [(2, 1, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_bf16_stays_within_rounding(topology: tuple[int, int, int]) -> None:
    reference = curves((1, 1, 1), "bf16")[0]
    ranks = curves(topology, "bf16", recompute=True)
    check_replicas(ranks)
    assert furthest(ranks[0].losses, reference.losses) <= BF16_LOSS
    assert furthest(curves((1, 1, 1))[0].losses, reference.losses) <= 2 * BF16_LOSS


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_fp16_stays_within_rounding(topology: tuple[int, int, int]) -> None:
    """fp16 keeps 11 bits, bf16 8: a bound 8 times as tight. The dynamic loss scale is the same on
    every shape.
    """
    pipeline, tensor, data = topology
    ranks = run_ranks(train_in_fp16, pipeline * tensor * data, tiny(pipeline, tensor, "fp16"))
    check_replicas(ranks)
    assert furthest(ranks[0].losses, curves((1, 1, 1))[0].losses) <= BF16_LOSS / 8


def test_absolute_positions_under_all_axes() -> None:
    reference = curves((1, 1, 1), positions="absolute")[0]
    ranks = curves((2, 2, 1), positions="absolute")
    check_replicas(ranks)
    assert furthest(ranks[0].losses, reference.losses) <= FP32_LOSS
    # the option does something
    assert furthest(curves((1, 1, 1))[0].losses, reference.losses) > 1e-3


def test_repeat_is_bitwise_equal() -> None:
    first = curves((2, 1, 2), recompute=True)
    pipeline, tensor, data = 2, 1, 2
    second = run_ranks(
        train, pipeline * tensor * data, tiny(pipeline, tensor, activation_checkpointing=True)
    )
    for before, after in zip(first, second, strict=True):
        assert before.losses == after.losses
        assert all(
            torch.equal(before.weights[name], after.weights[name]) for name in before.weights
        )


def test_recomputation_changes_no_bit() -> None:
    plain, recomputed = curves((1, 1, 1))[0], curves((1, 1, 1), recompute=True)[0]
    assert plain.losses == recomputed.losses
    assert plain.norms == recomputed.norms


@pytest.mark.parametrize("draw", range(3))
def test_random_shapes_equal_one_process(draw: int) -> None:
    """Models and topologies drawn at random: the rule holds for shapes that no one chose."""
    chance = random.Random(f"shape {draw}")
    pipeline, tensor, data = chance.choice([shape for shape in TOPOLOGIES if math.prod(shape) >= 4])
    model = {
        "layers": chance.choice([2, 4]),
        "attention_heads": chance.choice([4, 6]),
        "hidden_size": chance.choice([24, 48]),
        "ffn_hidden_size": chance.choice([40, 96]),
        "sequence_length": chance.choice([8, 12]),
        "position_embedding": chance.choice(["alibi", "absolute", "rotary"]),
        "embedding_layernorm": chance.random() < 0.5,
        "activation_checkpointing": chance.random() < 0.5,
    }
    (reference,) = run_ranks(train, 1, tiny(**model))
    ranks = run_ranks(train, pipeline * tensor * data, tiny(pipeline, tensor, **model))
    check_replicas(ranks)
    assert furthest(ranks[0].losses, reference.losses) <= FP32_LOSS
    relative = [
        abs(left - right) / right
        for left, right in zip(norms(ranks[0]), norms(reference), strict=True)
    ]
    assert max(relative) <= FP32_NORM
