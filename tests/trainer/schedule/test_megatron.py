"""Learning rate and batch ramp against megatron-core's own classes.

Only the two modules are loaded: their package's `__init__` looks for GPU libraries.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.schedule_cards import card
from tr11ops.runcard.card import load_card, shipped_folder
from trainer.config.card import BatchSection
from trainer.schedule.learning_rate import LearningRatePlan, plan_of
from trainer.schedule.path import batch_size_at, path_of


@cache
def theirs(name: str) -> ModuleType:
    """One module of megatron-core, by its file."""
    place = distribution("megatron-core").locate_file(f"megatron/core/{name}.py")
    spec = importlib.util.spec_from_file_location(f"megatron_core_{name}", str(place))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        helpers = ModuleType("megatron.core.utils")
        helpers.log_single_rank = lambda *_: None  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "megatron", ModuleType("megatron"))
        patch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
        patch.setitem(sys.modules, "megatron.core.utils", helpers)
        spec.loader.exec_module(module)
    return module


class _Optimizer:
    param_groups: tuple[dict[str, Any], ...] = ()


def their_rate(plan: LearningRatePlan, samples: int) -> float:
    style = plan.decay_style.upper() if plan.decay_style == "wsd" else plan.decay_style
    scheduler = theirs("optimizer_param_scheduler").OptimizerParamScheduler(
        _Optimizer(), 0.0, plan.learning_rate, plan.min_learning_rate, plan.warmup_samples, plan.decay_samples,
        style, 0.0, 0.0, 1, "constant", wsd_decay_steps=plan.cooldown_samples, lr_wsd_decay_style=plan.cooldown_style,
    )  # fmt: skip
    scheduler.step(samples)
    return float(scheduler.get_lr({}))


def their_ramp(batch: BatchSection) -> Any:
    assert batch.ramp is not None
    return theirs("num_microbatches_calculator").RampupBatchsizeNumMicroBatchesCalculator(
        batch.global_batch_size,
        1,
        1,
        False,
        1,
        batch.ramp.start,
        batch.ramp.increment,
        batch.ramp.samples,
    )


def test_every_rate_and_batch_of_the_176b_card() -> None:
    """Bit for bit: at each of the 12,658 steps of the ramp, and at every hundredth of those that
    follow.
    """
    whole = load_card(shipped_folder() / "tr11-176B-ml.toml", (), {}, keep_undefined=True)
    plan, path, ramp = plan_of(whole), path_of(whole), their_ramp(whole.batch)
    iterations = [*range(12_700), *range(12_700, path.total_iterations, 100), path.total_iterations]
    for iteration in iterations:
        position = path.after_iteration(iteration)
        ramp.update(position.consumed_samples, consistency_check=False)
        assert (
            batch_size_at(position.consumed_samples, whole.batch)
            == ramp.current_running_global_batch_size
        )
        assert plan.at(position.consumed_samples, position.consumed_tokens) == their_rate(
            plan, position.consumed_samples
        )


@given(
    warmup=st.integers(0, 999),
    decay=st.integers(1000, 5000),
    style=st.sampled_from(["cosine", "linear", "constant"]),
    floor=st.floats(0.0, 1.0),
    samples=st.integers(0, 6000),
)
def test_rates_of_any_schedule(
    warmup: int, decay: int, style: str, floor: float, samples: int
) -> None:
    plan = LearningRatePlan(6e-5, floor * 6e-5, style, warmup, 8.0 * warmup, decay, None)
    assert plan.at(samples, 8 * samples) == their_rate(plan, samples)


@given(
    warmup=st.integers(0, 500),
    decay=st.integers(1000, 5000),
    cooldown=st.integers(1, 500),
    style=st.sampled_from(["minus_sqrt", "linear", "cosine", "exponential"]),
    samples=st.integers(0, 6000),
)
def test_rates_of_any_cooldown(
    warmup: int, decay: int, cooldown: int, style: str, samples: int
) -> None:
    """Bit for bit; counted in tokens, 8 of a sample, the rate is the same within rounding."""
    plan = LearningRatePlan(6e-5, 6e-6, "wsd", warmup, 8.0 * warmup, decay, None, style, cooldown)
    assert plan.at(samples, 8 * samples) == their_rate(plan, samples)
    tokens = LearningRatePlan(
        6e-5, 6e-6, "wsd", warmup, 8.0 * warmup, decay, 8 * decay, style, None, 8 * cooldown
    )
    assert tokens.at(samples, 8 * samples) == pytest.approx(
        plan.at(samples, 8 * samples), rel=1e-12
    )


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    levels=st.integers(1, 40),
    ramp=st.integers(1, 20_000),
    consumed=st.integers(0, 25_000),
)
def test_batches_of_any_ramp(
    start: int, increment: int, levels: int, ramp: int, consumed: int
) -> None:
    full = start + increment * levels
    batch = card(
        batch={
            "global_batch_size": full, "micro_batch_size": 1, "micro_batch_ramp": [],
            "ramp": {"start": start, "increment": increment, "samples": ramp},
        }
    ).batch  # fmt: skip
    calculator = their_ramp(batch)
    calculator.update(consumed, consistency_check=False)
    assert batch_size_at(consumed, batch) == calculator.current_running_global_batch_size
