"""The plain answer, may I sleep: only where training goes on and someone would be called; what is unknown is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import TABLE as FAULTS
from tests.tr11ops.detect.operation_table import TABLE as OPERATION
from tests.tr11ops.status.care_cases import FAULT, HEALTHY, REMARK, alert, asked_for
from tests.tr11ops.status_cases import (
    NOW,
    beats,
    changed,
    cron_job,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
)
from tests.tr11ops.watchdog.verdict_table import TABLE
from tr11ops.alerts.state import Alert, UndeliveredMessages
from tr11ops.base.observed import Observed, Unknown
from tr11ops.detect.detector import Finding, Severity, by_cause
from tr11ops.detect.registry import detect_all
from tr11ops.observe import derived
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.runcard.watching import (
    AlertsSection,
    WatchSection,
)
from tr11ops.status.answer import FIRST, PERSON, UNKNOWN, SleepAnswer, answer, published_answer
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import (
    ExtraObservations,
)
from tr11ops.status.rows import jobs
from tr11ops.watchdog.verdict import MOVING, Verdict, VerdictWord, judge


@pytest.mark.parametrize(
    ("verdict", "findings", "open_alerts", "may_sleep", "words"),
    [
        (HEALTHY, (), (), True, "You may sleep"),
        (HEALTHY, (REMARK, REMARK), (), True, "2 warnings can wait"),
        (HEALTHY, (FAULT,), (), False, "a person is needed"),
        (HEALTHY, (FAULT,), (alert(),), False, "a person is needed"),
        (HEALTHY, (FAULT,), (alert(acknowledged_by="ben"),), False, "ben has it"),
        (HEALTHY, (FAULT,), (alert(acknowledged_by="ben", owner="eva"),), False, "eva has it"),
        (HEALTHY, (FAULT, REMARK), (alert("other", owner="eva"),), False, "a person is needed"),
        (HEALTHY, (), (alert(),), False, "and no one has taken it"),
        (HEALTHY, (), (alert(clear_looks=1),), True, "You may sleep"),
        (HEALTHY, (), (alert(owner="eva"),), True, "You may sleep"),
        (HEALTHY, (), (alert(severity=Severity.WARNING),), True, "You may sleep"),
        (HEALTHY, (), Unknown("unreadable"), True, "alerts are unknown"),
        (Verdict(VerdictWord.DOWN, "it is down"), (), (), False, "a person is needed"),
        (
            Verdict(VerdictWord.STOPPED, "someone stopped it"),
            (),
            (),
            False,
            "It goes on once it is resumed",
        ),
        (Verdict(VerdictWord.FINISHED, "all is done"), (), (), True, "Nothing is left to train"),
        (Verdict(VerdictWord.UNKNOWN, "no one answers"), (FAULT,), (), None, "cannot be told"),
    ],
)
def test_the_answer(
    verdict: Verdict,
    findings: tuple[Finding, ...],
    open_alerts: Observed[tuple[Alert, ...]],
    may_sleep: bool | None,
    words: str,
) -> None:
    found = answer(snapshot(), findings, verdict, ExtraObservations(open_alerts))
    assert isinstance(found, SleepAnswer)
    assert found.may_sleep is may_sleep
    assert words in found.text


def test_what_is_found_is_not_told_as_what_stopped_it() -> None:
    slow = Finding("slow-node", Severity.WARNING, "n07 holds the others back", "n07", since=NOW)
    assert slow.costs_time
    for word in (VerdictWord.STOPPING, VerdictWord.STOPPED):
        found = answer(idle(), (slow,), Verdict(word, "the kill switch was set by ana"))
        assert found.text == ("It goes on once it is resumed; besides, n07 holds the others back")
        assert [need.kind for need in found.needs][:2] == ["node", "resume"], "in this order"


def test_a_silent_scheduler_comes_with_a_command() -> None:
    seen = snapshot(jobs=Unknown("squeue did not answer within 12 s"))
    found = answer(seen, (), judge(seen, ()))
    assert found.may_sleep is None and [need.fix for need in found.needs] == ["tr11 doctor"]


def test_the_healthy_run_lets_sleep_and_the_lost_one_does_not() -> None:
    for given, expected in ((snapshot(), True), (idle(), False)):
        findings = detect_all(given)
        assert answer(given, findings, judge(given, findings)).may_sleep is expected


SHORT = running(start_time=NOW - 60, time_limit_seconds=2400)
MINUTES = with_facts(snapshot(jobs=(SHORT,)), exit_plan=ExitPlan(40.0))


@pytest.mark.parametrize(
    ("given", "kinds", "words"),
    [
        (snapshot(periodic_jobs=()), ["watchdog"], "no watchdog looks at the run"),
        (snapshot(periodic_jobs=(cron_job(way="hand"),)), ["watchdog"], "no watchdog"),
        (snapshot(periodic_jobs=(cron_job("digest"),)), ["watchdog"], "no watchdog"),
        (asked_for(snapshot(), periodic_jobs=("digest",)), ["watchdog"], "no watchdog"),
        (snapshot(periodic_jobs=(cron_job(failures_in_a_row=1),)), ["watchdog"], "last look failed"),
        (
            snapshot(periodic_jobs=(cron_job(interval_seconds=300.0, started=NOW - 1500, next_due=NOW - 1200),)),
            ["watchdog"], "has not looked for 25 min (due every 5 min)",
        ),
        (snapshot(periodic_jobs=(cron_job(interval_seconds=300.0, started=NOW - 900, next_due=NOW - 600),)), [], ""),
        (asked_for(snapshot(), alerts=AlertsSection()), ["recipients"], "no one would be told"),
        (MINUTES, ["queue"], "the queue covers 39 min of the 102 d"),
        (with_facts(MINUTES, watch=WatchSection(act=True)), [], ""),
        (replace(with_facts(MINUTES, watch=WatchSection(act=True)), resubmitted=3), [], ""),
        (replace(with_facts(MINUTES, watch=WatchSection(act=True)), resubmitted=4), ["queue"], "may not resubmit again"),
        (replace(with_facts(MINUTES, watch=WatchSection(act=True)), resubmitted=Unknown("a")), ["queue"], "covers"),
        (changed(with_facts(MINUTES, watch=WatchSection(act=True)), periodic_jobs=()), ["watchdog", "queue"], "covers"),
        (replace(MINUTES, steps=steps(last=115_300)), [], ""),
        (snapshot(pause=KillSwitch(Path("/p"), "ben", NOW - 60)), ["resume"], "nothing trains after this task"),
        # this task alone lasts the night
        (snapshot(jobs=(running(), pending(reason="JobHeldUser"))), [], ""),
        (
            changed(asked_for(MINUTES, alerts=AlertsSection()), periodic_jobs=()),
            ["watchdog", "recipients", "queue"], "no watchdog looks at the run; no one would be told; the queue covers",
        ),
    ],
)  # fmt: skip
def test_no_one_sleeps_without_watchdog_people_and_a_queue(
    given: Snapshot, kinds: list[str], words: str
) -> None:
    found = answer(given, (), HEALTHY)
    assert [need.kind for need in found.needs] == kinds
    assert found.may_sleep is (not kinds) and words in found.text
    assert ("You may sleep" in found.text) is (not kinds)


def test_no_one_sleeps_on_workers_that_have_ended() -> None:
    """Whether their agent starts them again is not known before it does."""
    seen = snapshot(attempts=(), heartbeats=beats(phase="ended", age=20), steps=steps(age=25))
    verdict = judge(seen, ())
    assert (verdict.word, answer(seen, (), verdict).may_sleep) == (VerdictWord.STARTING, None)


def test_what_cannot_be_seen_is_no_reason_to_sleep() -> None:
    for blind in ({"periodic_jobs": Unknown("no rights")}, {"jobs": Unknown("no answer")}):
        assert answer(snapshot(**blind), (), HEALTHY).may_sleep is None  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_you_may_sleep_is_said_only_where_training_goes_on(given: Snapshot) -> None:
    findings = detect_all(given)
    verdict = judge(given, findings)
    if "You may sleep" in answer(given, findings, verdict).text:
        assert verdict.word in MOVING | {VerdictWord.QUEUED}
        assert given.active_jobs or derived.startable_jobs(given)


@pytest.mark.parametrize(
    ("waiting", "may_sleep", "words"),
    [
        (UndeliveredMessages(), True, ""),
        (UndeliveredMessages(2, NOW - 60.0), True, ""),
        (
            UndeliveredMessages(1, NOW - 3600.0),
            False,
            "alerts are not delivered, 1 message has waited for 1 h 00 min",
        ),
        (
            UndeliveredMessages(2, NOW - 60.0, "535 authentication failed"),
            False,
            "2 messages have waited for 1 min: 535",
        ),
        (
            Unknown("outbox: Permission denied"),
            False,
            "whether alerts are delivered cannot be seen (outbox",
        ),
    ],
)
def test_no_one_sleeps_while_alerts_are_not_delivered(
    waiting: Any, may_sleep: bool, words: str
) -> None:
    seen = snapshot()
    found = answer(seen, (), judge(seen, ()), ExtraObservations(waiting=waiting))
    assert found.may_sleep is may_sleep and words in found.text
    assert [need.kind for need in found.needs] == ([] if may_sleep else ["mail"])


CALM = {
    VerdictWord.HEALTHY,
    VerdictWord.SLOW,
    VerdictWord.STARTING,
    VerdictWord.QUEUED,
    VerdictWord.FINISHED,
    VerdictWord.STOPPING,
    VerdictWord.STOPPED,
}


def test_a_stopped_run_of_which_nothing_is_queued_needs_a_launch_too() -> None:
    switch = KillSwitch(snapshot().run.kill_switch, "ana", NOW)

    def first(given: Snapshot) -> list[str]:
        findings = detect_all(given)
        return [need.fix for need in answer(given, findings, judge(given, findings)).needs]

    assert first(idle(kill_switch=switch)) == ["tr11 resume", "tr11 launch --array 1-10"]
    held = pending(reason="JobHeldUser")
    assert first(idle(jobs=(held,), kill_switch=switch)) == ["tr11 resume"]


SAID_BESIDE = {
    0: {
        "You may sleep",
        "Nothing is left to train",
        "It goes on once it is resumed",
        FIRST,
        UNKNOWN,
    },  # unknown: who would be told
    1: {"Do not sleep"},
    3: {UNKNOWN},
}
CLOSED = [
    idle(jobs=(pending(reason="PartitionDown"),)),
    idle(jobs=(pending(reason="PartitionDown"), pending((), reason="JobHeldUser"))),
    snapshot(jobs=(running(), pending(reason="PartitionDown"))),
]


@pytest.mark.parametrize("seen", CLOSED)
def test_where_the_site_starts_what_is_queued_no_one_is_told_to_launch(seen: Snapshot) -> None:
    """Another launch would meet the same; what starts when the site is done is not said to start
    never.
    """
    given = with_facts(seen, exit_plan=ExitPlan(40.0))
    findings = detect_all(given)
    told = answer(given, findings, judge(given, findings))
    assert not any("launch" in need.fix for need in told.needs), told
    assert not any(
        "launch" in finding.fix for finding in findings if finding.detector == "chain-end"
    )
    assert "does not start by itself" not in told.text
    assert "the queue covers" not in told.text or seen.active_jobs
    rows = [
        text
        for label, text, _ in jobs(status_of(given, findings, judge(given, findings)))
        if label == "queue"
    ]
    assert not any("nothing starts by itself" in text for text in rows)


def test_a_queue_behind_a_closed_partition_says_when_it_goes_on() -> None:
    short = replace(SHORT, time_limit_seconds=2400)
    given = with_facts(
        snapshot(jobs=(short, pending((8,), reason="PartitionDown"))), exit_plan=ExitPlan(40.0)
    )
    (need,) = answer(given, (), HEALTHY).needs
    assert (
        need.kind == "queue"
        and " left, and more starts when the site is done (job 1000_8: the site has " in need.text
    )
    assert need.fix == "ask the site when"
    assert not [one for one in detect_all(given) if one.detector == "chain-end"]


@pytest.mark.parametrize(
    "seen", [*CLOSED, *(row[1] for row in (*TABLE, *FAULTS, *OPERATION))], ids=lambda _: ""
)
def test_word_reason_advice_and_exit_code_agree(seen: Snapshot) -> None:
    """No run is healthy that a person must get up for; who must, is told why by the very sentence
    of the verdict.
    """
    findings = detect_all(seen)
    verdict = judge(seen, findings)
    told = answer(seen, findings, verdict)
    assert verdict.word is not VerdictWord.HEALTHY or verdict.exit_code == 0
    assert told.may_sleep is not True or verdict.exit_code == 0
    assert (told.may_sleep is None) >= (verdict.word is VerdictWord.UNKNOWN)
    begins = told.text.partition(";")[0].partition(":")[0].partition(" (")[0]
    assert begins in SAID_BESIDE[verdict.exit_code], (begins, verdict)
    published = published_answer(told.may_sleep, verdict.word, [need.kind for need in told.needs])
    assert (
        published.partition(":")[0] in SAID_BESIDE[verdict.exit_code]
        or verdict.word is VerdictWord.STOPPED
    )
    queue = " ".join(
        text for label, text, _ in jobs(status_of(seen, findings, verdict)) if label == "queue"
    )
    if derived.closed_by_site(seen) is not None and queue:
        assert queue.startswith("covers nothing") and " for the site" in verdict.why
    if verdict.exit_code == 1 and verdict.word in CALM | {VerdictWord.AT_RISK}:
        worst = by_cause(findings)[0]
        assert worst.severity is Severity.CRITICAL and worst.title in verdict.why
        assert told.text == PERSON


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (ExtraObservations(), "no watchdog looks at the run"),
        (
            ExtraObservations(looked=NOW - 40, looked_by="ana"),
            "no watchdog is installed; looks made by hand or by a script can stop at any time: the last was 40 s ago, by ana",
        ),
        (  # of an older tr11
            ExtraObservations(looked=NOW - 40),
            "no watchdog is installed; looks made by hand or by a script can stop at any time: the last was 40 s ago, by someone",
        ),
    ],
)
def test_a_look_by_hand_is_no_watchdog_and_yet_a_look(extra: ExtraObservations, words: str) -> None:
    """`no watchdog looks at the run` was said a moment after someone's `tr11 pulse`."""
    given = snapshot(periodic_jobs=())
    found = answer(given, (), HEALTHY, extra)
    assert [need.text for need in found.needs] == [words]
    assert status_of(given, (), HEALTHY, extra).watchdog_fault == words
    watched = answer(snapshot(), (), HEALTHY, extra)
    assert watched.needs == (), "a watchdog that lives is enough"
