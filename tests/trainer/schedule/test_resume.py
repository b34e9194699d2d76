"""Card against checkpoint: refused, overridden, or taken from the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.schedule_cards import card
from trainer.contract.errors import ScheduleMismatch
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.start import reconcile

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
