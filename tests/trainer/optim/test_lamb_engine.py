"""LAMB inside the engine: every topology, resume on the same and on another one, both layouts of a checkpoint.

Norms of whole tensors are added up in fp64 over all ranks, so topologies differ by the fp32 rounding of gradients alone
(measured over 21 steps: 5e-7, one unit in the last place of a loss of 4; bound 2e-6).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.cases import LEARNS, Curve, equal, tiny, train
from tests.trainer.resumes import HALF, resumed, straight, stretches
from tests.trainer.saved_layouts import saved_and_loaded
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig

BOUND = 2e-6


def card(pipeline: int = 1, tensor: int = 1, variant: str = "paper", dtype: str = "fp32", **keys: Any) -> TrainerConfig:
    config = tiny(pipeline, tensor, dtype)
    changes = {"type": "lamb", "lamb_variant": variant, "epsilon": 1e-6, **keys}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=changes)})


@cache
def curves(topology: tuple[int, int, int], variant: str, **keys: Any) -> list[Curve]:
    pipeline, tensor, data = topology
    return run_ranks(train, pipeline * tensor * data, card(pipeline, tensor, variant, **keys), LEARNS)


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def check_replicas(ranks: list[Curve]) -> None:
    for rank in ranks:
        assert (rank.losses, rank.norms, rank.disagreements) == (ranks[0].losses, ranks[0].norms, [])


@pytest.mark.parametrize(
    ("topology", "variant"),
    [((2, 2, 1), "paper"), ((1, 2, 2), "apex"), ((1, 2, 1), "embedding-lr"), ((2, 1, 2), "layer-noise")],
    ids=str,
)
def test_fp32_equals_one_process(topology: tuple[int, int, int], variant: str) -> None:
    reference, ranks = curves((1, 1, 1), variant)[0], curves(topology, variant)
    check_replicas(ranks)
    assert gap(ranks[0].losses, reference.losses) <= BOUND
    assert reference.losses[-1] < reference.losses[0] - 0.05


@pytest.mark.parametrize("norms", ["local", "mean-weight"])
def test_norms_of_slices_depend_on_the_cut(norms: str) -> None:
    reference, ranks = curves((1, 1, 1), "paper")[0], curves((1, 2, 1), "paper", lamb_norms=norms)
    check_replicas(ranks)
    assert 10 * BOUND < gap(ranks[0].losses, reference.losses) < 0.01


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_on_the_same_topology_is_bitwise(dtype: str) -> None:
    config = card(2, 1, "layer-noise", dtype)
    whole = straight(config, 2)
    rest = resumed(config, whole.half, 2)
    assert rest.losses == whole.losses[HALF:] and equal(rest.final, whole.final)
    assert all("exp_noise_sq" in kinds for kinds in whole.final.values())


def test_resume_on_another_topology() -> None:
    alone = straight(card(variant="layer-noise")).losses
    (first,) = stretches([card(2, 1, "layer-noise")], 1, 0, HALF, None)
    other = resumed(card(1, 2, "layer-noise"), first.final, 1)
    assert gap(first.losses + other.losses, alone) <= BOUND


@pytest.mark.parametrize("variant", ["paper", "layer-noise"])
def test_both_layouts_bring_a_training_back_bitwise(tmp_path: Path, variant: str) -> None:
    for on, ours, original in run_ranks(saved_and_loaded, 2, card(2, 1, variant, "bf16"), tmp_path):
        assert on == ours == original
