"""When an attempt leaves by itself: derived from limit, measured or estimated times, and never in
place of the card's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.launch.margins import room_before_limit
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.runcard.exit_duration import (
    ExitPlan,
    JobTime,
    card_as_written,
    derived_again,
    exit_plan,
    exit_time,
    resolved_exit_plan,
    resolved_with_exit,
    too_short,
)
from tr11ops.runcard.speed import RunHistory
from trainer.config.card import load_trainer_config

MAIN = shipped_folder() / "tr11-176B-ml.toml"
UNSAID = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]


def big(*overrides: str) -> RunCard:
    return load_card(MAIN, [*UNSAID, *overrides], {}, keep_undefined=True)


WHOLE = big()


@pytest.fixture
def small(tmp_path: Path) -> RunCard:
    return load_card(write_card(tmp_path), [*UNSAID, "evaluation.iterations=1"], {})


def test_the_original_by_estimate_and_by_what_it_measured() -> None:
    """29 evaluations took 12 minutes, a step 105 s, a save 40 s: ten minutes before the limit were
    too few.
    """
    estimated, measured = (
        exit_plan(big()),
        exit_plan(big(), RunHistory(step=105.2, save=40.0, evaluation=720.0)),
    )
    assert estimated.is_derived and measured.is_derived
    assert estimated.minutes == pytest.approx(5980, abs=4) and measured.minutes == pytest.approx(
        5982, abs=2
    )
    assert estimated.why == (
        "19 min before the limit: a step 1 min 45 s (assumed), an evaluation 12 min (assumed), a save 56 s (assumed), "
        "the rest to spare"
    )
    assert "a save 40 s (measured)" in measured.why


def test_a_save_that_takes_long_moves_it(small: RunCard) -> None:
    # nothing is known but the limit of ten minutes
    assert exit_plan(small).minutes == pytest.approx(7.5)
    quick = exit_plan(small, RunHistory(step=1.0, save=3.0, evaluation=5.0)).minutes
    slow = exit_plan(small, RunHistory(step=1.0, save=120.0, evaluation=5.0)).minutes
    assert (
        quick is not None
        and slow is not None
        and quick == pytest.approx(8.85)
        and slow == pytest.approx(6.9, abs=0.1)
    )


def test_what_the_card_says_goes_before(small: RunCard, tmp_path: Path) -> None:
    said = load_card(tmp_path / "small.toml", ["slurm.signal_seconds_before_limit=none"], {})
    limit = float(said.time_limit_seconds)
    assert exit_plan(said, RunHistory(save=500.0)) == ExitPlan(1.0, limit=limit)
    by_signal = load_card(tmp_path / "small.toml", ["run.exit_duration_minutes=none"], {})
    assert (
        exit_plan(by_signal) == ExitPlan(None, limit=limit)
        and exit_plan(by_signal).applied(by_signal) is by_signal
    )


def test_a_limit_without_room_gives_none_and_says_so(small: RunCard) -> None:
    plan = exit_plan(small, RunHistory(step=30.0, save=400.0))
    assert plan.minutes is None and not plan.is_derived
    assert plan.why.startswith(
        "too little of slurm.time_limit is left beside a step 30 s (measured), "
    )


@given(
    limit=st.integers(2, 6000),
    step=st.none() | st.floats(0.01, 1000),
    save=st.none() | st.floats(0.01, 10_000),
    evaluation=st.none() | st.floats(0.01, 10_000),
)
def test_a_derived_end_always_leaves_room_for_it_all(
    limit: int, step: float | None, save: float | None, evaluation: float | None
) -> None:
    card = WHOLE.model_copy(
        update={"slurm": WHOLE.slurm.model_copy(update={"time_limit": str(limit)})}
    )
    plan = exit_plan(card, RunHistory(step=step, save=save, evaluation=evaluation))
    if plan.minutes is None:
        assert plan.why
        return
    room = room_before_limit(plan.applied(card))
    assert room is not None and 0 < plan.minutes < limit
    assert room[0] >= (step or 0) + (save or 0) + (evaluation or 0)
    assert plan.minutes >= limit / 2 - 1


def test_the_trainer_reads_it_and_the_hash_stays_the_cards(small: RunCard, tmp_path: Path) -> None:
    value = resolved_with_exit(small, exit_plan(small))
    (tmp_path / "card.json").write_text(json.dumps(value))
    assert load_trainer_config(tmp_path / "card.json").run.exit_duration_minutes == 7.5
    assert value["derived"]["card_hash"] == small.digest and card_as_written(value, "x") == small


def test_an_attempt_derives_it_from_what_was_measured_since(small: RunCard) -> None:
    value = resolved_with_exit(small, exit_plan(small))
    again, plan = derived_again(value, "x", RunHistory(step=1.0, save=120.0, evaluation=5.0))
    assert plan.is_derived and again["run"][
        "exit_duration_minutes"
    ] == plan.minutes == pytest.approx(6.9, abs=0.1)
    assert again["derived"] == value["derived"] and card_as_written(again, "x") == small
    kept, plan = derived_again(value, "x", RunHistory(step=1.0, save=900.0))
    assert kept["run"]["exit_duration_minutes"] == 7.5 and not plan.is_derived
    said = small.model_copy(
        update={"run": small.run.model_copy(update={"exit_duration_minutes": 3.0})}
    )
    value = resolved_with_exit(said, exit_plan(said))
    assert derived_again(value, "x", RunHistory(save=120.0)) == (value, ExitPlan(3.0))


# --------------------------------------------------------------------------- the limit as it is now
MEASURED = RunHistory(step=1.0, save=3.0, evaluation=5.0, start=40.0)
CARD_LIMIT = 600.0


def test_the_exit_time_follows_the_limit_of_the_job(small: RunCard) -> None:
    own = exit_time(small, MEASURED, JobTime(1000.0, 1000.0 + CARD_LIMIT), 1000.0)
    assert own.time == pytest.approx(1000.0 + 600 - 9 - 60)
    shorter = exit_time(small, MEASURED, JobTime(1000.0, 1120.0), 1000.0)
    assert (
        shorter.time == pytest.approx(1120 - 9 - 15)
        and "before the job's limit of 2 min" in shorter.why
    )
    longer = exit_time(small, MEASURED, JobTime(1000.0, 1000.0 + 72000), 1000.0)
    assert longer.time == pytest.approx(73000 - 9 - 60)
    assert exit_time(small, MEASURED, JobTime(1000.0, None), 1000.0).time is None


def test_the_cards_own_minutes_and_signal_are_kept(small: RunCard) -> None:
    minutes = small.model_copy(
        update={"run": small.run.model_copy(update={"exit_duration_minutes": 9.9})}
    )
    longer = exit_time(minutes, MEASURED, JobTime(1000.0, 9000.0), 1002.0)
    assert (longer.time, longer.why) == (1002 + 594, "9.9 min, as the card says")
    # as much as the card keeps
    assert exit_time(minutes, MEASURED, JobTime(1000.0, 1300.0), 1000.0).time == 1300 - 6
    assert exit_time(minutes, MEASURED, JobTime(1000.0, None), 1002.0).time == 1002 + 594
    signal = small.model_copy(
        update={"slurm": small.slurm.model_copy(update={"signal_seconds_before_limit": 8})}
    )
    assert exit_time(signal, MEASURED, JobTime(1000.0, 1300.0), 1000.0).time == 1292


@given(st.floats(60, 10**6), st.floats(0, 500), st.floats(0, 500))
def test_an_exit_time_leaves_room_for_step_and_save(limit: float, step: float, save: float) -> None:
    told = exit_time(
        WHOLE, RunHistory(step=step, save=save, evaluation=0.0), JobTime(0.0, limit), 0.0
    )
    assert told.time is not None and told.time <= limit - step - save


def test_what_is_only_assumed_takes_no_more_than_half(small: RunCard) -> None:
    """A card that leaves little time was accepted with a warning: it trains all the same."""
    job = JobTime(1000.0, 1000.0 + 900)
    assert exit_time(WHOLE, None, job, 1000.0).time == 1450
    measured = RunHistory(step=100.0, save=40.0, evaluation=720.0)
    assert exit_time(WHOLE, measured, job, 1000.0).time == pytest.approx(1900 - 860 - 112.5)


def test_a_limit_too_short_is_said_with_what_it_is_too_short_for() -> None:
    assert too_short(WHOLE, MEASURED, JobTime(1000.0, 1120.0), 1001.0) == ""
    assert too_short(WHOLE, MEASURED, JobTime(1000.0, None), 1001.0) == ""
    late = too_short(WHOLE, MEASURED, JobTime(1000.0, 1060.0), 1015.0)
    assert late == (
        "the job's time limit of 1 min is too short to train and save in: a start 40 s, a step 1 s, a save 3 s (measured)"
    )
    assert "a save 2 min" in too_short(
        WHOLE, RunHistory(save=120.0), JobTime(1000.0, 1060.0), 1001.0
    )
    # no save was measured
    assert (
        too_short(WHOLE, RunHistory(step=300.0, start=900.0), JobTime(1000.0, 1060.0), 1001.0) == ""
    )


@pytest.mark.parametrize(
    ("limit", "is_short"), [(300.0, True), (340.0, True), (345.0, False), (900.0, False)]
)
def test_a_limit_in_which_the_early_signal_comes_at_once_is_too_short(
    small: RunCard, limit: float, is_short: bool
) -> None:
    """Each task would do one step, save and leave: an array is used up, and no limit was exceeded."""
    slurm = small.slurm.model_copy(update={"signal_seconds_before_limit": 300})
    card = small.model_copy(update={"slurm": slurm})
    said = too_short(
        card, RunHistory(start=40.0, step=1.0), JobTime(1000.0, 1000.0 + limit), 1001.0
    )
    assert ("the signal to leave comes 5 min before it, as the card says" in said) is is_short
    assert too_short(card, None, JobTime(1000.0, 1300.0), 1001.0)
    assert not too_short(card, None, JobTime(1000.0, None), 1001.0)


@pytest.mark.parametrize(
    ("minutes", "seconds"), [(None, 7200.0), (90, 5400.0), (0, None), ("soon", None), ([], None)]
)
def test_a_resolved_card_says_when_its_attempts_leave(
    minutes: object, seconds: float | None
) -> None:
    value = {"run": {"exit_duration_minutes": minutes}, "slurm": {"time_limit": "02:00:00"}}
    plan = resolved_exit_plan(value)
    assert (None if plan is None else plan.seconds_within(7200)) == seconds
    derived = resolved_exit_plan({**value, "derived": {"exit_duration_is_derived": True}})
    if minutes == 90:
        assert derived is not None and derived.seconds_within(3600) == 1800
    assert resolved_exit_plan({**value, "slurm": []}) is None
    assert resolved_exit_plan({**value, "run": None}) is None
