"""Dropout's masks are those of one process on every topology, in every way to compute a block, and
after a resume.

Bounds as without dropout (`test_parity.py`): 2e-6 on losses near 4.2, 1e-5 on gradient norms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.trainer.cases import (
    CPU,
    FP32_LOSS,
    FP32_NORM,
    TOPOLOGIES,
    Curve,
    batches,
    equal,
    tiny,
    train,
)
from tests.trainer.counting import Counts
from tests.trainer.resumes import END, HALF, resumed, stretches
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def card(pipeline: int, tensor: int, sequence: bool = False, **model: Any) -> TrainerConfig:
    found = tiny(pipeline, tensor, **(DROPOUT | model))
    if not sequence:
        return found
    parallel = found.parallel.model_copy(update={"sequence_parallel": True})
    return found.model_copy(update={"parallel": parallel})


@cache
def alone() -> Curve:
    (curve,) = run_ranks(train, 1, card(1, 1))
    return curve


def test_dropout_changes_the_training() -> None:
    (dry,) = run_ranks(train, 1, tiny())
    assert max(abs(a - b) for a, b in zip(dry.losses, alone().losses, strict=True)) > 1e-3


@pytest.mark.parametrize("topology", TOPOLOGIES[1:], ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "stretches"])
def test_losses_are_those_of_one_process(topology: tuple[int, int, int], sequence: bool) -> None:
    pipeline, tensor, data = topology
    if sequence and tensor == 1:
        pytest.skip("no tensor ranks to cut a sequence over")
    ranks = run_ranks(train, pipeline * tensor * data, card(pipeline, tensor, sequence))
    for rank in ranks:
        assert rank.losses == ranks[0].losses and rank.disagreements == []
    for ours, theirs in zip(ranks[0].losses, alone().losses, strict=True):
        assert abs(ours - theirs) <= FP32_LOSS
    for norm, expected in zip(ranks[0].norms, alone().norms, strict=True):
        assert norm == pytest.approx(expected, rel=FP32_NORM)


@pytest.mark.parametrize("size", [1, 4])
def test_the_size_of_micro_batches_changes_no_mask(size: int) -> None:
    config = card(2, 1)
    batch = config.batch.model_copy(update={"micro_batch_size": size})
    ranks = run_ranks(train, 2, config.model_copy(update={"batch": batch}))
    for ours, theirs in zip(ranks[0].losses, alone().losses, strict=True):
        assert abs(ours - theirs) <= FP32_LOSS


@pytest.mark.parametrize(("pipeline", "tensor", "data"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_resume_goes_on_with_the_same_masks(pipeline: int, tensor: int, data: int) -> None:
    """On the same shape bit for bit, on another one but for rounding."""
    (whole,) = stretches([card(1, 1)], 1, 0, END, None)
    again = resumed(card(1, 1), whole.half)
    assert again.losses == whole.losses[HALF:] and equal(again.final, whole.final)
    other = resumed(card(pipeline, tensor), whole.half, data)
    for ours, theirs in zip(other.losses, whole.losses[HALF:], strict=True):
        assert abs(ours - theirs) <= FP32_LOSS


# ----------------------------------------------------------------- what a recomputation need not keep
def states_kept(config: TrainerConfig) -> dict[str, int]:
    """How often a step with recomputed blocks asks for the generators' state, sets it, or draws."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    counts = {"get_rng_state": 0, "set_rng_state": 0}
    with pytest.MonkeyPatch.context() as patch, Counts() as operations:
        for name in counts:
            real = getattr(torch.random, name)

            def counted(*arguments: Any, name: str = name, real: Any = real) -> Any:
                counts[name] += 1
                return real(*arguments)

            for owner in (torch, torch.random):
                patch.setattr(owner, name, counted)
        engine.train_step(batches(config, mesh, 0, 8), 8)
    engine.close()
    drawn = sum(operations.operations[name] for name in ("bernoulli", "native_dropout"))
    return counts | {"drawn": drawn}


@pytest.mark.parametrize(
    "model",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "recompute_granularity": "selective"},
        {"activation_checkpointing": True, "partition_activations": True},
    ],
    ids=["blocks", "attention", "partitioned"],
)
def test_recomputation_keeps_no_random_state(model: dict[str, Any]) -> None:
    nothing = {"get_rng_state": 0, "set_rng_state": 0, "drawn": 0}
    assert run_ranks(states_kept, 2, card(1, 2, **model)) == [nothing] * 2
