"""The one word: RUNNING is not alive, PENDING is not waiting, silence is not absence."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    wordless,
)
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.registry import detect_all
from tr11ops.snapshot import Attempt, KillSwitch, Snapshot, Unknown
from tr11ops.verdict import Verdict, Word, judge

AWAY = Unknown("squeue did not answer within 10 s")
SWITCH = KillSwitch(snapshot().run.kill_switch, "ben", NOW - 600.0, "new data")
FINISHED = ended("1007", 60.0, "finished", iteration=115311)
REFUSED = ended("1007", 60.0, "refused", message="data.prefixes: no such file")


def verdict(given: Snapshot) -> Verdict:
    return judge(given, detect_all(given))


# name, snapshot, word, a part of the sentence
TABLE: list[tuple[str, Snapshot, Word, str]] = [
    (
        "trains",
        snapshot(),
        Word.HEALTHY,
        "job 1000_7 on 48 nodes: training at iteration 31219, last sign of life 20 s ago",
    ),
    ("saves", snapshot(heartbeats=beats(phase="saving", age=900)), Word.HEALTHY, "saving"),
    ("loads", snapshot(heartbeats=beats(phase="loading")), Word.STARTING, "loading"),
    (
        "gets nodes",
        snapshot(jobs=(running(state=JobState.CONFIGURING),), heartbeats=(), steps=()),
        Word.STARTING,
        "gets its nodes",
    ),
    (
        "no sign yet",
        snapshot(jobs=(running(start_time=NOW - 90),), heartbeats=(), steps=()),
        Word.STARTING,
        "started 1 min 30 s ago",
    ),
    ("no sign for long", snapshot(heartbeats=(), steps=()), Word.STALLED, "held its nodes for 12 h 00 min"),
    (
        "hangs",
        snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR)),
        Word.STALLED,
        "no sign of life for 1 h 00 min",
    ),
    ("zombie", snapshot(nodes=(Node("n01", frozenset({"down"})),)), Word.STALLED, "which ran its batch script"),
    ("a spare node down", snapshot(nodes=(Node("n09", frozenset({"down"})),)), Word.HEALTHY, "training"),
    ("suspended", snapshot(jobs=(running(state=JobState.SUSPENDED),)), Word.STALLED, "suspended"),
    ("two at once", snapshot(jobs=(running(), running(job_id="1001", raw_id="1001"))), Word.STALLED, "2 jobs"),
    (
        "stays after its end",
        snapshot(attempts=(ended("1007", HOUR),), heartbeats=beats(HOUR, "ended")),
        Word.STALLED,
        "still holds",
    ),
    (
        "leaves, next one waits",
        snapshot(attempts=(ended("1007", 5.0),), heartbeats=beats(5.0, "ended")),
        Word.QUEUED,
        "comes next",
    ),
    (
        "leaves, nothing waits",
        snapshot(jobs=(running(state=JobState.COMPLETING),)),
        Word.DOWN,
        "nothing is queued behind",
    ),
    (
        "leaves, finished",
        snapshot(attempts=(FINISHED,), heartbeats=beats(70.0, "ended")),
        Word.FINISHED,
        "leaving its nodes",
    ),
    (
        "leaves, stopped",
        snapshot(attempts=(ended("1007", 5.0, "kill-switch"),), heartbeats=beats(9.0, "ending"), kill_switch=SWITCH),
        Word.STOPPED,
        "the kill switch was set by ben (new data); job 1000_7 is leaving",
    ),
    ("is being stopped", snapshot(kill_switch=SWITCH), Word.STOPPED, "is saving and leaving"),
    (
        "ignores the switch",
        snapshot(kill_switch=dataclasses.replace(SWITCH, time=NOW - 2 * HOUR)),
        Word.STALLED,
        "still runs",
    ),
    ("runs, cannot be seen", snapshot(heartbeats=Unknown("no rights"), steps=()), Word.UNKNOWN, "no rights"),
    ("logs steps, the rest unseen", snapshot(heartbeats=Unknown("no rights")), Word.HEALTHY, "training at iteration"),
    (
        "logged steps an hour ago, the rest unseen",
        snapshot(heartbeats=Unknown("no rights"), steps=steps(age=HOUR)),
        Word.UNKNOWN,
        "last sign of life 1 h 00 min ago, and more cannot be seen: no rights",
    ),
    (
        "runs, start not known",
        snapshot(jobs=(running(start_time=None),), heartbeats=(), steps=()),
        Word.UNKNOWN,
        "not known",
    ),
    ("paused, nothing waits", idle(jobs=(), pause=SWITCH), Word.STOPPED, "the run was paused by ben (new data)"),
    (
        "paused, the rest is held",
        idle(jobs=(pending(reason="JobHeldUser"),), pause=SWITCH),
        Word.STOPPED,
        "the run was paused by ben (new data); what is queued is held",
    ),
    ("paused, trains to its limit", snapshot(pause=SWITCH), Word.HEALTHY, "training at iteration"),
    ("queued", idle(jobs=(pending(),)), Word.QUEUED, "job 1000_[8-10%1] (3 tasks) waits: JobArrayTaskLimit"),
    ("held", idle(jobs=(pending(reason="JobHeldUser"),)), Word.DOWN, "JobHeldUser"),
    ("dead chain", idle(jobs=(pending(reason="DependencyNeverSatisfied"),)), Word.DOWN, "DependencyNeverSatisfied"),
    ("hours used up", idle(jobs=(pending(reason="AssocGrpCPUMinutesLimit"),)), Word.DOWN, "granted time is used up"),
    (
        "reservation over",
        idle(jobs=(pending(reason="ReservationDeleted", priority=0),)),
        Word.DOWN,
        "reservation has ended",
    ),
    ("priority 0", idle(jobs=(pending(reason="Resources", priority=0),)), Word.DOWN, "its priority is 0"),
    ("a reason of tomorrow", idle(jobs=(pending(reason="MoonPhase"),)), Word.DOWN, "MoonPhase: tr11 does not know"),
    (
        "maintenance",
        idle(jobs=(pending(reason="PartitionInactive"),)),
        Word.QUEUED,
        "waits for the site: PartitionInact",
    ),
    (
        "what waits behind a blocked job is blocked",
        idle(
            jobs=(
                pending(
                    (), reason="Dependency", raw_id="3", job_id="3", array_id=None, dependency="afterany:2(unfulfilled)"
                ),
                pending(
                    (), reason="Dependency", raw_id="2", job_id="2", array_id=None, dependency="afterany:1(unfulfilled)"
                ),
                pending((), reason="AssocGrpNodeLimit", raw_id="1", job_id="1", array_id=None),
            )
        ),
        Word.DOWN,
        "job 1 waits for a person (AssocGrpNodeLimit",
    ),
    (
        "one held, one waits",
        idle(jobs=(pending(reason="JobHeldUser"), pending((), reason="Priority"))),
        Word.QUEUED,
        "Priority",
    ),
    ("queued but stopped", idle(jobs=(pending(),), kill_switch=SWITCH), Word.STOPPED, "will leave at once"),
    (
        "held and stopped",
        idle(jobs=(dataclasses.replace(pending(), reason="JobHeldUser"),), kill_switch=SWITCH),
        Word.STOPPED,
        "what is queued is held",
    ),
    ("queued but finished", idle(jobs=(pending(),), attempts=(FINISHED,)), Word.FINISHED, "still queued"),
    ("queued after a refusal", idle(jobs=(pending(),), attempts=(REFUSED,)), Word.DOWN, "data.prefixes: no such file"),
    ("queued since a refusal", idle(jobs=(pending(submit_time=NOW),), attempts=(REFUSED,)), Word.QUEUED, "waits"),
    (
        "down",
        idle(),
        Word.DOWN,
        "nothing runs and nothing is queued; the last word was exit-duration at iteration 30800",
    ),
    ("down, no word", idle(attempts=(wordless("1007"),)), Word.DOWN, "nothing runs and nothing is queued"),
    ("never launched", idle(attempts=(), steps=(), heartbeats=()), Word.DOWN, "nothing was launched yet"),
    ("finished", idle(attempts=(FINISHED,)), Word.FINISHED, "finished at iteration"),
    ("stopped", idle(kill_switch=SWITCH), Word.STOPPED, "the kill switch was set by ben (new data)"),
    ("stopped by nobody known", idle(kill_switch=KillSwitch(SWITCH.path)), Word.STOPPED, "was set by someone"),
    ("nothing, and blind", idle(attempts=Unknown("no rights")), Word.UNKNOWN, "finished, stopped or down? no rights"),
    ("nothing, switch unseen", idle(kill_switch=Unknown("no rights")), Word.UNKNOWN, "no rights"),
    (
        "in the foreground",
        idle(heartbeats=beats(job_id="foreground-9")),
        Word.HEALTHY,
        "outside the scheduler, as foreground-9",
    ),
    (
        "scheduler away, alive",
        snapshot(jobs=AWAY, nodes=AWAY),
        Word.HEALTHY,
        "scheduler unreachable: squeue did not answer",
    ),
    (
        "scheduler away, starts",
        snapshot(jobs=AWAY, heartbeats=beats(phase="starting")),
        Word.STARTING,
        "scheduler unreachable",
    ),
    ("scheduler away, silent", idle(jobs=AWAY), Word.UNKNOWN, "last sign of life 1 d 0 h ago"),
    (
        "scheduler away, ended",
        snapshot(jobs=AWAY, attempts=(ended("1007", 5.0),)),
        Word.UNKNOWN,
        "scheduler unreachable",
    ),
    ("scheduler away, finished", idle(jobs=AWAY, attempts=(FINISHED,)), Word.FINISHED, "scheduler unreachable"),
    ("scheduler away, no life", idle(jobs=AWAY, heartbeats=()), Word.UNKNOWN, "no sign of life to go by"),
]


@pytest.mark.parametrize(("given_snapshot", "word", "part"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(given_snapshot: Snapshot, word: Word, part: str) -> None:
    result = verdict(given_snapshot)
    assert (result.word, part in result.why) == (word, True), result


def test_every_word_is_said_in_the_table() -> None:
    assert {row[2] for row in TABLE} == set(Word)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("healthy", 0),
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
    assert Verdict(Word(word), "").exit_code == code


FIELDS = ["jobs", "nodes", "steps", "heartbeats", "attempts", "checkpoints", "kill_switch", "exclusions", "submissions"]


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(FIELDS)),
    later=st.floats(-DAY, 30 * DAY),
)
def test_blindness_is_never_a_cause_for_alarm_or_for_sleep(base: Snapshot, hidden: set[str], later: float) -> None:
    """What is hidden may turn any verdict into another, but with everything hidden only `unknown` is left."""
    seen = dataclasses.replace(base, time=base.time + later, **dict.fromkeys(hidden, AWAY))
    result = verdict(seen)
    assert result.why
    assert "\n" not in result.why
    if len(hidden) == len(FIELDS):
        assert result.word is Word.UNKNOWN
    if "jobs" in hidden:
        assert result.word not in {Word.DOWN, Word.STALLED, Word.QUEUED}, "these need the scheduler's word"
    if result.word is Word.HEALTHY:
        assert re.search(r"last sign of life \S+", result.why)


def test_a_finished_training_that_was_extended_is_not_finished() -> None:
    extended = idle(attempts=(ended("1007", DAY, "finished", iteration=31000),))
    assert verdict(extended).word is Word.DOWN, "steps went beyond the end that was once reached"


def test_an_attempt_that_another_user_cannot_read_is_unknown() -> None:
    given = idle(attempts=(Attempt("1007", NOW, Unknown("end.json: no rights")),))
    assert verdict(given).word is Word.UNKNOWN, "it may have finished"
    assert [entry.detector for entry in detect_all(given)] == []
    assert given.unknowns() == ("end of attempt 1007: end.json: no rights",)


def test_a_critical_finding_needs_a_person_whatever_the_word_is() -> None:
    seen = snapshot()
    spike = Finding("loss-spike", Severity.CRITICAL, "the loss is 3 times its median")
    assert judge(seen, ()).exit_code == 0
    assert judge(seen, (dataclasses.replace(spike, severity=Severity.WARNING),)).exit_code == 0
    verdict = judge(seen, (spike,))
    assert (verdict.word, verdict.exit_code) == (Word.HEALTHY, 1)
    unseen = snapshot(jobs=Unknown("no answer"), heartbeats=(), steps=())
    assert judge(unseen, (spike,)).exit_code == 3
