"""The learning rate against the logs of the original, the rules of the card around it, and both it and the
batch ramp against the classes of megatron-core.

Only the two modules of that are loaded: their package looks for GPU libraries.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from importlib.metadata import distribution
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.trainer.schedule_cards import card
from tr11ops.runcard.card import load_card, shipped_folder
from trainer.config.card import BatchSection, TrainerConfig
from trainer.contract.errors import ScheduleMismatch
from trainer.schedule.learning_rate import LearningRatePlan, plan_of
from trainer.schedule.path import Progress, batch_size_at, path_of
from trainer.schedule.rules import cross_problems
from trainer.schedule.start import reconcile

TR8 = {"warmup_samples": 216_320, "decay_samples": 126_953_125}


def rate(samples: int, config: TrainerConfig) -> float:
    return plan_of(config).at(samples, samples * config.model.sequence_length)


@pytest.mark.parametrize(
    ("schedule", "samples", "logged"),
    [
        ({}, 59_312, "1.944E-05"),
        ({}, 9_841_584, "5.969E-05"),
        ({}, 47_768_496, "5.279E-05"),
        ({}, 71_455_664, "4.475E-05"),
        ({}, 76_002_224, "4.298E-05"),
        ({}, 158_692_272, "1.150E-05"),
        ({}, 177_927_088, "7.610E-06"),
        ({}, 177_929_136, "7.609E-06"),
        (TR8, 1_519_744, "5.999E-05"),
        (TR8, 7_594_208, "5.955E-05"),
    ],
)
def test_learning_rates_of_the_logs(schedule: dict[str, Any], samples: int, logged: str) -> None:
    assert f"{rate(samples, card(schedule=schedule)):.3E}" == logged


def plan(
    warmup: float = 100, style: str = "cosine", decay: int = 1000, **changes: Any
) -> LearningRatePlan:
    values: dict[str, Any] = {"warmup_tokens": warmup * 8, "decay_tokens": None} | changes
    return LearningRatePlan(
        6e-5, 6e-6, style, warmup, values["warmup_tokens"], decay, values["decay_tokens"]
    )


def test_edges_of_the_schedule() -> None:
    assert plan().at(0, 0) == 0
    assert plan().at(100, 0) == 6e-5
    assert plan().at(1000, 0) == 6e-6
    assert plan().at(1001, 0) == 6e-6
    assert plan(style="linear").at(550, 0) == pytest.approx(3.3e-5)
    assert plan(style="constant").at(10**9, 0) == 6e-5
    assert plan(warmup=0).at(0, 0) == pytest.approx(6e-5)


@given(
    st.integers(0, 3000),
    st.integers(0, 900),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.booleans(),
)
def test_the_rate_stays_between_floor_and_peak(
    samples: int, warmup: int, style: str, by_tokens: bool
) -> None:
    found = plan(warmup, style, decay_tokens=8000 if by_tokens else None).at(samples, samples * 8)
    assert 0 <= found <= 6e-5 * (1 + 1e-12)
    if samples > warmup:
        assert found >= 6e-6 * (1 - 1e-12)


@given(st.integers(0, 3000), st.sampled_from(["cosine", "linear"]))
def test_decay_by_tokens_is_by_samples_where_lengths_are_fixed(samples: int, style: str) -> None:
    assert plan(style=style).at(samples, 0) == plan(style=style, decay_tokens=8000).at(
        samples, samples * 8
    )


def test_updates_that_fp16_dropped_do_not_move_the_schedule() -> None:
    progress = Progress()
    for dropped in (False, True, True, False):
        progress = progress.after_step(25, 8, loss=2.0, skipped=dropped)
    assert progress.consumed_samples == 100
    assert plan().at(progress.scheduled_samples, progress.scheduled_tokens) == pytest.approx(3e-5)


CURRICULUM = {"kind": "linear", "start_length": 64, "step": 8, "total_steps": 36_000}


def test_token_decay_starts_exactly_where_the_warmup_ends() -> None:
    """Also where the warm-up ends inside a step, at which the original took zero tokens and the
    rate jumped.
    """
    config = card(schedule={"decay_tokens": 260_000_000_000}, curriculum=CURRICULUM)
    found, path = plan_of(config), path_of(config)
    behind = path.after_samples(183_105)
    assert (
        behind.consumed_samples
        < 183_105
        < path.after_iteration(behind.iteration + 1).consumed_samples
    )
    length = (
        path.after_iteration(behind.iteration + 1).consumed_tokens - behind.consumed_tokens
    ) // (path.after_iteration(behind.iteration + 1).consumed_samples - behind.consumed_samples)
    assert (
        found.warmup_tokens == behind.consumed_tokens + (183_105 - behind.consumed_samples) * length
    )
    rates = [
        found.at(position.consumed_samples, position.consumed_tokens)
        for position in map(path.after_iteration, range(behind.iteration - 3, behind.iteration + 4))
    ]
    steps = [abs(later - earlier) for earlier, later in pairwise(rates)]
    # warm-up steps, then hardly any decay: no jump between
    assert max(steps[4:]) < 1e-9 < steps[0] < 2e-7


def test_token_decay_ends_at_its_tokens() -> None:
    found = plan_of(card(schedule={"decay_tokens": 10**11}))
    assert found.at(10**7, 10**11 - 10**6) > 6e-6
    assert found.at(10**7, 10**11) == 6e-6
    middle = (found.warmup_tokens + 10**11) / 2
    assert found.at(10**7, int(middle)) == pytest.approx((6e-5 + 6e-6) / 2)
    assert math.isclose(found.warmup_tokens, 183_105 * 2048)


def test_lengths_by_fraction_and_by_iterations() -> None:
    by_fraction = plan_of(card(schedule={"warmup_samples": None, "warmup_fraction": 0.01}))
    assert by_fraction.warmup_samples == 2_000_000
    batch = {
        "train_iterations": 1000,
        "train_samples": None,
        "global_batch_size": 512,
        "ramp": None,
    }
    lengths = {"warmup_samples": None, "decay_samples": None}
    steps = plan_of(
        card(batch=batch, schedule={**lengths, "warmup_iterations": 10, "decay_iterations": 800})
    )
    assert (steps.warmup_samples, steps.decay_samples) == (5120, 800 * 512)
    whole = plan_of(card(batch=batch, schedule={**lengths, "warmup_fraction": 0.1}))
    assert (whole.warmup_samples, whole.decay_samples) == (51_200, 512_000)


ITERATIONS = {"train_iterations": 1000, "train_samples": None, "ramp": None}
NONE = {"warmup_samples": None, "decay_samples": None}


@pytest.mark.parametrize(
    ("batch", "schedule", "key", "rule"),
    [
        ({}, {"min_learning_rate": 1.0}, "schedule.min_learning_rate", "must not exceed"),
        (
            {},
            {"warmup_samples": 200_000_000},
            "schedule.warmup_samples",
            "below schedule.decay_samples (200000000)",
        ),
        ({}, {"warmup_fraction": 0.1}, "schedule.warmup_fraction", "excludes"),
        (
            {},
            {"warmup_iterations": 5},
            "schedule.warmup_iterations",
            "counted by batch.train_iterations",
        ),
        (
            {},
            {"decay_iterations": 5},
            "schedule.decay_iterations",
            "counted by batch.train_iterations",
        ),
        (
            {},
            {"decay_tokens": 183_105 * 2048},
            "schedule.warmup_samples",
            "ends after 374999040 tokens",
        ),
        (
            ITERATIONS,
            {"decay_samples": None},
            "schedule.warmup_samples",
            "counted by batch.train_samples",
        ),
        (
            ITERATIONS,
            {"warmup_samples": None},
            "schedule.decay_samples",
            "counted by batch.train_samples",
        ),
        ({"train_iterations": 1000, "train_samples": None}, NONE, "batch.ramp", "counts samples"),
        ({"train_iterations": 1000, "ramp": None}, NONE, "batch.train_samples", "(2048000)"),
        (
            ITERATIONS,
            {**NONE, "warmup_iterations": 500, "decay_iterations": 500},
            "schedule.warmup_iterations",
            "below schedule.decay_iterations (500)",
        ),
    ],
)
def test_schedules_that_are_refused(
    batch: dict[str, Any], schedule: dict[str, Any], key: str, rule: str
) -> None:
    problems = cross_problems(card(batch=batch, schedule=schedule), 1)
    assert any(problem.key == key and rule in problem.rule for problem in problems), problems


def test_schedules_without_fault() -> None:
    assert cross_problems(card(), 1) == []
    assert cross_problems(card(schedule={"decay_style": "constant", "decay_samples": 1}), 1) == []
    steps = {**NONE, "warmup_iterations": 10, "decay_iterations": 900}
    assert cross_problems(card(batch=ITERATIONS, schedule=steps), 1) == []


def test_a_broken_ramp_is_told_once_and_stops_no_other_rule() -> None:
    """With a decay by tokens the rules walk the path of the card, which these cards do not have."""
    ramp = {"start": 2048, "increment": 16, "samples": 100}
    tokens = {"decay_tokens": 10}
    assert "batch.ramp.start" in {
        problem.key for problem in cross_problems(card(batch={"ramp": ramp}, schedule=tokens), 1)
    }
    broken = card(schedule=tokens, curriculum={"kind": "linear"})
    assert "curriculum.start_length" in {problem.key for problem in cross_problems(broken, 1)}


# ------------------------------------------------------------------------ warm-up, stable, cooldown
def test_a_cooldown_ends_the_decay() -> None:
    wsd = LearningRatePlan(6e-5, 6e-6, "wsd", 100, 800.0, 1000, None, "linear", 200)
    assert [wsd.at(samples, 0) for samples in (50, 100, 800, 900, 1000, 2000)] == pytest.approx(
        [3e-5, 6e-5, 6e-5, 3.3e-5, 6e-6, 6e-6]
    )


@pytest.mark.parametrize(
    ("schedule", "key", "words"),
    [
        ({"decay_style": "wsd"}, "cooldown_samples", 'is needed by schedule.decay_style = "wsd"'),
        ({"cooldown_samples": 100}, "cooldown_samples", 'needs schedule.decay_style = "wsd"'),
        (
            {"decay_style": "wsd", "cooldown_samples": 9, "cooldown_tokens": 9},
            "cooldown_samples",
            "excludes schedule",
        ),
        (
            {"decay_style": "wsd", "cooldown_tokens": 9},
            "cooldown_tokens",
            "is not counted as the decay is, in samples",
        ),
        (
            {"decay_style": "wsd", "cooldown_iterations": 9},
            "cooldown_iterations",
            "counted by batch.train_iterations",
        ),
        (
            {"decay_style": "wsd", "cooldown_samples": 10**9},
            "cooldown_samples",
            "at most what the decay has behind",
        ),
    ],
    ids=str,
)
def test_a_cooldown_that_is_none_is_one_line(
    schedule: dict[str, Any], key: str, words: str
) -> None:
    found = [str(problem) for problem in cross_problems(card(schedule=schedule), 384)]
    assert [line for line in found if f"schedule.{key}" in line and words in line], found
    assert not any("\n" in line for line in found)


def test_a_branch_cools_down_from_a_stable_training() -> None:
    """The branch's card differs in the end of its decay alone: to that end both have one rate, and
    then it leaves.
    """
    trunk = card(schedule={"decay_style": "wsd", "cooldown_samples": 10_000})
    branch = card(
        schedule={"decay_style": "wsd", "cooldown_samples": 10_000, "decay_samples": 1_000_000}
    )
    assert all(
        rate(samples, trunk) == rate(samples, branch) for samples in (1000, 500_000, 990_000)
    )
    assert rate(1_000_000, branch) == branch.schedule.min_learning_rate < rate(1_000_000, trunk)


# ----------------------------------------------------------------------------- resume
# Card against checkpoint: refused, overridden, or taken from the checkpoint.

SAVED = plan_of(card()).facts()
CHANGES: dict[str, dict[str, Any]] = {
    "learning rate": {"learning_rate": 5e-5},
    "minimum learning rate": {"min_learning_rate": 6e-7},
    "warm-up (samples)": {"warmup_samples": 200_000},
    "decay length (samples)": {"decay_samples": 12_695_312},
    "decay length (tokens)": {"decay_tokens": 300_000_000_000},
    "decay style": {"decay_style": "linear"},
}


@pytest.mark.parametrize("on_resume", ["match", "override", "checkpoint"])
def test_equal_schedules_go_on(on_resume: Any) -> None:
    found = reconcile(SAVED, plan_of(card()), on_resume)
    assert found.plan == plan_of(card())
    assert on_resume == "checkpoint" or found.remarks == ()


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_refused_with_name_and_both_values(name: str) -> None:
    mine = plan_of(card(schedule=CHANGES[name]))
    with pytest.raises(ScheduleMismatch) as refusal:
        reconcile(SAVED, mine, "match")
    (line,) = str(refusal.value).splitlines()
    key = next(iter(CHANGES[name]))
    old = (
        "none"
        if SAVED[key] is None
        else f"{SAVED[key]:.12g}"
        if isinstance(SAVED[key], float)
        else str(SAVED[key])
    )
    assert line.startswith(f"{name}: value from checkpoint ({old}) is not equal to the card's (")
    assert f"({CHANGES[name][key]})" in line
    assert f"schedule.{key}" in line and 'schedule.on_resume to "override"' in line


def test_all_differences_are_told_at_once() -> None:
    mine = plan_of(card(schedule={"learning_rate": 5e-5, "decay_style": "linear"}))
    with pytest.raises(ScheduleMismatch) as refusal:
        reconcile(SAVED, mine, "match")
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == [
        "learning rate",
        "decay style",
    ]


def test_the_card_wins() -> None:
    """As in the override of the 104B training's 8-bit run."""
    mine = plan_of(card(schedule={"min_learning_rate": 6e-7, "decay_samples": 12_695_312}))
    found = reconcile(SAVED, mine, "override")
    assert found.plan == mine
    assert found.remarks == (
        " > overriding minimum learning rate value to 6e-07",
        " > overriding decay length (samples) value to 12695312",
    )


