"""LAMB inside the engine: resume on the same topology and on another one, both layouts of a
checkpoint.

That every shape has one curve is test_every_shape's; its bound holds here too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.cases import FP32_LOSS, LEARNS, equal, tiny, train
from tests.trainer.resumes import END, HALF, resumed, straight, stretches
from tests.trainer.saved_layouts import saved_and_loaded
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig

KINDS = {
    "paper": {},
    "layer-noise": {"lamb_variant": "layer-noise"},
    "stale": {"lamb_norms": "stale"},
}


def card(pipeline: int, tensor: int, kind: str, dtype: str = "fp32") -> TrainerConfig:
    config = tiny(pipeline, tensor, dtype)
    changes = {"type": "lamb", "epsilon": 1e-6, **KINDS[kind]}
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


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_bring_a_training_back_bitwise(tmp_path: Path, kind: str) -> None:
    for on, ours, original in run_ranks(saved_and_loaded, 2, card(2, 1, kind, "bf16"), tmp_path):
        assert on == ours == original
