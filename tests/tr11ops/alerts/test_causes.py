"""One incident, one mail: its cause leads, what follows from it is below, and the command helps
with the cause.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.office import ANA, CRITICAL, INFO, LIST, MINUTE, NOON, WARNING, finding
from tr11ops.alerts.changes import AlertChange, apply, resolve_prefix
from tr11ops.alerts.incidents import ACKNOWLEDGED, look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import RunCondition, RunSituation
from tr11ops.alerts.state import Alert, AlertState, Message
from tr11ops.detect.detector import HELD_FOR_FAULT, Finding, Severity, fingerprint

POLICY = Policy(
    run="small", directory="/runs/small", recipients=(LIST,), rota=(ANA,), escalate_minutes=()
)
FAULT = finding(
    "unfinished-end", WARNING, "20_3", title="attempt 20_3 failed: SIGSEGV", fix="tr11 diagnose"
)
HELD = finding(
    "held", CRITICAL, "20", title="job 20_[4-10%1] is held", fix="tr11 diagnose", then=("tr11 resume",),
    fault=HELD_FOR_FAULT,
)  # fmt: skip


class Watch:
    """Looks, a minute apart."""

    def __init__(self) -> None:
        self.alert_state = AlertState()
        self.now = NOON

    def sees(self, *findings: Finding, blind: tuple[str, ...] = ()) -> tuple[Message, ...]:
        self.now += MINUTE
        looked = look(self.alert_state, findings, frozenset(blind), POLICY, self.now)
        self.alert_state, messages = tell(looked, POLICY, self.now)
        return messages

    @property
    def open(self) -> list[str]:
        return [alert.detector for alert in self.alert_state.open_alerts]

    @property
    def alert(self) -> Alert:
        (alert,) = self.alert_state.open_alerts
        return alert


def test_one_mail_with_the_cause_as_its_headline() -> None:
    watch = Watch()
    (message,) = watch.sees(HELD, FAULT)
    assert message.subject == "[CRITICAL] small: attempt 20_3 failed: SIGSEGV"
    lines = message.body.splitlines()
    at = lines.index("Type:")
    assert lines[at : at + 7] == [
        "Type:", "  tr11 diagnose", "When it is repaired, type:", "  tr11 resume", "", "What follows from it:",
        "- job 20_[4-10%1] is held",
    ]  # fmt: skip
    assert watch.open == ["unfinished-end"] and watch.sees(HELD, FAULT) == ()


NO_START = finding(
    "start-failed", CRITICAL, "20_3", title="attempt 20_3 could not start: slurm.setup is broken",
    fix="tr11 doctor", then=("tr11 resume",), identity=("no codec",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "consequences"), [(NO_START, ()), (replace(FAULT, identity=("SIGSEGV",)), (HELD,))]
)
def test_that_a_cure_has_not_helped_is_said_also_where_no_look_came_between(
    fault: Finding, consequences: tuple[Finding, ...]
) -> None:
    """The fault is as severe as before, in another attempt, which a person has let start."""
    watch = Watch()
    (first,) = watch.sees(fault, *consequences)
    change = AlertChange(ACKNOWLEDGED, "ana")
    watch.alert_state = apply(
        watch.alert_state, watch.alert.fingerprint, change, "ana", "", watch.now
    )
    assert watch.sees(fault, *consequences) == ()
    title = fault.title.replace("20_3", "20_4")
    later = replace(fault, subject="20_4", title=title)
    (second,) = watch.sees(later, *consequences)
    assert (second.kind, second.thread) == ("uncured", first.message_id)
    assert second.subject == f"[CRITICAL] small: not cured, {title}"
    assert second.body.startswith(f"Not cured: {title}.")
    said = " ".join(second.body.split())
    assert "has not helped: it went on after 20_3, and 20_4 has ended in the same way." in said
    assert watch.sees(later, *consequences) == ()


def test_a_failed_cure_is_known_where_looks_between_saw_its_attempt_begin() -> None:
    """The attempt is on record before its end is: until then the end of the one before is told."""
    watch = Watch()
    watch.sees(NO_START)
    queued = RunSituation(condition=RunCondition("QUEUED", is_well=True))
    for _ in range(2):
        watch.now += MINUTE
        looked = look(watch.alert_state, [FAULT], frozenset(), POLICY, watch.now)
        watch.alert_state, told = tell(looked, POLICY, watch.now, situation=queued)
        assert "cleared" not in {one.kind for one in told}
    later = replace(NO_START, subject="20_4", title=NO_START.title.replace("20_3", "20_4"))
    kinds = [
        one.kind for one in watch.sees(later, replace(FAULT, severity=CRITICAL, subject="20_4"))
    ]
    assert kinds == ["uncured"]


def test_another_end_is_no_failed_cure_while_tasks_follow_by_themselves() -> None:
    watch = Watch()
    watch.sees(replace(FAULT, severity=CRITICAL))
    told = watch.sees(replace(FAULT, severity=CRITICAL, subject="20_4"))
    assert told == ()


def test_an_incident_is_not_as_old_as_a_full_list_that_it_meets() -> None:
    """The list was full for 13 minutes when an attempt failed for want of it: the mail said so of both."""
    watch = Watch()
    end = finding(
        "unfinished-end",
        CRITICAL,
        "7_3",
        title="attempt 7_3 failed",
        fault=HELD_FOR_FAULT,
        since=NOON,
    )
    full = finding(
        "exclusion-cap",
        WARNING,
        title="no more may be",
        fault=HELD_FOR_FAULT,
        since=NOON - 13 * MINUTE,
    )
    told = watch.sees(end, full)
    assert watch.alert.start == NOON and "began at 2022-05-02 12:00 UTC" in " ".join(
        told[0].body.split()
    )


@pytest.mark.parametrize("first", [True, False])
def test_an_incident_begins_with_its_earliest_evidence(first: bool) -> None:
    """Also where what follows from the cause shows earlier than the cause does, or in a later look."""
    watch = Watch()
    node = finding("slow-node", WARNING, "n07", title="n07 holds the others back", since=NOON)
    slow = finding("slow", WARNING, title="the training is slow", since=NOON - 5 * MINUTE)
    told = watch.sees(node, *([slow] if first else []))
    watch.sees(node, slow)
    assert watch.alert.start == NOON - 5 * MINUTE
    assert [one.lasted_from for one in watch.alert_state.incidents()] == [NOON - 5 * MINUTE]
    assert ("began at 2022-05-02 11:55 UTC" in " ".join(told[0].body.split())) is first


def test_a_consequence_of_two_lines_is_one_point() -> None:
    title = f"job 20_[4-10%1] is held: {'x' * 60}"
    (message,) = Watch().sees(replace(HELD, title=title), FAULT)
    points = message.body.partition("What follows from it:\n")[2].partition("\n\n")[0].splitlines()
    assert points == ["- job 20_[4-10%1] is held:", f"  {'x' * 60}"]


def test_a_lost_node_and_the_end_of_its_job_are_one_thread() -> None:
    """First the node does not answer, then the attempt has ended by it: one alert goes on, and ends
    once.
    """
    watch = Watch()
    title = "n01, which runs the batch script of job 20_3, does not answer the scheduler"
    (first,) = watch.sees(finding("node-lost", WARNING, "20_3", title=title, identity=("n01",)))
    end = finding(
        "unfinished-end",
        WARNING,
        "20_3",
        title="attempt 20_3 failed: n01 was lost",
        identity=("unknown",),
    )
    told = watch.sees(end)
    assert watch.open == ["unfinished-end"] and all(
        message.thread == first.message_id for message in told
    )
    watch.sees()
    (last,) = watch.sees()
    assert last.kind == "cleared" and last.thread == first.message_id and watch.open == []
    other = finding(
        "unfinished-end",
        WARNING,
        "20_4",
        title="attempt 20_4 failed: n02 was lost",
        identity=("node",),
    )
    watch.sees(
        finding("node-lost", WARNING, "20_5", title="n07 of job 20_5 is silent", identity=("n07",))
    )
    watch.sees(other)
    assert "node-lost" in watch.open, "the end of another job is another incident"


UNSEEN = finding(
    "directory-unseen", CRITICAL, "", title="the run directory is not mounted here: nothing trains",
    fix="findmnt --target /run", then=("tr11 resume", "tr11 pulse"), fault=HELD_FOR_FAULT,
)  # fmt: skip
LOST_END = replace(
    FAULT, title="attempt 20_3 failed: its lease is not there", fix="tr11 resume", identity=("unknown",)
)  # fmt: skip


@pytest.mark.parametrize(
    ("left", "again"),
    [((LOST_END, HELD), ()), ((replace(HELD, fix="tr11 resume"),), ()), ((FAULT, HELD), ("cause",))],
    ids=["the attempt that lost it", "a task that began without it", "another fault besides"],
)  # fmt: skip
@pytest.mark.parametrize("before", [False, True])
def test_what_is_held_when_the_directory_is_seen_again_is_no_second_alarm(
    left: tuple[Finding, ...], again: tuple[str, ...], before: bool
) -> None:
    """People know that nothing trains, and what to type when the directory is back."""
    watch = Watch()
    if before:  # such an end is on record already, as over
        watch.sees(*left)
        for _ in range(3):
            watch.sees()
        assert watch.open == []
    (first,) = watch.sees(UNSEEN)
    at = watch.now - 5.0
    left = tuple(replace(one, since=at) for one in left)
    told = watch.sees(*left)
    assert tuple(one.kind for one in told) == again
    assert watch.open == [left[0].detector] and all(one.thread == first.message_id for one in told)
    assert watch.alert.start == at and watch.alert.fix == left[0].fix
    assert resolve_prefix(watch.alert_state, first.alert) == watch.alert
    assert watch.sees(*left) == watch.sees(*left) == ()
    watch.sees()
    (over,) = watch.sees()
    assert over.kind == "cleared" and over.thread == first.message_id and watch.open == []
    known_as = left[0].title if again else UNSEEN.title
    assert known_as.partition(": ")[0] in over.subject, "as the last mail named it"


def test_an_end_after_the_directory_was_seen_again_is_a_new_incident() -> None:
    watch = Watch()
    watch.sees(UNSEEN)
    watch.sees()
    (told,) = watch.sees(replace(LOST_END, since=watch.now + MINUTE), HELD)[-1:]
    assert told.kind == "opened" and "directory-unseen" not in watch.open
    only_here = Watch()  # what runs trains on, and ends by a fault of its own
    only_here.sees(replace(UNSEEN, severity=WARNING, fault=""))
    assert [one.kind for one in only_here.sees(replace(FAULT, since=NOON), HELD)] == ["opened"]


def test_a_cause_that_is_found_later_goes_on_with_the_alert_of_its_consequence() -> None:
    """People know of the incident: no all-clear, no second alert; one mail that says what brought
    it about.
    """
    watch = Watch()
    (first,) = watch.sees(HELD)
    began = watch.alert.began
    change = AlertChange(ACKNOWLEDGED, "ana")
    watch.alert_state = apply(
        watch.alert_state, watch.alert.fingerprint, change, "ana", "", watch.now
    )
    (second,) = watch.sees(HELD, FAULT)
    assert second.kind == "cause" and "SIGSEGV" in second.subject
    assert "This is the cause of what you were told before," in second.body
    assert (watch.open, watch.alert.began, watch.alert.acknowledged_by) == (
        ["unfinished-end"],
        began,
        "ana",
    )
    assert second.thread == first.message_id
    # as the first mail named it
    assert resolve_prefix(watch.alert_state, fingerprint("held", ())) == watch.alert
    assert watch.sees(HELD, FAULT) == ()


def test_a_suspicion_that_proves_to_be_the_programs_is_told_in_its_thread() -> None:
    watch = Watch()
    title = "attempt 20_1 failed: SIGSEGV; whether it is a node's fault, the next attempt tells"
    supposed = finding(
        "unfinished-end", WARNING, "20_1", title=title, identity=("sigsegv",), fault="node"
    )
    (first,) = watch.sees(supposed)
    proved = replace(
        supposed,
        subject="20_2",
        title="the last 2 attempts failed: software or data",
        fault="software",
    )
    (second,) = watch.sees(proved)
    assert (second.kind, second.thread) == (
        "cause",
        first.message_id,
    ) and "software or data" in second.subject
    assert watch.sees(proved) == ()
    worse = Watch()
    worse.sees(supposed)
    (told,) = worse.sees(replace(proved, severity=CRITICAL))
    assert (
        told.kind == "raised"
        and "This is the cause of what you were told before" in told.body.replace("\n", " ")
    )


def test_of_lesser_alerts_in_one_mail_the_strongest_cause_is_the_subject() -> None:
    chain, slow, full = (
        finding(name, WARNING, title=f"it is {name}")
        for name in ("chain-end", "slow", "filesystem-full")
    )
    (message,) = Watch().sees(chain, slow, full)
    assert message.subject == "[WARNING] small: it is filesystem-full (and 2 more)"
    assert message.body.startswith("It is filesystem-full.")


@pytest.mark.parametrize("severity", [WARNING, CRITICAL])
def test_another_fault_of_the_same_kind_has_not_come_back(severity: Severity) -> None:
    """The hang of the next job is a new one: a mail with its own headline, in no other's thread."""
    watch = Watch()
    (first,) = watch.sees(finding("hung", severity, "20_1", title="job 20_1 hangs: rank 6 on n07"))
    watch.sees()
    (over,) = watch.sees()
    (second,) = watch.sees(finding("hung", severity, "20_2", title="job 20_2 hangs: rank 1 on n03"))
    assert [first.kind, over.kind, second.kind] == ["opened", "cleared", "opened"]
    assert (
        second.thread == ""
        and second.message_id != first.message_id
        and "came back" not in second.body
    )
    assert [one.title for one in watch.alert_state.closed] == ["job 20_1 hangs: rank 6 on n07"]


