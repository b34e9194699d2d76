"""Micro batches that grow with the batch: the same training as with small ones, resumed anywhere,
and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.cases import tiny
from tests.trainer.courses import attempt, card, curve, records
from tests.trainer.gradients import each, worst
from tests.trainer.schedule_cards import card as full_card
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.data.dataset import NextTokenRow
from trainer.data.stream import SampleStream
from trainer.schedule.rules import cross_problems

GROWING = {"micro_batch_ramp": [{"from_batch": 16, "size": 2}, {"from_batch": 32, "size": 4}]}
RAMP: dict[str, Any] = {
    "batch": {
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "ramp": {"start": 8, "increment": 8, "samples": 96},
    },
    "curriculum": {"kind": "linear", "start_length": 8, "step": 4, "total_steps": 8},
    "model": {"activation_checkpointing": True},
    "evaluation": {"interval": 3, "iterations": 1},
    "checkpoint": {"interval": 100},
}
STEPS = (4, 2, 2, 1)  # of 8, 16, 24 and 32 samples
LAST = sum(STEPS)
STEEP = {"ramp": {"start": 8, "increment": 8, "samples": 48}}
STEEP_STEPS = (2, 1, 1, 1)


def ramped(
    folder: Path, name: str, shape: dict[str, int], until: int = LAST, **batch: Any
) -> TrainerConfig:
    run = {"directory": str(folder / name), "exit_interval": until}
    return card(folder, **{**RAMP, "batch": {**RAMP["batch"], **batch}}, parallel=shape, run=run)


def train_all(*configs: TrainerConfig) -> list[tuple[str, int]]:
    """Trainings one after another in the same processes, which start but once."""
    return [attempt(config, number) for number, config in enumerate(configs, 1)]


def evaluations(config: TrainerConfig) -> list[float]:
    return [record["lm_loss"] for record in records(config, "validation")]


def same_course(small: TrainerConfig, grown: TrainerConfig, steps: tuple[int, ...] = STEPS) -> None:
    """Equal within rounding, and what is counted exactly."""
    expected, found = curve(small), curve(grown)
    assert set(found) == set(expected) == set(range(1, sum(steps) + 1))
    batches = [record["global_batch_size"] for record in records(grown)]
    assert tuple(batches.count(size) for size in (8, 16, 24, 32)) == steps
    for iteration, values in expected.items():
        assert found[iteration][2:] == values[2:]  # samples, tokens, rate, length
        np.testing.assert_allclose(found[iteration][:2], values[:2], rtol=3e-5)
    np.testing.assert_allclose(evaluations(grown), evaluations(small), rtol=3e-5)
    assert len(evaluations(grown)) == sum(steps) // 3


def test_the_course_of_small_micro_batches_and_a_restart_agree(tmp_path: Path) -> None:
    alone = {"tensor": 1, "pipeline": 1}
    small, grown = ramped(tmp_path, "small", alone), ramped(tmp_path, "grown", alone, **GROWING)
    # at the second level: the next one begins in twos
    cut = ramped(tmp_path, "grown", alone, 5, **GROWING)
    whole = ramped(tmp_path, "whole", alone, **GROWING)
    ends = [("exit-interval", number) for number in (LAST, 5, LAST, LAST)]
    assert run_ranks(train_all, 1, small, cut, grown, whole, launch=False) == [ends]
    same_course(small, grown)
    assert curve(whole) == curve(grown)  # bit for bit


def test_the_course_is_the_same_on_eight_processes(tmp_path: Path) -> None:
    """On a ramp with as many sizes in fewer steps: messages among eight cost most of it."""
    shape, last = {"tensor": 2, "pipeline": 2}, sum(STEEP_STEPS)
    small = ramped(tmp_path, "small", shape, last, **STEEP)
    grown = ramped(tmp_path, "grown", shape, last, **STEEP, **GROWING)
    for config in (small, grown):
        assert run_ranks(train_all, 8, config, launch=False) == [[("exit-interval", last)]] * 8
    same_course(small, grown, STEEP_STEPS)


@pytest.mark.parametrize(
    ("batch", "key", "rule"),
    [
        ({"micro_batch_ramp": [{"from_batch": 784, "size": 2}]}, "", ""),
        (
            {"micro_batch_ramp": [{"from_batch": 784, "size": 2}, {"from_batch": 1984, "size": 4}]},
            "batch",
            "level 2000",
        ),
        (
            {"micro_batch_ramp": [{"from_batch": 784, "size": 4}]},
            "batch",
            "level 784 must be divisible",
        ),
        (
            {"micro_batch_ramp": [{"from_batch": 790, "size": 2}]},
            "batch.micro_batch_ramp.0.from_batch",
            "a level",
        ),
        (
            {"micro_batch_ramp": [{"from_batch": 192, "size": 2}]},
            "batch.micro_batch_ramp.0.from_batch",
            "above 192",
        ),
        (
            {"micro_batch_ramp": [{"from_batch": 784, "size": 1}]},
            "batch.micro_batch_ramp.0.size",
            "larger than 1",
        ),
        ({"ramp": None, "micro_batch_ramp": [{"from_batch": 784, "size": 2}]}, "", ""),
    ],
)
def test_each_level_of_the_ramp_must_hold_whole_micro_batches(
    batch: dict[str, Any], key: str, rule: str
) -> None:
    """The original's ramp on eight replicas."""
    found = cross_problems(full_card(batch=batch), 8)
    assert bool(found) == bool(key)
    for problem in found:
        assert problem.key.startswith(key) and rule in f"{problem}"


