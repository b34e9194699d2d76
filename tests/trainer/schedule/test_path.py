"""The way through the steps (batch ramp, lengths, stops) against the original's logs and a
step-by-step count.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.trainer.schedule_cards import card, constant, ramped, small_cards
from trainer.config.card import CurriculumSection, TrainerConfig
from trainer.contract.errors import RangeError
from trainer.contract.record import IterationRange
from trainer.schedule.path import (
    START,
    Position,
    SkipPlan,
    batch_size_at,
    count_lengths,
    last_step_of_length,
    merge_ranges,
    next_training_iteration,
    parse_ranges,
    path_of,
    sequence_length_at,
)
from trainer.schedule.rules import curriculum_problems, skip_problems


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


# ----------------------------------------------------------------------------- skip
# Skipped iterations take their data, move every counter, and survive restarts anywhere.


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


# ----------------------------------------------------------------------------- curriculum
# Sequence lengths of the curriculum, against DeepSpeed's scheduler and the figures of the 104B
# training.

TR8B = CurriculumSection(kind="linear", start_length=64, step=8, total_steps=36_000)


@pytest.mark.parametrize(
    ("iteration", "length"),
    [
        (1, 64),
        (145, 64),
        (146, 72),
        (290, 72),
        (291, 80),
        (35_999, 2040),
        (36_000, 2048),
        (10**9, 2048),
    ],
)
def test_lengths_of_the_104b_training(iteration: int, length: int) -> None:
    assert sequence_length_at(iteration, TR8B, 2048) == length


def test_no_curriculum_is_the_full_length() -> None:
    assert sequence_length_at(1, None, 2048) == 2048
    assert last_step_of_length(1, None, 2048) is None


def test_discrete_lengths_last_until_their_steps() -> None:
    curriculum = CurriculumSection(kind="discrete", lengths=[128, 512, 2048], until_steps=[5, 10])
    lengths = [sequence_length_at(step, curriculum, 2048) for step in range(1, 13)]
    assert lengths == [128] * 5 + [512] * 5 + [2048] * 2


@pytest.fixture(scope="module")
def scheduler() -> Any:
    """DeepSpeed's own class."""
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    return CurriculumScheduler


STEPS = 8


@st.composite
def curricula(draw: st.DrawFn) -> tuple[CurriculumSection, int]:
    if draw(st.booleans()):
        lengths = sorted(draw(st.sets(st.integers(1, 5000), min_size=2, max_size=6)))
        until = sorted(
            draw(st.sets(st.integers(1, 900), min_size=len(lengths) - 1, max_size=len(lengths) - 1))
        )
        return CurriculumSection(kind="discrete", lengths=lengths, until_steps=until), lengths[-1]
    start = STEPS * draw(st.integers(1, 40))
    full = start + STEPS * draw(st.integers(1, 200))
    kind = draw(st.sampled_from(["linear", "root"]))
    section = CurriculumSection.model_validate(
        {
            "kind": kind,
            "start_length": start,
            "step": STEPS,
            "total_steps": draw(st.integers(1, 900)),
            "root_degree": draw(st.sampled_from([1.0, 2.0, 3.0, 1.5])),
        }
    )
    return section, full


def theirs(scheduler: Any, section: CurriculumSection, full: int) -> Any:
    name, limits = (
        f"fixed_{section.kind}",
        {"min_difficulty": section.start_length, "max_difficulty": full},
    )
    settings: dict[str, Any] = {
        "total_curriculum_step": section.total_steps,
        "difficulty_step": section.step,
    }
    if section.kind == "root":
        settings["root_degree"] = section.root_degree
    if section.kind == "discrete":
        limits = {"min_difficulty": section.lengths[0], "max_difficulty": full}
        settings = {"difficulty": section.lengths, "max_step": section.until_steps}
    return scheduler(
        {"curriculum_type": "seqlen", "schedule_type": name, "schedule_config": settings, **limits}
    )