def test_what_has_an_identity_comes_back_in_any_job() -> None:
    watch = Watch()
    lost = finding("node-lost", CRITICAL, "20_1", title="job 20_1 has lost n07", identity=("n07",))
    watch.sees(lost)
    watch.sees()
    watch.sees()
    (message,) = watch.sees(replace(lost, subject="20_2", title="job 20_2 has lost n07"))
    assert message.kind == "reopened" and "This came back" in message.body


def test_two_alerts_become_one_when_one_proves_to_follow_from_the_other() -> None:
    watch = Watch()
    watch.sees(replace(HELD, fault=""), FAULT)
    assert watch.open == ["held", "unfinished-end"]
    # both are known already
    assert watch.sees(HELD, FAULT) == () and watch.open == ["unfinished-end"]
    assert watch.alert.severity is CRITICAL
    assert [one.detector for one in watch.alert_state.closed] == ["held"]


@pytest.mark.parametrize(
    "blind", [(), ("unfinished-end",)], ids=["one look", "a look that could not see it"]
)
def test_a_cause_that_one_look_misses_is_still_the_cause(blind: tuple[str, ...]) -> None:
    watch = Watch()
    watch.sees(HELD, FAULT)
    assert watch.sees(HELD, blind=blind) == () and watch.open == ["unfinished-end"]


