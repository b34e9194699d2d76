"""The batch ramp and the learning rate against the original's logs and a step-by-step count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import BatchSection, RampSection, ScheduleSection
from trainer.schedule import (
    batch_levels,
    batch_size_at,
    consumed_samples_at,
    iterations_at,
    learning_rate_at,
    total_iterations,
)


def ramped(start: int, increment: int, samples: int, full: int, train: int) -> BatchSection:
    ramp = RampSection(start=start, increment=increment, samples=samples)
    return BatchSection(micro_batch_size=1, global_batch_size=full, train_samples=train, ramp=ramp)


TR11 = ramped(192, 16, 9_765_625, 2048, 220_000_000)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (TR11, 115_311),
        (ramped(16, 16, 9_765_625, 2048, 220_000_000), 128_728),
        (ramped(16, 16, 6_000_000, 2048, 300_000_000), 159_576),
        (ramped(16, 16, 5_000_000, 1024, 300_000_000), 311_541),
        (ramped(384, 16, 9_765_625, 2048, 220_000_000), 112_578),
        (BatchSection(micro_batch_size=1, global_batch_size=2048, train_samples=4097), 2),
    ],
)
def test_total_iterations(batch: BatchSection, expected: int) -> None:
    assert total_iterations(batch) == expected


def test_ramp_of_tr11() -> None:
    levels = {level.batch_size: level for level in batch_levels(TR11)}
    assert (levels[208].consumed_samples, levels[208].first_iteration) == (84_288, 440)
    assert (levels[784].consumed_samples, levels[784].first_iteration) == (3_115_072, 7573)
    assert (levels[2048].consumed_samples, levels[2048].first_iteration) == (9_765_808, 12_659)
    assert iterations_at(3_115_072, TR11) == 7572
    assert consumed_samples_at(7572, TR11) == 3_115_072
    assert consumed_samples_at(12_658, TR11) == 9_765_808


def test_ramp_of_16() -> None:
    batch = ramped(16, 16, 9_765_625, 2048, 220_000_000)
    levels = {level.batch_size: level for level in batch_levels(batch)}
    assert levels[32].first_iteration == 4807
    assert levels[384].first_iteration == 17_949


@st.composite
def small_batches(draw: st.DrawFn) -> BatchSection:
    increment = draw(st.integers(1, 9))
    start = draw(st.integers(1, 20))
    full = start + increment * draw(st.integers(1, 15))
    return ramped(start, increment, draw(st.integers(0, 3000)), full, draw(st.integers(start, 6000)))


@settings(deadline=None, derandomize=True)
@given(batch=small_batches())
def test_levels_equal_a_count_step_by_step(batch: BatchSection) -> None:
    consumed, trail = 0, [0]
    while consumed + batch_size_at(consumed, batch) <= batch.train_samples:
        consumed += batch_size_at(consumed, batch)
        trail.append(consumed)
    assert total_iterations(batch) == len(trail) - 1
    for iteration, samples in enumerate(trail):
        assert consumed_samples_at(iteration, batch) == samples
        assert iterations_at(samples, batch) == iteration
        if samples:
            assert iterations_at(samples - 1, batch) == iteration - 1
    for level in batch_levels(batch):
        for step in range(level.iterations):
            assert trail[level.first_iteration - 1 + step] == level.consumed_samples + step * level.batch_size


@given(batch=small_batches(), samples=st.integers(0, 10_000), more=st.integers(0, 1000))
def test_the_batch_never_shrinks_and_keeps_its_steps(batch: BatchSection, samples: int, more: int) -> None:
    assert batch.ramp is not None
    size = batch_size_at(samples, batch)
    assert batch.ramp.start <= size <= batch_size_at(samples + more, batch) <= batch.global_batch_size
    assert (size - batch.ramp.start) % batch.ramp.increment == 0


def schedule(warmup: int, peak: float = 6e-5, floor: float = 6e-6, style: str = "cosine") -> ScheduleSection:
    return ScheduleSection.model_validate(
        {"learning_rate": peak, "min_learning_rate": floor, "warmup_samples": warmup, "decay_style": style}
    )


@pytest.mark.parametrize(
    ("warmup", "decay", "samples", "logged"),
    [
        (183_105, 200_000_000, 59_312, "1.944E-05"),
        (183_105, 200_000_000, 9_841_584, "5.969E-05"),
        (183_105, 200_000_000, 47_768_496, "5.279E-05"),
        (183_105, 200_000_000, 71_455_664, "4.475E-05"),
        (183_105, 200_000_000, 76_002_224, "4.298E-05"),
        (183_105, 200_000_000, 158_692_272, "1.150E-05"),
        (183_105, 200_000_000, 177_927_088, "7.610E-06"),
        (183_105, 200_000_000, 177_929_136, "7.609E-06"),
        (216_320, 126_953_125, 1_519_744, "5.999E-05"),
        (216_320, 126_953_125, 7_594_208, "5.955E-05"),
    ],
)
def test_learning_rates_of_the_logs(warmup: int, decay: int, samples: int, logged: str) -> None:
    assert f"{learning_rate_at(samples, schedule(warmup), decay):.3E}" == logged


def test_edges_of_the_schedule() -> None:
    plan = schedule(100)
    assert learning_rate_at(0, plan, 1000) == 0
    assert learning_rate_at(100, plan, 1000) == 6e-5
    assert learning_rate_at(1000, plan, 1000) == pytest.approx(6e-6)
    assert learning_rate_at(1001, plan, 1000) == 6e-6
    assert learning_rate_at(550, schedule(100, style="linear"), 1000) == pytest.approx(3.3e-5)
    assert learning_rate_at(10**9, schedule(100, style="constant"), 1000) == 6e-5
    assert learning_rate_at(0, schedule(0), 1000) == pytest.approx(6e-5)


@given(st.integers(0, 3000), st.integers(0, 900), st.sampled_from(["cosine", "linear", "constant"]))
def test_the_rate_stays_between_zero_and_peak(samples: int, warmup: int, style: str) -> None:
    rate = learning_rate_at(samples, schedule(warmup, style=style), 1000)
    assert 0 <= rate <= 6e-5 * (1 + 1e-12)
    if samples > warmup:
        assert rate >= 6e-6 * (1 - 1e-12)
