"""The rows around the training, and the plain answer: what is not used has no row, what is unknown
is said.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import TABLE as FAULTS
from tests.tr11ops.detect.operation_table import TABLE as OPERATION
from tests.tr11ops.status.care_cases import FAULT, REMARK, alert, asked_for, look
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
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
    wordless,
)
from tests.tr11ops.watchdog.verdict_table import TABLE
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, process
from tr11ops.alerts.state import Alert, UndeliveredMessages
from tr11ops.backup.round_values import ArchiveLock
from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect.causes import by_cause
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.nodes_left import spare_nodes
from tr11ops.detect.registry import detect_all
from tr11ops.observe import derived
from tr11ops.observe.observations import Copied, CopyStatus, LaunchEnd
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.runcard.watching import (
    AlertsSection,
    BackupSection,
    FilesystemSection,
    HubSection,
    WatchSection,
)
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.copies import DrillRecord, write_drill
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.journal import user_name, who_looks
from tr11ops.status.answer import FIRST, PERSON, UNKNOWN, SleepAnswer, answer, published_answer
from tr11ops.status.assessment import status_of
from tr11ops.status.care import alerts, copies, filesystems, nodes, periodic
from tr11ops.status.document import Status
from tr11ops.status.extra_observations import (
    ExtraObservations,
    NodeUse,
    RunningCopy,
    node_use,
    observe_extra,
)
from tr11ops.status.rows import jobs
from tr11ops.watchdog.verdict import Verdict, VerdictWord, judge

HEALTHY = Verdict(VerdictWord.HEALTHY, "it trains")


def shown(seen: Snapshot, around: ExtraObservations = ExtraObservations()) -> Status:  # noqa: B008  frozen
    return status_of(seen, (), HEALTHY, around)


# ----------------------------------------------------------------------------- may I sleep?


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
        (HEALTHY, (), (alert(),), False, "unassigned"),
        (HEALTHY, (), (alert(owner="eva"),), True, "You may sleep"),
        (HEALTHY, (), (alert(severity=Severity.WARNING),), True, "You may sleep"),
        (HEALTHY, (), Unknown("unreadable"), True, "alerts are unknown"),
        (Verdict(VerdictWord.DOWN, "it is down"), (), (), False, "a person is needed"),
        (
            Verdict(VerdictWord.STOPPED, "someone stopped it"),
            (),
            (),
            False,
            "nothing trains until it is resumed",
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
        assert verdict.word in {VerdictWord.HEALTHY, VerdictWord.STARTING, VerdictWord.QUEUED}
        assert given.active_jobs or derived.startable_jobs(given)


# ----------------------------------------------------------------------------- nodes
def test_spares_are_what_is_held_and_not_launched_on() -> None:
    named = tuple(f"n{number:02d}" for number in range(1, 53))
    given = snapshot(
        jobs=(running(nodes=named, node_count=52),),
        exclusions=(Exclusion("n03", "Xid 79", since=NOW - HOUR),),
    )
    launched = tuple(name for name in named if name not in {"n03", "n50", "n51", "n52"})
    trains = changed(given, launch_nodes=launched)
    unread = changed(given, launch_nodes=Unknown("unreadable"))
    for seen in (trains, given, unread):
        assert node_use(seen) == NodeUse(48, 3, 1), "an excluded node is no spare, launch or not"
    ((label, text, _),) = nodes(shown(trains))
    assert (label, text) == ("nodes", "48 used, 3 spare; 1 excluded: n03 (Xid 79)")
    assert node_use(snapshot(jobs=Unknown("away"))) is None
    ((_, text, _),) = nodes(shown(idle(exclusions=Unknown("unreadable"))))
    assert text == "none held; excluded: unknown"


def test_the_screen_and_the_cap_count_the_same_spares() -> None:
    """A spare that is gone, silent, or found bad by this attempt is none; one that trains and is lost
    takes another's place.
    """
    named = tuple(f"n{number:02d}" for number in range(1, 53))
    fine = tuple(Node(name, frozenset({"allocated"})) for name in named)
    given = snapshot(
        jobs=(running(nodes=named, node_count=52),), nodes=fine, launch_nodes=named[:48]
    )
    blamed = LaunchEnd("1007", 1, NOW - 60, "Xid 79", blamed=("n51",))

    def without(name: str, state: str) -> tuple[Node, ...]:
        states = frozenset({"allocated", state})
        return tuple(replace(one, states=states) if one.name == name else one for one in fine)

    for seen, spares in (
        (given, 4),
        (changed(given, nodes=without("n52", "down")), 3),
        (changed(given, nodes=without("n50", "not_responding")), 3),
        (changed(given, launch_ends=(blamed,)), 3),
        (changed(given, nodes=without("n05", "down")), 3),
        (changed(given, launch_nodes=named[:40]), 12),
    ):
        assert spare_nodes(seen) == (spares, True)
        use = node_use(seen)
        assert use is not None and use.spare == spares


def test_what_another_job_of_the_run_holds_is_no_spare_of_the_attempt() -> None:
    """A task that has its nodes beside one that has lost its batch host, or beside one that leaves."""
    own = tuple(f"n{number:02d}" for number in range(1, 51))
    others = tuple(f"m{number:02d}" for number in range(1, 51))
    trains = running(nodes=own, node_count=50)
    beside = running(job_id="1000_8", raw_id="1008", task_id=8, nodes=others, node_count=50)
    for both in ((trains, beside), (beside, trains)):
        seen = snapshot(jobs=both, attempts=(wordless("1007"),), launch_nodes=own[:48])
        assert spare_nodes(seen) == (2, True)
        assert node_use(seen) == NodeUse(48, 2, 0)
    leaving = replace(trains, state=JobState.COMPLETING)
    seen = snapshot(jobs=(leaving, beside), attempts=(wordless("1007"),))
    assert spare_nodes(seen) == (2, True)


def test_nodes_that_the_site_takes_away_when_the_job_ends_are_shown() -> None:
    seen = (
        Node("n01", frozenset({"allocated", "drain"}), "memory"),
        Node("n02", frozenset({"mixed", "reboot_requested"}), "kernel"),
        Node("n03", frozenset({"allocated"})),
        Node("n04", frozenset({"down"}), "gone: node-lost tells it"),
        Node("n99", frozenset({"idle", "drain"}), "not ours"),
    )
    rows = list(nodes(shown(snapshot(nodes=seen))))
    assert [text for _, text, _ in rows[1:]] == [
        "n01 leaves when its job ends: allocated+drain (memory)",
        "n02 leaves when its job ends: mixed+reboot_requested (kernel)",
    ]
    assert len(list(nodes(shown(snapshot(nodes=Unknown("away")))))) == 1


# ----------------------------------------------------------------------------- copies
WANTED = BackupSection(store="/a", store_interval=50_000, milestone_percent=0)


def test_copies_have_a_row_only_where_the_card_asks_for_them() -> None:
    done = snapshot(backup=CopyStatus(NOW - HOUR, 31000), sync=CopyStatus(NOW - 60))
    assert list(copies(shown(done))) == []
    ((label, text, style),) = copies(
        shown(asked_for(done, backup=WANTED, hub=HubSection(repository="bigscience/logs")))
    )
    assert (label, text, style) == (
        "copies",
        "backup of step 31000 1 h 00 min ago; sync 1 min ago",
        "",
    )
    ((_, text, style),) = copies(shown(asked_for(snapshot(), backup=WANTED)))
    assert (text, style) == ("backup never yet", "yellow")
    ((_, text, style),) = copies(
        shown(asked_for(snapshot(backup=Unknown("unreadable")), backup=WANTED))
    )
    assert (text, style) == ("backup unknown", "magenta")


def test_what_is_missing_damaged_and_tried_is_told() -> None:
    policy = BackupSection(store="/a", store_interval=100, milestone_percent=0)
    seen = CopyStatus(
        NOW - HOUR,
        31000,
        "store: no room",
        (Copied("store", "full", 31000),),
        ("store: step 31000",),
    )
    given = asked_for(snapshot(backup=seen), backup=policy)
    assert (shown(given).copies_missing, shown(given).copies_damaged) == (2, 1)  # 31,100 and 31,200
    around = ExtraObservations(
        copying=(
            RunningCopy("store", "ana", "login1", NOW - 60, 31100),
            RunningCopy("sync", "ben", "login2", NOW - 5),
        ),
        drill=DrillRecord(NOW - DAY, "store", 30000, passed=False),
    )
    (_, text, style), *at_work = copies(shown(given, around))
    assert text == (
        "backup of step 31000 1 h 00 min ago, but now: store: no room; 2 not copied yet; 1 DAMAGED; "
        "restore drill of step 30000 FAILED 1 d 0 h ago"
    )
    assert style == "red"
    assert [words for _, words, _ in at_work] == [
        "ana on login1 copies to the store (step 31100), for 1 min",
        "ben on login2 mirrors the logs to the hub, for 5 s",
    ]
    hidden = asked_for(snapshot(backup=Unknown("x")), backup=policy)
    assert (shown(hidden).copies_missing, shown(hidden).copies_damaged) == (None, None)


def test_who_copies_is_read_from_the_claims(tmp_path: Path) -> None:
    """The names of the claims are those under which the copying commands make them."""
    from tests.tr11ops.status.publishing import card_of, directory_of
    from tr11ops.hub.sync import CLAIM

    card = card_of(tmp_path)
    given = card.model_copy(
        update={
            "backup": card.backup.model_copy(update={"store": str(tmp_path / "store")}),
            "hub": card.hub.model_copy(update={"repository": "bot/logs"}),
        }
    )
    directory = directory_of(card)
    directory.paths.state.mkdir(parents=True)
    assert observe_extra(directory, given, snapshot()).copying == ()
    with ArchiveLock(directory, "store", threading.Event()) as turn:
        turn.copying(31000)
        ClaimFolder(directory, CLAIM).take(Claim.of_this_process(time.time(), HOUR), None)
        ClaimFolder(directory, "copy-url").take(Claim.of_this_process(time.time(), HOUR), None)
        seen = observe_extra(directory, given, replace(snapshot(), time=time.time()))
        assert [(work.to, work.step) for work in known(seen.copying, ())] == [
            ("store", 31000),
            ("sync", None),
        ]
        write_drill(directory, DrillRecord(NOW, "store", 30000, passed=True))
    after = observe_extra(directory, given, replace(snapshot(), time=time.time()))
    assert [work.to for work in known(after.copying, ())] == ["sync"]
    assert after.drill == DrillRecord(NOW, "store", 30000, passed=True)
    assert observe_extra(directory, card, snapshot()).drill is None


# ----------------------------------------------------------------------------- file systems


def test_the_fullest_file_system_and_when_it_is_full() -> None:
    grows = [look("SCRATCH", 80.0 - day, age=600.0 + day * DAY) for day in range(10)]
    given = snapshot(usage=(*grows, look("STORE", 50.0, inodes=95.0, age=DAY)))
    ((label, text, style),) = filesystems(shown(given))
    assert (label, text, style) == (
        "disks",
        "STORE 95 % of inodes (fullest of 2); 1 d 0 h ago",
        "yellow",
    )
    ((_, text, style),) = filesystems(shown(snapshot(usage=tuple(grows))))
    assert text.startswith("SCRATCH 80 % of bytes, full in 19 d 23 h")
    assert style == ""
    rule = FilesystemSection(name="SCRATCH", source="df", bytes_percent=75.0)
    ((_, _, style),) = filesystems(
        shown(asked_for(snapshot(usage=tuple(grows)), filesystems=(rule,)))
    )
    assert style == "yellow"


def test_file_systems_that_no_one_asked_for_have_no_row() -> None:
    assert list(filesystems(shown(snapshot()))) == []
    assert list(filesystems(shown(snapshot(usage=Unknown("unreadable"))))) == []
    wanted = asked_for(snapshot(), filesystems=(FilesystemSection(name="SCRATCH", source="df"),))
    assert [text for _, text, _ in filesystems(shown(wanted))] == [
        "not looked at yet (tr11 fs-watchdog)"
    ]
    hidden = changed(wanted, usage=Unknown("unreadable"))
    assert [text for _, text, _ in filesystems(shown(hidden))] == ["unknown"]


# ----------------------------------------------------------------------------- periodic jobs
def test_periodic_jobs_are_alive_late_or_failing() -> None:
    assert list(periodic(shown(snapshot(periodic_jobs=())))) == []
    ((label, text, style),) = periodic(
        shown(snapshot(periodic_jobs=(cron_job(), cron_job("digest", next_due=NOW + 9000))))
    )
    assert (label, text, style) == (
        "periodic",
        "2 jobs alive, last pulse 10 min ago; next pulse in 50 min",
        "",
    )
    late = cron_job(next_due=NOW - 5 * HOUR, started=NOW - 6 * HOUR)
    failing = cron_job("filesystems", failures_in_a_row=3, message="df: no such path")
    ((_, text, style),) = periodic(
        shown(snapshot(periodic_jobs=(cron_job("digest"), late, failing)))
    )
    assert text == "pulse late by 5 h 00 min; filesystems failed 3 times: df: no such path"
    assert style == "red"
    assert (
        list(periodic(shown(asked_for(snapshot(periodic_jobs=(late,)), periodic_jobs=("digest",)))))
        == []
    )


def test_a_watchdog_that_only_tells_is_said_to() -> None:
    seen = snapshot(periodic_jobs=(cron_job(),))
    (_, (label, text, _)) = list(periodic(shown(with_facts(seen, watch=WatchSection()))))
    assert (label, text) == (
        "",
        "the watchdog only tells (watch.act = false): what it would do waits for you",
    )
    assert len(list(periodic(shown(seen)))) == 1
    late = snapshot(periodic_jobs=(cron_job(next_due=NOW - 5 * HOUR, started=NOW - 6 * HOUR),))
    assert len(list(periodic(shown(with_facts(late, watch=WatchSection()))))) == 1, "there is none"


# ----------------------------------------------------------------------------- alerts
def test_every_open_alert_says_who_has_it() -> None:
    seen = (
        alert(),
        alert("disk", owner="eva"),
        alert("slow", severity=Severity.WARNING, acknowledged_by="ben"),
        alert("spike", snoozed_until=NOW + HOUR),
    )
    told = [text for _, text, _ in alerts(shown(snapshot(), ExtraObservations(seen)))]
    assert told[0].endswith(f"(1 h 00 min); unassigned: tr11 alerts ack {seen[0].fingerprint}")
    assert [text.rpartition("; ")[2] for text in told[1:]] == [
        "eva has it",
        "ben has it",
        "snoozed for 1 h 00 min",
    ]
    many = tuple(alert(f"d{number}") for number in range(9))
    assert [text for _, text, _ in alerts(shown(snapshot(), ExtraObservations(many)))][
        -1
    ] == "and 4 more (tr11 alerts list)"


def test_no_alert_means_something_only_where_someone_looks() -> None:
    alone = snapshot(periodic_jobs=())
    assert [text for _, text, _ in alerts(shown(alone, ExtraObservations(())))] == [
        "none open; no watchdog looks at the run"
    ]
    assert [
        text
        for _, text, _ in alerts(
            shown(snapshot(periodic_jobs=(cron_job(),)), ExtraObservations(()))
        )
    ] == ["none open"]
    assert [
        text
        for _, text, _ in alerts(
            shown(snapshot(periodic_jobs=Unknown("away")), ExtraObservations(()))
        )
    ] == ["none open"]
    assert [
        text for _, text, _ in alerts(shown(snapshot(), ExtraObservations(Unknown("unreadable"))))
    ] == ["unknown: unreadable"]


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
    VerdictWord.STARTING,
    VerdictWord.QUEUED,
    VerdictWord.FINISHED,
    VerdictWord.STOPPED,
}


SAID_BESIDE = {
    0: {
        "You may sleep",
        "Nothing is left to train",
        "It is stopped",
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
            "no watchdog is installed: the last look was 40 s ago, by ana",
        ),
        (  # of an older tr11
            ExtraObservations(looked=NOW - 40),
            "no watchdog is installed: the last look was 40 s ago, by someone",
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


def test_a_pulse_leaves_who_looked_and_when(tmp_path: Path) -> None:
    from tests.tr11ops.status.publishing import card_of, directory_of

    card = card_of(tmp_path)
    directory = directory_of(card)
    directory.paths.state.mkdir(parents=True)
    assert observe_extra(directory, card, snapshot()).looked is None
    sight = AlertInput((), frozenset(), observed=True)
    process(Sender.of(directory, card, NOW), sight, deliver=False)
    seen = observe_extra(directory, card, snapshot())
    assert (seen.looked, seen.looked_by) == (NOW, who_looks())


def test_a_look_from_a_terminal_and_one_from_a_crontab_are_told_apart() -> None:
    """A session of its own has no terminal, as what cron starts; the other has one of its own."""
    program = "import tr11ops.rundir.journal as journal; print(journal.who_looks())"
    command = [sys.executable, "-c", program]
    alone = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
    assert alone.stdout.strip() == f"{user_name()}, without a terminal (cron or a script)"
    typed, keyboard = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=keyboard, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.communicate(timeout=60)[0].strip() == user_name()
    os.close(typed)
    os.close(keyboard)