def test_what_outlasts_its_cause_is_told_for_itself() -> None:
    watch = Watch()
    watch.sees(HELD, FAULT)
    watch.sees(HELD)
    messages = watch.sees(HELD)
    assert watch.open == ["held"] and "opened" in [message.kind for message in messages]


def test_what_becomes_worse_is_told_although_its_cause_was_missed() -> None:
    watch = Watch()
    watch.sees(replace(HELD, severity=WARNING), FAULT)
    (message,) = watch.sees(HELD)
    assert message.severity is CRITICAL and "is held" in message.subject


def test_another_cause_is_another_incident_and_what_is_held_follows_from_the_newest() -> None:
    watch = Watch()
    lost = finding(
        "unfinished-end",
        WARNING,
        "20_2",
        title="attempt 20_2 failed: n07 is dead",
        identity=("node",),
    )
    (first,) = watch.sees(lost)
    bad = replace(FAULT, identity=("software",))
    (second,) = watch.sees(HELD, bad, replace(lost, severity=INFO))
    assert second.subject == "[CRITICAL] small: attempt 20_3 failed: SIGSEGV"
    assert second.kind == "opened" and first.message_id not in second.thread
    over = watch.sees(HELD, bad, replace(lost, severity=INFO))
    assert [alert.title for alert in watch.alert_state.open_alerts] == [bad.title]
    assert all("n07" in message.subject for message in over)


