"""The way through the steps (batch ramp, lengths, stops) against the original's logs and a
step-by-step count.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.schedule_cards import card, constant, ramped, small_cards
from trainer.config.card import TrainerConfig
from trainer.schedule.path import START, Position, batch_size_at, path_of, sequence_length_at


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (card(), 115_311),
        (ramped(16, 16, 9_765_625, 2048, 220_000_000), 128_728),
        (ramped(16, 16, 6_000_000, 2048, 300_000_000), 159_576),
        (ramped(16, 16, 5_000_000, 1024, 300_000_000), 311_541),
        (ramped(384, 16, 9_765_625, 2048, 220_000_000), 112_578),
        (constant(2048, 4097), 2),
    ],
)
def test_total_iterations(config: TrainerConfig, expected: int) -> None:
    assert path_of(config).total_iterations == expected


def test_ramp_of_tr11() -> None:
    path = path_of(card())
    levels = {level.batch_size: level for level in path.batch_levels}
    assert (levels[208].consumed_samples, levels[208].first_iteration) == (84_288, 440)
    assert (levels[784].consumed_samples, levels[784].first_iteration) == (3_115_072, 7573)
    assert (levels[2048].consumed_samples, levels[2048].first_iteration) == (9_765_808, 12_659)
    assert path.after_samples(3_115_072).iteration == 7572
    assert path.after_iteration(7572).consumed_samples == 3_115_072
    assert path.after_iteration(12_658).consumed_samples == 9_765_808
    # A line of the original's log.
    assert path.after_samples(47_768_496) == Position(31_214, 47_768_496, 97_829_879_808)


def test_ramp_of_16() -> None:
    levels = {
        level.batch_size: level
        for level in path_of(ramped(16, 16, 9_765_625, 2048, 220_000_000)).batch_levels
    }
    assert levels[32].first_iteration == 4807
    assert levels[384].first_iteration == 17_949


def test_trainings_counted_in_iterations() -> None:
    batch = {"train_iterations": 77, "train_samples": None, "global_batch_size": 512, "ramp": None}
    config = card(batch=batch, schedule={"warmup_samples": None, "decay_samples": None})
    assert path_of(config).end == Position(77, 77 * 512, 77 * 512 * 2048)


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 1), (20 * 2048, 1), (20 * 2048 + 1, 2), (10**12, 50)]
)
def test_training_stops_at_the_step_that_reaches_the_tokens(tokens: int, steps: int) -> None:
    config = constant(20, 1000)
    config = config.model_copy(
        update={"batch": config.batch.model_copy(update={"train_tokens": tokens})}
    )
    assert path_of(config).total_iterations == steps


def test_positions_of_a_path_outside_itself() -> None:
    path = path_of(constant(10, 95))
    assert (
        path.after_iteration(0)
        == path.after_samples(9)
        == path.after_tokens(10 * 2048 - 1)
        == START
    )
    assert (
        path.after_iteration(10**6)
        == path.after_samples(10**6)
        == path.after_tokens(10**9)
        == path.end
    )
    assert path.end == Position(9, 90, 90 * 2048)
    assert path.tokens_at(-1) == 0
    assert path.tokens_at(25) == 25 * 2048
    assert path.tokens_at(120) == 120 * 2048


def test_a_finished_training_has_no_path_left() -> None:
    config = constant(10, 95)
    end = path_of(config).end
    rest = path_of(config, end)
    assert (rest.segments, rest.total_iterations, rest.end) == ((), 9, end)
    assert rest.batch_levels == ()
    assert rest.tokens_at(120) == end.consumed_tokens


def test_a_batch_changed_in_mid_run_ends_with_the_same_samples() -> None:
    half = path_of(constant(10, 1000)).after_iteration(50)
    rest = path_of(constant(25, 1000), half)
    assert rest.end == Position(50 + 20, 1000, 1000 * 2048)


def walk(config: TrainerConfig) -> list[Position]:
    """Positions after each step, counted one by one."""
    iteration, consumed, tokens, trail = 0, 0, 0, [START]
    while config.batch.train_tokens is None or tokens < config.batch.train_tokens:
        size = batch_size_at(consumed, config.batch)
        if consumed + size > config.batch.train_samples:
            break
        iteration, consumed = iteration + 1, consumed + size
        tokens += size * sequence_length_at(
            iteration, config.curriculum, config.model.sequence_length
        )
        trail.append(Position(iteration, consumed, tokens))
    return trail


@settings(deadline=None, derandomize=True)
@given(config=small_cards(), data=st.data())
def test_path_equals_a_count_step_by_step(config: TrainerConfig, data: st.DataObject) -> None:
    path, trail = path_of(config), walk(config)
    assert path.end == trail[-1]
    for position in trail:
        assert path.after_iteration(position.iteration) == position
        assert path.after_samples(position.consumed_samples) == position
        assert path.after_tokens(position.consumed_tokens) == position
        assert path.tokens_at(position.consumed_samples) == position.consumed_tokens
        if position.iteration:
            before = trail[position.iteration - 1]
            assert path.after_samples(position.consumed_samples - 1) == before
            assert path.after_tokens(position.consumed_tokens - 1) == before
            middle = (before.consumed_samples + position.consumed_samples) / 2
            assert path.tokens_at(middle) == (before.consumed_tokens + position.consumed_tokens) / 2
    start = data.draw(st.sampled_from(trail))
    rest = path_of(config, start)
    assert rest.end == trail[-1]
    assert [
        rest.after_iteration(position.iteration) for position in trail[start.iteration :]
    ] == trail[start.iteration :]
    for level in path.batch_levels:
        for step in range(level.iterations):
            position = trail[level.first_iteration - 1 + step]
            assert position.consumed_samples == level.consumed_samples + step * level.batch_size


@given(config=small_cards(), samples=st.integers(0, 10_000), more=st.integers(0, 1000))
def test_the_batch_never_shrinks_and_keeps_its_steps(
    config: TrainerConfig, samples: int, more: int
) -> None:
    batch = config.batch
    assert batch.ramp is not None
    size = batch_size_at(samples, batch)
    assert (
        batch.ramp.start <= size <= batch_size_at(samples + more, batch) <= batch.global_batch_size
    )
    assert (size - batch.ramp.start) % batch.ramp.increment == 0
