"""Skipped iterations take their data, move every counter, and survive restarts anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.schedule_cards import card, constant, ramped, small_cards
from trainer.config.card import TrainerConfig
from trainer.contract.errors import RangeError
from trainer.contract.record import IterationRange
from trainer.schedule.path import (
    START,
    Position,
    SkipPlan,
    merge_ranges,
    next_training_iteration,
    parse_ranges,
    path_of,
)
from trainer.schedule.rules import skip_problems


def test_ranges_are_read_sorted_and_merged() -> None:
    assert parse_ranges(["30-40", "1-5", "13251-14000", "35-50", "6-6"]) == (
        IterationRange(1, 6),
        IterationRange(30, 50),
        IterationRange(13_251, 14_000),
    )
    assert parse_ranges([]) == ()


@pytest.mark.parametrize(
    "text", ["", "5", "5-", "-5", "7-5", "0-3", "1-2-3", "a-b", " 1-2", "1-２"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(RangeError, match=r"iterations|starts|ends"):
        parse_ranges([text])


def test_the_card_refuses_bad_ranges_and_takes_overlaps() -> None:
    found = skip_problems(card(data={"skip_ranges": ["7-5", "1-3", "2-9", "0-3"]}))
    assert [str(problem) for problem in found] == [
        "data.skip_ranges: '7-5' ends before it starts; write FIRST-LAST, counted from 1",
        "data.skip_ranges: '0-3' starts before iteration 1; write FIRST-LAST, counted from 1",
    ]


RANGES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 12)).map(
        lambda pair: IterationRange(pair[0], pair[0] + pair[1])
    ),
    max_size=6,
)


@given(ranges=RANGES, iteration=st.integers(1, 80))
def test_merged_ranges_say_the_same(ranges: list[IterationRange], iteration: int) -> None:
    skipped = {step for item in ranges for step in range(item.first, item.last + 1)}
    merged = merge_ranges(ranges)
    assert {step for item in merged for step in range(item.first, item.last + 1)} == skipped
    assert all(left.last + 1 < right.first for left, right in pairwise(merged))
    following = next(step for step in range(iteration, 200) if step not in skipped)
    assert next_training_iteration(iteration, merged) == following


def test_the_range_of_the_104b_run_skips_whole_global_batches() -> None:
    """Iterations 13251-14000; the original passed over 1500 samples there, a micro-batch for each
    replica.
    """
    config = ramped(16, 16, 6_000_000, 2048, 300_000_000, data={"skip_ranges": ["13251-14000"]})
    before = path_of(config).after_iteration(13_250)
    found = SkipPlan.of(config).advance(before, config)
    assert found is not None
    assert (found.first, found.last) == (13_251, 14_000)
    assert found.position == path_of(config).after_iteration(14_000)
    assert found.samples == found.position.consumed_samples - before.consumed_samples > 200_000
    assert found.tokens == found.samples * 2048
    assert found.lines == (
        "Skipped iterations 13251 to 14000 due to --skip-train-iteration-range flag.",
        f" > passed over {found.samples} samples, {found.tokens} tokens without a step",
    )
    assert SkipPlan.of(config).advance(found.position, config) is None
    assert SkipPlan.of(config).advance(path_of(config).after_iteration(13_249), config) is None


def test_a_range_that_ends_at_a_resume_hides_no_later_one() -> None:
    config = constant(10, 1000, data={"skip_ranges": ["5-20", "31-40"]})
    plan = SkipPlan.of(config)
    assert plan.advance(path_of(config).after_iteration(20), config) is None
    later = plan.advance(path_of(config).after_iteration(30), config)
    assert later is not None and (later.first, later.last) == (31, 40)


def test_a_range_beyond_the_end_is_cut_there() -> None:
    config = constant(10, 100, data={"skip_ranges": ["8-1000000000"]})
    plan = SkipPlan.of(config)
    found = plan.advance(path_of(config).after_iteration(7), config)
    assert found is not None and (found.last, found.position) == (10, path_of(config).end)
    assert plan.advance(found.position, config) is None


def test_recoveries_add_ranges() -> None:
    config = constant(10, 1000, data={"skip_ranges": ["5-20"]})
    assert SkipPlan.of(config, [IterationRange(18, 25)]).ranges == (IterationRange(5, 25),)


def train(config: TrainerConfig, plan: SkipPlan, position: Position) -> list[Position]:
    """Positions before each trained step, from `position` to the end."""
    trained = []
    total = path_of(config, position).total_iterations
    while position.iteration < total:
        skipped = plan.advance(position, config)
        if skipped is not None:
            position = skipped.position
            continue
        trained.append(position)
        position = path_of(config, position).after_iteration(position.iteration + 1)
    return trained


@settings(deadline=None, derandomize=True, max_examples=40)
@given(config=small_cards(), ranges=RANGES)
def test_restarts_anywhere_train_the_same_steps(
    config: TrainerConfig, ranges: list[IterationRange]
) -> None:
    plan, path = SkipPlan(merge_ranges(ranges)), path_of(config)
    straight = train(config, plan, START)
    skipped = {step for item in ranges for step in range(item.first, item.last + 1)}
    assert [position.iteration + 1 for position in straight] == [
        step for step in range(1, path.total_iterations + 1) if step not in skipped
    ]
    assert all(position == path.after_iteration(position.iteration) for position in straight)
    for stop in range(0, min(75, path.total_iterations), 7):
        resumed = train(config, plan, path.after_iteration(stop))
        assert resumed == [position for position in straight if position.iteration >= stop]