def test_a_cause_that_becomes_known_makes_no_second_incident_of_an_end() -> None:
    watch = Watch()
    wordless = replace(
        FAULT, title="attempt 20_3 ended without the trainer's end marker", identity=("unknown",)
    )
    (first,) = watch.sees(wordless)
    began = watch.alert.began
    (second,) = watch.sees(replace(FAULT, identity=("software",)))
    assert (second.kind, second.thread) == ("cause", first.message_id)
    assert (watch.alert.began, watch.alert.title) == (began, FAULT.title)


def test_where_the_array_is_held_for_a_fault_the_page_is_the_one_that_lets_it_go_on() -> None:
    watch = Watch()
    watch.sees(FAULT)
    assert watch.alert.runbook == "unfinished-end.md"
    (message,) = watch.sees(HELD, FAULT)
    assert watch.alert.runbook == "array-held.md"
    assert (
        "---- tr11 runbook array-held " in message.appendix
        and "runbook unfinished-end" not in message.appendix
    )
    watch.sees(FAULT)
    assert watch.alert.runbook == "unfinished-end.md"


def test_what_makes_the_training_slow_leads_a_short_queue() -> None:
    """Both are warnings: the one costs nodes now, the other nothing before the morning."""
    queue = finding("chain-end", WARNING, "7", title="one more task is queued after this one")
    slow = finding(
        "slow-node", WARNING, "n11", title="n11 holds the others back", identity=("n11",)
    )
    stands = finding("down", WARNING, "", title="small is neither running nor queued")
    (message,) = Watch().sees(queue, slow)
    assert message.subject == "[WARNING] small: n11 holds the others back (and 1 more)"
    (message,) = Watch().sees(queue, slow, stands)
    assert message.subject == "[WARNING] small: small is neither running nor queued (and 2 more)"
