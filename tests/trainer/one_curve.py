"""What every family must show: one curve on every shape, and a resume that goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainer.cases import (
    CPU,
    FP32_LOSS,
    FP32_NORM,
    FP32_WEIGHT,
    Curve,
    assemble,
    copy_state,
    equal,
    fill,
)
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.spikes.corruption_check import check_workers

# of keys: Adam divides it by its own size
ZERO_GRADIENT = ("query_key_value.bias", "key_value.bias")


def compare_curves(
    alone: list[Curve], ranks: list[Curve], weight_bound: float = FP32_WEIGHT
) -> None:
    """The ranks of one shape with a single one, fp32: losses, norms, evaluation and masters. See
    test_parity.py.
    """
    (reference,) = alone
    for rank in ranks:
        assert rank.disagreements == []
        assert rank.losses == ranks[0].losses
    assert (
        max(abs(a - b) for a, b in zip(ranks[0].losses, reference.losses, strict=True)) <= FP32_LOSS
    )
    relative = [
        abs(a - b) / b for a, b in zip(ranks[0].norms, reference.norms, strict=True) if a and b
    ]
    assert len(relative) == len(reference.losses) and max(relative) <= FP32_NORM
    assert abs(ranks[0].evaluation - reference.evaluation) <= FP32_LOSS
    for rank in ranks:
        for total, parts, exact in zip(rank.losses, rank.parts, reference.parts, strict=True):
            assert parts == pytest.approx(exact, abs=FP32_LOSS, rel=0)
            assert not parts or abs(sum(parts.values()) - total) <= FP32_LOSS
        assert rank.measured == pytest.approx(reference.measured, abs=FP32_LOSS, rel=0)
    whole, gathered = assemble([reference.pieces]), assemble([rank.pieces for rank in ranks])
    assert gathered.keys() == whole.keys()
    for name, kinds in whole.items():
        bound = 1e-4 if name.endswith(ZERO_GRADIENT) else weight_bound
        torch.testing.assert_close(
            gathered[name]["fp32"], kinds["fp32"], rtol=0, atol=bound, msg=f"{name}: {{}}".format
        )


def interrupted(
    config: TrainerConfig, draw: Callable[..., Any]
) -> tuple[list[float], list[float], bool, list[str]]:
    """Losses of the last three of six steps, and of the same in an engine that is given the state
    before them; whether the states at the end are equal; and what the check for silent corruption
    finds. To be run by `run_ranks`.
    """
    mesh = Mesh.create(config.parallel, CPU)
    losses: list[list[float]] = []
    states, tensors = [], {}
    for first in (0, 3):
        engine = Engine.build(config, mesh)
        if first:
            fill(engine, tensors, first)
        losses.append([])
        for step in range(first, 6):
            if step == 3 and not first:
                tensors = assemble([copy_state(engine)])
            engine.set_learning_rate(3e-3)
            losses[-1].append(engine.train_step(draw(config, mesh, step, 8), 8, step).loss)
        states.append(assemble([copy_state(engine)]))
        found = check_workers(engine.stage(), mesh, 1, 6)
        engine._pipeline.destroy()
    return (
        losses[0][3:],
        losses[1],
        equal(*states),
        [item.fault for item in found if item.first != item.second],
    )


def goes_on(
    config: TrainerConfig, tensors: dict[str, Any], first: int, draw: Callable[..., Any]
) -> list[float]:
    """Losses of three steps from a state of whole tensors after `first` steps. To be run by
    `run_ranks`.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    fill(engine, tensors, first)
    engine.set_learning_rate(3e-3)
    return [
        engine.train_step(draw(config, mesh, step, 8), 8, step).loss
        for step in range(first, first + 3)
    ]