@settings(deadline=None, derandomize=True)
@given(case=curricula())
def test_lengths_equal_deepspeeds(scheduler: Any, case: tuple[CurriculumSection, int]) -> None:
    section, full = case
    oracle = theirs(scheduler, section, full)
    lengths = [sequence_length_at(step, section, full) for step in range(1, 1001)]
    assert lengths == [oracle.update_difficulty(step) for step in range(1, 1001)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == full
    assert len(set(lengths)) <= count_lengths(section, full)
    for step in range(1, 1001, 13):
        last = last_step_of_length(step, section, full)
        if last is None:
            assert lengths[step - 1] == full
        else:
            assert sequence_length_at(last, section, full) == lengths[step - 1]
            assert sequence_length_at(last + 1, section, full) > lengths[step - 1]


LINEAR = {"kind": "linear", "start_length": 64, "step": 8, "total_steps": 100}
DISCRETE = {"kind": "discrete", "lengths": [128, 2048], "until_steps": [5]}


def test_curricula_without_fault() -> None:
    assert curriculum_problems(card()) == []
    for curriculum in (LINEAR, {**LINEAR, "kind": "root"}, DISCRETE):
        assert curriculum_problems(card(curriculum=curriculum)) == []


@pytest.mark.parametrize(
    ("curriculum", "key", "rule"),
    [
        ({**LINEAR, "start_length": None}, "start_length", "is needed by a linear"),
        ({**LINEAR, "total_steps": None}, "total_steps", "is needed by a linear"),
        ({**LINEAR, "lengths": [64]}, "lengths", "is for discrete"),
        ({**LINEAR, "until_steps": [64]}, "until_steps", "is for discrete"),
        ({**LINEAR, "step": 3}, "step", "must divide model.sequence_length"),
        ({**LINEAR, "start_length": 4096}, "start_length", "must not exceed"),
        (
            {**LINEAR, "start_length": 68},
            "start_length",
            "must be a multiple of curriculum.step (8)",
        ),
        ({**DISCRETE, "start_length": 64}, "start_length", "not for discrete"),
        ({**DISCRETE, "total_steps": 64}, "total_steps", "not for discrete"),
        ({**DISCRETE, "until_steps": []}, "until_steps", "one entry for each"),
        ({**DISCRETE, "lengths": []}, "until_steps", "one entry for each"),
        (
            {**DISCRETE, "lengths": [128, 1024]},
            "lengths",
            "must end with model.sequence_length (2048)",
        ),
        (
            {**DISCRETE, "lengths": [2048, 128], "until_steps": [5]},
            "lengths",
            "must be above zero and rise",
        ),
        (
            {**DISCRETE, "lengths": [1, 2, 2048], "until_steps": [9, 5]},
            "until_steps",
            "must be above zero and rise",
        ),
    ],
)
def test_curricula_that_are_refused(curriculum: dict[str, Any], key: str, rule: str) -> None:
    problems = curriculum_problems(card(curriculum=curriculum))
    assert any(
        problem.key == f"curriculum.{key}" and rule in problem.rule for problem in problems
    ), problems


@pytest.mark.parametrize(
    ("curriculum", "key"),
    [({**LINEAR, "step": 4}, "step"), ({**DISCRETE, "lengths": [129, 2048]}, "lengths")],
)
def test_lengths_that_sequence_parallelism_cannot_cut(curriculum: dict[str, Any], key: str) -> None:
    plain = card(curriculum=curriculum, parallel={"tensor": 8})
    cut = card(curriculum=curriculum, parallel={"tensor": 8, "sequence_parallel": True})
    assert curriculum_problems(plain) == []
    assert [problem.key for problem in curriculum_problems(cut)] == [f"curriculum.{key}"]


def test_too_many_lengths() -> None:
    many = card(
        model={"sequence_length": 20_001}, curriculum={**LINEAR, "step": 1, "start_length": 1}
    )
    assert "more than 10000 lengths" in curriculum_problems(many)[0].rule
