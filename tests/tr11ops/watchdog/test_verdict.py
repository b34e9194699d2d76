"""The one word: RUNNING is not alive, PENDING is not waiting, silence is not absence."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    NOW,
    changed,
    ended,
    idle,
    slowed,
    snapshot,
)
from tests.tr11ops.watchdog.verdict_table import AGAIN, AWAY, BETWEEN, LAST, TABLE
from tr11ops.base.observed import Unknown
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.registry import detect_all
from tr11ops.observe.forecast import Throughput
from tr11ops.observe.observations import TrainingEvent
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.status.answer import PERSON, answer
from tr11ops.watchdog.verdict import Verdict, VerdictWord, judge, main_fault, with_severity_of


def verdict(given: Snapshot) -> Verdict:
    return judge(given, detect_all(given))


@pytest.mark.parametrize(
    ("given_snapshot", "word", "part"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_table(given_snapshot: Snapshot, word: VerdictWord, part: str) -> None:
    result = verdict(given_snapshot)
    assert (result.word, part in result.why) == (word, True), result


def test_a_run_that_trains_slowly_is_told_by_what_makes_it_slow() -> None:
    found = detect_all(slowed())
    seen = judge(slowed(), found, Throughput(38.0, 100.0, "TFLOPs"))
    assert (seen.word, seen.exit_code) == (VerdictWord.SLOW, 0)
    assert seen.why == (
        "n02 holds the others back (its rank 1 computes 3.00 times as long as its peers);"
        " the training runs at 38 % of its best"
    )
    assert verdict(slowed()).why.startswith("n02 holds the others back")
    assert "of its best" not in judge(slowed(), found, Throughput(99.0, 100.0, "TFLOPs")).why
    worse = (*found, Finding("loss-not-finite", Severity.CRITICAL, "the loss is nan"))
    assert judge(slowed(), worse).why.startswith("the loss is nan; n02")
    assert verdict(snapshot()).why.startswith("job 1000_7")


def test_an_act_is_about_the_gravest_fault_that_is_why_or_costs_time_or_is_critical() -> None:
    found = detect_all(slowed())
    assert main_fault(judge(slowed(), found), found) == "n02 holds the others back"
    lesser = Finding("chain-end", Severity.WARNING, "one more task is queued after this one")
    slow = (lesser, *found)
    assert main_fault(judge(slowed(), slow), slow) == "n02 holds the others back"
    critical = Finding("loss-not-finite", Severity.CRITICAL, "the loss is nan")
    worst = (*slow, critical)
    assert main_fault(judge(slowed(), worst), worst) == "the loss is nan"
    assert main_fault(verdict(snapshot()), (lesser,)) == "", (
        "another warning is no reason for an act"
    )
    stopped = Verdict(VerdictWord.STOPPED, f"the kill switch was set by ana ({lesser.title})")
    assert main_fault(stopped, (lesser,)) == lesser.title, (
        "that is why it was stopped, and is there"
    )
    known = Finding("slow-node", Severity.INFO, "n03 was slow", "n03")
    assert main_fault(replace(stopped, why=known.title), (known,)) == ""


def test_what_status_says_not_to_sleep_for_is_critical_in_the_mail_too() -> None:
    (given,) = [row[1] for row in TABLE if row[0] == "queued after a refusal"]
    findings = detect_all(given)
    assert [one.severity for one in findings] == [Severity.WARNING]
    seen = judge(given, findings)
    assert answer(given, findings, seen).text == PERSON
    (told,) = with_severity_of(seen, findings)
    assert (told.detector, told.severity) == ("unfinished-end", Severity.CRITICAL)
    healthy = snapshot()
    assert with_severity_of(verdict(healthy), detect_all(healthy)) == detect_all(healthy)


@pytest.mark.parametrize(
    ("given", "may_sleep", "code"),
    [
        (changed(BETWEEN, launch_ends=(AGAIN,)), True, 0),
        (BETWEEN, None, 0),
        (changed(BETWEEN, launch_ends=(LAST,)), False, 1),
    ],
    ids=["it starts again", "it is not decided", "it gives up"],
)
def test_no_person_is_needed_while_the_batch_controller_starts_again(
    given: Snapshot, may_sleep: bool | None, code: int
) -> None:
    findings, seen = detect_all(given), verdict(given)
    shown = answer(given, findings, seen)
    assert (shown.may_sleep, seen.exit_code, shown.text == PERSON) == (may_sleep, code, code == 1)


def test_every_word_is_said_in_the_table() -> None:
    assert {row[2] for row in TABLE} == set(VerdictWord)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("healthy", 0),
        ("slow", 0),
        ("starting", 0),
        ("queued", 0),
        ("finished", 0),
        ("stopped", 0),
        ("stalled", 1),
        ("down", 1),
        ("unknown", 3),
    ],
)
def test_exit_codes(word: str, code: int) -> None:
    assert Verdict(VerdictWord(word), "").exit_code == code


FIELDS = [
    "jobs",
    "nodes",
    "steps",
    "heartbeats",
    "attempts",
    "checkpoints",
    "kill_switch",
    "exclusions",
    "submissions",
]


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(FIELDS)),
    later=st.floats(-DAY, 30 * DAY),
)
def test_blindness_is_never_a_cause_for_alarm_or_for_sleep(
    base: Snapshot, hidden: set[str], later: float
) -> None:
    """What is hidden may turn any verdict into another, but with everything hidden only `unknown`
    is left.
    """
    seen = changed(base, time=base.time + later, **dict.fromkeys(hidden, AWAY))
    result = verdict(seen)
    assert result.why
    assert "\n" not in result.why
    if len(hidden) == len(FIELDS):
        assert result.word is VerdictWord.UNKNOWN
    if "jobs" in hidden:
        assert result.word not in {VerdictWord.DOWN, VerdictWord.STALLED, VerdictWord.QUEUED}, (
            "these need the scheduler's word"
        )
    if result.word is VerdictWord.HEALTHY:
        assert re.search(r"last sign of life \S+", result.why)


def test_a_finished_training_that_was_extended_is_not_finished() -> None:
    extended = idle(attempts=(ended("1007", DAY, "finished", iteration=31000),))
    assert verdict(extended).word is VerdictWord.DOWN, (
        "steps went beyond the end that was once reached"
    )


def test_a_finished_training_that_goes_back_is_not_finished() -> None:
    over = idle(attempts=(ended("1007", DAY, "finished", iteration=115311),))
    back = TrainingEvent("roll-back", NOW - 60.0, values={"to": 115000, "by": "ana"})
    undone = TrainingEvent("roll-back-undone", NOW - 30.0)
    before = replace(back, time=NOW - 2 * DAY)
    for events, word in (
        ((), VerdictWord.FINISHED),
        ((back,), VerdictWord.DOWN),
        ((back, undone), VerdictWord.FINISHED),
        ((before,), VerdictWord.FINISHED),
    ):
        seen = replace(over, training=replace(over.training, events=events))
        assert verdict(seen).word is word, events


def test_an_attempt_that_another_user_cannot_read_is_unknown() -> None:
    given = idle(attempts=(Attempt("1007", NOW, Unknown("end.json: no rights")),))
    assert verdict(given).word is VerdictWord.UNKNOWN, "it may have finished"
    assert [entry.detector for entry in detect_all(given)] == []
    assert given.unknowns() == ("end of attempt 1007: end.json: no rights",)


def test_a_critical_finding_needs_a_person_whatever_the_word_is() -> None:
    seen = snapshot()
    spike = Finding("loss-spike", Severity.CRITICAL, "the loss is 3 times its median")
    assert judge(seen, ()).exit_code == 0
    assert judge(seen, (replace(spike, severity=Severity.WARNING),)).exit_code == 0
    verdict = judge(seen, (spike,))
    assert (verdict.word, verdict.exit_code) == (VerdictWord.AT_RISK, 1)
    assert verdict.why.startswith("the loss is 3 times its median; job ")
    unseen = snapshot(jobs=Unknown("no answer"), heartbeats=(), steps=())
    assert judge(unseen, (spike,)).exit_code == 3
