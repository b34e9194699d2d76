"""What mails and the digest say of the run: made of a past that really lies on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.goodput.eventful import CARD, eventful
from tests.tr11ops.goodput.past import BEGIN, Past
from tests.tr11ops.status_cases import DAY, NOW, running, snapshot
from tr11ops.alerts.mail_text.daily_summary import digest
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import AlertState
from tr11ops.base.observed import Unknown
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.observe.look import facts_of, observe
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.action_log import ActionHistory as Deeds
from tr11ops.rundir.action_log import ActionRecord, Result
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.watchdog.actions import Cancel, Plan
from tr11ops.watchdog.situation import situation_of

LOOK = BEGIN + 9600
AWAY = Unknown("the scheduler was not asked")


@pytest.fixture
def action_history(tmp_path: Path) -> Past:
    made = Past(tmp_path)
    eventful(made)
    return made


@pytest.fixture
def card(tmp_path: Path) -> RunCard:
    path = tmp_path / "tr11.toml"
    path.write_text(CARD)
    return load_card(path, [], {}, directory=tmp_path)


def test_a_time_is_accounted_for_as_goodput_has_it(action_history: Past, card: RunCard) -> None:
    seen = observe(action_history.directory, facts_of(card), AWAY, LOOK)
    situation = situation_of(action_history.directory, card, seen)
    begun = BEGIN + 1000
    spell = situation.since(begun)
    assert spell is not None
    part = account(read_history(action_history.directory, AWAY), LOOK).between(begun, LOOK)
    assert spell.useful == part.useful_of_held
    assert spell.wanted_hours == pytest.approx(part.total.node_hours)
    assert 0 < spell.lost_hours < spell.wanted_hours
    assert spell.iterations == 21 - 2


def test_the_digest_names_the_nodes_that_tr11_has_left_out_since_the_last(
    action_history: Past, card: RunCard
) -> None:
    """A dead node that a spare has replaced wakes no one; in the morning people read of it."""
    seen = observe(action_history.directory, facts_of(card), AWAY, LOOK)
    listed = (
        Exclusion("n07", "n07: lost to the scheduler", "tr11", LOOK + DAY, (), LOOK - 3600),
        Exclusion("n08", "Xid 79", "tr11", LOOK + DAY, (), LOOK - 3 * DAY),
        Exclusion("n09", "a doubt", "ana", LOOK + DAY, (), LOOK - 3600),
    )
    situation = situation_of(action_history.directory, card, replace(seen, exclusions=listed))
    policy = Policy(run="run", directory="/runs/run", recipients=("ana@example.org",))
    _, lines = digest(AlertState(digested=LOOK - DAY), policy, LOOK, None, situation)
    at = lines.index("Left out by tr11 since the last digest; the run goes on without them:")
    assert (
        lines[at + 1].startswith("  n07, since ") and "n07: lost to the scheduler" in lines[at + 1]
    )
    assert not any("n08" in line or "n09" in line for line in lines)
    _, without = digest(AlertState(digested=LOOK - 60), policy, LOOK, None, situation)
    assert not any("n07" in line for line in without)


def test_the_digest_begins_with_the_training(action_history: Past, card: RunCard) -> None:
    seen = observe(action_history.directory, facts_of(card), AWAY, LOOK)
    alert_state = AlertState(digested=BEGIN + 1000)
    policy = Policy(run="run", directory="/runs/run", recipients=("ana@example.org",))
    _, lines = digest(
        alert_state, policy, LOOK, None, situation_of(action_history.directory, card, seen)
    )
    assert lines[0].startswith("Since 2026-09-21 14:30 UTC: 19 iterations")
    assert "node-hours" in " ".join(lines[:2])
    assert "Progress: iteration 18 of 100 (18.0 %)" in lines


def test_progress_loss_end_and_acts(action_history: Past, card: RunCard) -> None:
    given = snapshot(jobs=(running(),))
    cancel = Cancel("1000", "job 1000_7 hangs", "cancel:1000")
    done = ActionRecord("1", "resubmit", "1-3", "down", NOW - 60, result=Result.DONE)
    refused = replace(done, number="2", result=Result.REFUSED)
    situation = situation_of(
        action_history.directory,
        card,
        given,
        Plan((cancel,), ("x",)),
        Deeds((done, refused)),
        True,
    )
    assert situation.progress.startswith("iteration ") and ", loss " in situation.progress
    assert situation.trained is not None and situation.trained <= NOW
    assert situation.eta.count(":") >= 1 and ", in " in situation.eta
    assert [act.words for act in situation.done] == ["resubmit 1-3"]
    assert [act.words for act in situation.planned] == ["cancel 1000: job 1000_7 hangs"]
    still = situation_of(action_history.directory, card, replace(given, jobs=(), heartbeats=()))
    assert "of training are left" in still.eta


def test_a_past_that_cannot_be_read_is_no_reason_to_stay_silent(
    action_history: Past, card: RunCard
) -> None:
    action_history.paths.metrics.unlink()
    action_history.paths.metrics.mkdir()
    seen = observe(action_history.directory, facts_of(card), AWAY, LOOK)
    situation = situation_of(action_history.directory, card, seen)
    assert situation.since(BEGIN) is None
