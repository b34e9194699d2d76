"""Sequence lengths of the curriculum, against DeepSpeed's scheduler and the figures of the 104B
training.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.schedule_cards import card
from trainer.config.card import CurriculumSection
from trainer.schedule.path import count_lengths, last_step_of_length, sequence_length_at
from trainer.schedule.rules import curriculum_problems

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