def test_the_checkpoint_wins() -> None:
    mine = plan_of(
        card(schedule={"learning_rate": 1e-4, "warmup_samples": 5, "decay_tokens": 10**12})
    )
    found = reconcile(SAVED, mine, "checkpoint")
    assert found.plan == plan_of(card())
    assert " > using checkpoint value 6e-05 for learning rate" in found.remarks
    assert " > using checkpoint value none for decay length (tokens)" in found.remarks


def test_a_token_decay_keeps_its_start_when_the_path_changes() -> None:
    tokens = {"decay_tokens": 300_000_000_000}
    before = plan_of(card(schedule=tokens))
    curriculum = {"kind": "linear", "start_length": 64, "step": 8, "total_steps": 36_000}
    after = plan_of(card(schedule=tokens, curriculum=curriculum))
    assert after.warmup_tokens != before.warmup_tokens
    assert reconcile(before.facts(), after, "match").plan == before
    assert reconcile(before.facts(), after, "override").plan == after


def test_the_length_in_samples_is_ignored_where_tokens_decay() -> None:
    tokens = {"decay_tokens": 300_000_000_000}
    other = plan_of(card(schedule={**tokens, "decay_samples": 7_000_000}))
    assert reconcile(plan_of(card(schedule=tokens)).facts(), other, "match").plan == other


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