def test_the_cyclic_order_refuses_it() -> None:
    batch = {"micro_batch_ramp": [{"from_batch": 784, "size": 2}]}
    [problem] = cross_problems(full_card(batch=batch, data={"order": "cyclic"}), 8)
    assert (problem.key, "order of the data" in problem.rule) == ("batch.micro_batch_ramp", True)


def test_a_stream_goes_on_at_the_same_sample_in_another_size() -> None:
    class Numbers:
        row = NextTokenRow(1)

        def __len__(self) -> int:
            return 64

        def read(self, index: int, out: np.ndarray) -> None:
            out[:] = index

    streams = [SampleStream(Numbers(), 1, dp_rank=rank, dp_size=2) for rank in range(2)]
    taken = []
    for size, count in ((1, 3), (2, 2), (2, 1), (4, 1)):
        for stream in streams:
            stream.resize(size)
            assert stream.wait(count + 1, 0.0)  # and reads ahead
        for _ in range(count):
            taken += [int(row) for stream in streams for row in next(stream)[0][:, 0]]
    assert taken == list(range(3 * 2 + 3 * 4 + 8)) and streams[0].state() == len(taken)


# ----------------------------------------------------------------------------- gradients
# The gradient that the optimizer is given is the sum of the micro batches' gradients, in every
# topology. bf16 cards: each micro batch's gradient is a bf16 tensor, and their sum is fp32 from
# the first addition to the optimizer. The reference is the same sum in fp64. An fp32 sum of n
# terms is off by at most n x 2^-24 x the sum of their sizes, in whichever order ranks and micro
# batches are added; dividing by 1, 2 or 4 replicas is exact. So the bound is 1 in that unit, for
# each element. Rounding the sum to bf16 anywhere on the way is off by 2^-9: thousands of units.

# pipeline x tensor; the rest of four ranks are replicas
FOUR = [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1)]


def test_the_optimizer_gets_the_fp32_sum_of_the_micro_batches() -> None:
    """One micro batch a replica, and three. Eight ranks, with all three axes:
    `test_collectives.py`.
    """
    cards = [tiny(pipeline, tensor, "bf16", clip=0.0, layers=6) for pipeline, tensor in FOUR]
    ranks = run_ranks(each, 4, cards, (1, 3))
    found = {
        (shape, index): worst([rank[number][index] for rank in ranks])
        for number, shape in enumerate(FOUR)
        for index in range(2)
    }
    assert {key: value for key, value in found.items() if value[0] > 1.0} == {}
