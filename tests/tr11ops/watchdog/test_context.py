"""What is read beside the snapshot: for the policy (whose hold it is, whom the controllers blamed, who
holds the lease), and for mails and the digest, made of a past that really lies on disk.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.goodput.eventful import CARD, eventful
from tests.tr11ops.goodput.past import BEGIN, Past
from tests.tr11ops.status_cases import DAY, NOW, running, snapshot
from tr11ops.alerts.mail_text.daily_summary import RunMails
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import AlertState
from tr11ops.base.observed import Unknown
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.observe.lease import LeaseHolder
from tr11ops.observe.look import facts_of, observe
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.action_log import ActionHistory as Deeds, ActionRecord, Result
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.hold_store import forget_holds, held_by_tr11, record_holds
from tr11ops.rundir.paths import RunDirectory
from tr11ops.watchdog.actions import Cancel, Plan
from tr11ops.watchdog.context import read_policy_context
from tr11ops.watchdog.situation import situation_of
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.paths import RunPaths
from trainer.contract.requests import new_request

VERDICT = AttemptVerdict("error", 7, 5, 1, "rank 3 died", restart=False, job_id="100", time=50.0)
LAUNCH = LaunchRecord(
    1, ("n1", "n2"), 10.0, 40.0, cause="node", summary="rank 3 on n2: CUDA error", confidence=0.95, blamed=("n2",),
    evidence=("n2: task 3: Aborted",),
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(RunPaths(tmp_path, "small", "main"), tmp_path / "kill-switch")


def attempt(
    directory: RunDirectory,
    verdict: AttemptVerdict | None,
    *launches: LaunchRecord,
    job_id: str = "100",
) -> Path:
    folder = directory.paths.attempt(job_id)
    folder.mkdir(parents=True)
    if verdict is not None:
        replace(verdict, job_id=job_id).write(folder)
    for launch in launches:
        launch.write(folder)
    return folder


def test_an_empty_run_has_nothing_to_say(directory: RunDirectory) -> None:
    scene = read_policy_context(directory, "ana", 100.0)
    assert (scene.pause, scene.holder, scene.endings, scene.blames) == ("", None, (), ())
    assert not scene.releasable


def test_endings_and_blames_are_the_controllers_newest_first(directory: RunDirectory) -> None:
    old = attempt(directory, replace(VERDICT, time=20.0), job_id="90")
    os.utime(old, (20.0, 20.0))
    guess = replace(LAUNCH, launch=2, cause="unknown", blamed=("n9",))
    attempt(directory, VERDICT, LAUNCH, guess)
    scene = read_policy_context(directory, "ana", 100.0)
    assert not isinstance(scene.endings, Unknown) and not isinstance(scene.blames, Unknown)
    assert [(end.job_id, end.restart, end.message) for end in scene.endings] == [
        ("100", False, "rank 3 died"), ("90", False, "rank 3 died"),
    ]  # fmt: skip
    assert [(blame.node, blame.confidence, blame.time, blame.job_id) for blame in scene.blames] == [
        ("n2", 0.95, 40.0, "100")
    ]


def test_a_health_check_that_fails_everywhere_blames_no_node(directory: RunDirectory) -> None:
    """Whatever became of the attempt that was to take it back."""
    first = replace(
        LAUNCH, nodes=("n1",), blamed=("n1",), summary="n1: health check fans: 3", evidence=("n1: health check fans: 3",),
        checked=True, failed_checks={"fans": ["n1"]}, passed_checks={"fans": []},
    )  # fmt: skip
    second = replace(
        first,
        start=60.0,
        end=70.0,
        nodes=("n2",),
        cause="health-check",
        blamed=(),
        failed_checks={"fans": ["n2"]},
    )
    attempt(directory, replace(VERDICT, time=40.0), first, job_id="90")
    scene = read_policy_context(directory, "ana", 100.0)
    assert [blame.node for blame in scene.blames] == ["n1"]  # type: ignore[union-attr]
    attempt(directory, None, second)
    assert read_policy_context(directory, "ana", 100.0).blames == ()


@pytest.mark.parametrize("name", ["verdict.json", "launches/1.json"])
def test_a_record_that_cannot_be_read_is_unknown(directory: RunDirectory, name: str) -> None:
    folder = attempt(directory, VERDICT, LAUNCH)
    (folder / name).write_text("{")
    scene = read_policy_context(directory, "ana", 100.0)
    assert isinstance(scene.endings if name.startswith("verdict") else scene.blames, Unknown)


def test_only_holds_for_a_switch_may_be_released(directory: RunDirectory) -> None:
    attempt(directory, replace(VERDICT, reason="kill-switch", held=("1", "2")))
    attempt(directory, replace(VERDICT, held=("2", "3")), job_id="101")
    holds = [{"job": "4", "who": "ana"}, {"job": "5", "who": "tr11"}, {"job": "3", "who": "bob"}]
    write_json(directory.paths.requests / "holds.json", {"schema": 1, "holds": holds})
    scene = read_policy_context(directory, "ana", 100.0)
    assert scene.releasable == {"1", "4"}  # 2 and 3 a fault holds too, 5 is the watchdog's own
    (directory.paths.requests / "holds.json").write_text("{")
    assert read_policy_context(directory, "ana", 100.0).releasable == {"1"}


def test_what_was_released_since_is_no_attempts_hold_any_more(directory: RunDirectory) -> None:
    """A person may hold a task of the same array afterwards: an old verdict must not release that."""
    attempt(directory, replace(VERDICT, reason="kill-switch", held=("1", "2")))
    assert held_by_tr11(directory) == {"1", "2"}
    forget_holds(directory, ("1",))
    scene = read_policy_context(directory, "ana", 100.0)
    assert scene.releasable == {"2"} == held_by_tr11(directory)
    attempt(directory, replace(VERDICT, held=("1_[4-5]",), time=time.time() + 60), job_id="101")
    assert held_by_tr11(directory) == {"2", "1_[4-5]"}


def test_of_an_array_held_by_a_fault_too_nothing_is_released(directory: RunDirectory) -> None:
    record_holds(directory, ("1_[2-9]", "2_[2-9]"), "ana", "a pause")
    attempt(directory, replace(VERDICT, held=("1", "2_[2-4]")))
    scene = read_policy_context(directory, "ana", 100.0)
    assert scene.releasable == {"2_[5-9]"}
    forget_holds(directory, ("2",))
    assert held_by_tr11(directory) == {"1_[2-9]", "1"}


@pytest.mark.parametrize("recorded", [{"held_for": "pause"}, {}])
def test_an_exit_by_duration_is_no_fault_of_what_a_pause_held(
    directory: RunDirectory, recorded: dict[str, str]
) -> None:
    """Another member paused: the run's own controller held queued jobs, and the attempt ended as it
    should.
    """
    attempt(directory, replace(VERDICT, reason="exit-duration", held=("1",), **recorded))
    record_holds(directory, ("1", "2"), AUTOMATIC_OWNER, "pause", "pause")
    record_holds(directory, ("3",), AUTOMATIC_OWNER, "a fault")
    scene = read_policy_context(directory, "ana", 100.0)
    assert scene.releasable == {"1", "2"} and held_by_tr11(directory) == {"1", "2", "3"}
    forget_holds(directory, ("2",))
    assert read_policy_context(directory, "ana", 100.0).releasable == {"1"}


def test_pause_and_lease(directory: RunDirectory) -> None:
    new_request("pause", "ana", "a test", directory.root).write(directory.paths.pause)
    folder = LeaseFolder(directory.paths)
    assert folder.claim(1, LeaseClaim("100", 1, "n1", 1, "bob", 0.0, "token", 1))
    now = time.time()
    scene = read_policy_context(directory, "ana", now)
    assert scene.pause == "ana (a test)"
    assert (
        isinstance(scene.holder, LeaseHolder)
        and scene.holder.job_id == "100"
        and "bob" in scene.holder.text
    )
    later = read_policy_context(directory, "ana", now + 60)
    assert later.holder is None  # it has not shown life since


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
    _, lines = RunMails(policy, LOOK, situation).digest(AlertState(digested=LOOK - DAY), None)
    at = lines.index("Left out by tr11 since the last digest; the run goes on without them:")
    assert (
        lines[at + 1].startswith("  n07, since ") and "n07: lost to the scheduler" in lines[at + 1]
    )
    assert not any("n08" in line or "n09" in line for line in lines)
    _, without = RunMails(policy, LOOK, situation).digest(AlertState(digested=LOOK - 60), None)
    assert not any("n07" in line for line in without)


def test_the_digest_begins_with_the_training(action_history: Past, card: RunCard) -> None:
    seen = observe(action_history.directory, facts_of(card), AWAY, LOOK)
    alert_state = AlertState(digested=BEGIN + 1000)
    policy = Policy(run="run", directory="/runs/run", recipients=("ana@example.org",))
    situation = situation_of(action_history.directory, card, seen)
    _, lines = RunMails(policy, LOOK, situation).digest(alert_state, None)
    assert lines[0].startswith("Since 2026-09-21 14:30 UTC: 19 iterations")
    assert "node-hours" in " ".join(lines[:2])
    assert "Progress: iteration 21 of 100 (21.0 %)" in lines


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
