"""One incident from its first sign to its all-clear: how many mails it sends, and what each has for
a headline.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    beats,
    changed,
    ended,
    pending,
    running,
    steps,
    wordless,
)
from tests.tr11ops.watchdog.site_events import IDLE_NODES, NODES, phase
from tr11ops.alerts.incidents import look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import RunSituation
from tr11ops.alerts.state import AlertState, Message
from tr11ops.base.observed import known
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all, unjudged_detectors
from tr11ops.observe.observations import (
    FolderRoom,
    LaunchEnd,
    Readmission,
    TrainingEvent,
    UnwritableDirectory,
)
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.watchdog.situation import condition_of
from tr11ops.watchdog.verdict import judge

LOOK_SECONDS = 300.0  # between two looks of the watchdog
LOOKS = 3  # at each moment of an incident
POLICY = Policy(
    "tr11-176B-ml", "/scratch/tr11", recipients=("duty@site.example",), escalate_minutes=()
)

WELL = phase("training")
JOB = running(partition="gpu_p13")
NEXT = running(
    job_id="1000_8", raw_id="1008", task_id=8, start_time=NOW - HOUR, partition="gpu_p13",
    nodes=tuple(f"n{number:02d}" for number in range(2, 50)),
)  # fmt: skip
REST = pending((9, 10, 11, 12), partition="gpu_p13")
HELD = replace(REST, reason="JobHeldAdmin")


def goes_on(**changes: Any) -> Snapshot:
    """The next task trains."""
    attempts = (Attempt("1008", NOW - HOUR, None, "1000_8"), *changes.pop("attempts", ()))
    return replace(
        WELL,
        jobs=(NEXT, REST),
        attempts=attempts,
        heartbeats=beats(job_id="1008"),
        steps=steps(job_id="1008"),
        **changes,
    )


def without(node: str) -> tuple[Node, ...]:
    return tuple(
        replace(one, states=frozenset({"down"})) if one.name == node else one for one in NODES
    )


def over(
    job_id: str, cause: str, why: str, state: JobState = JobState.FAILED, **changes: Any
) -> Snapshot:
    """An attempt has ended by a fault that holds all that waits."""
    attempt = replace(wordless("1007", 60.0), cause=cause, held_because=why)
    job = replace(JOB, state=state, end_time=NOW - 60.0, exit_code=1)
    return changed(
        WELL, jobs=(job, HELD), nodes=IDLE_NODES, attempts=(attempt, ended()), heartbeats=beats(60.0, "ended"),
        steps=steps(age=120.0), holds=(HoldRecord("1000", "tr11", NOW - 60.0, why, is_for_fault=True),), **changes,
    )  # fmt: skip


def told(why: str) -> str:
    """A reason as subjects have it."""
    return why.replace(": ", ", ")


LOST_HOST = replace(
    WELL, nodes=without("n01"), attempts=(Attempt("1007", NOW - HOUR, None, "1000_7", nodes=JOB.nodes),),
    heartbeats=beats(600.0), steps=steps(age=600.0),
)  # fmt: skip
CANCELLED = replace(JOB, state=JobState.CANCELLED, end_time=NOW - 60.0)
ENDED_BY_IT = replace(wordless("1007", 60.0), nodes=JOB.nodes)
AFTER_CANCEL = replace(LOST_HOST, jobs=(CANCELLED, REST), attempts=(ENDED_BY_IT, ended()))
AFTER_LOST_HOST = goes_on(nodes=without("n01"), attempts=(ENDED_BY_IT, ended()))
CRITICAL = "[CRITICAL] "
LOST = f"{CRITICAL}job 1000_7 has lost n01, which ran its batch script"
STALLED = (
    f"{CRITICAL}job 1000_7: no iteration after 31219 for 2 h 00 min, though its ranks show life"
)
HANGS = f"{CRITICAL}job 1000_7 hangs: no sign of life for 1 h 00 min while training"
FULL_CAP = "6 nodes are excluded, no more may be: the next bad node stops the run"
MOUNT = "the run directory cannot be used: /scratch is not mounted"
SAMPLE = "software or data, not the nodes: the same fault came back after iteration 31219 on n1 and n2: SIGSEGV"
CUT = "software or data, not the nodes ... SIGSEGV"  # as a subject has room for it
ENOSPC = "[Errno 28] No space left on device: '/scratch/tr11/checkpoints/main/global_step31300'"
FULL = UnwritableDirectory("/scratch/tr11", "no byte is left", is_full=True)
FAILED_SAVE = TrainingEvent(
    "save-failed", NOW - 60, "1007", {"step": 31_300, "why": ENOSPC, "node": "", "said": ""}
)

CAP = tuple(
    Exclusion(f"n{number}", "Xid 79", "tr11", NOW + HOUR, (), NOW - HOUR)
    for number in range(50, 56)
)
BY_FORCE = Exclusion("n07", "Xid 79", "ana", NOW + HOUR, (), NOW - 60)
DEAD = (
    LaunchEnd(
        "1007", 1, NOW - 1800, "n07: lost to the scheduler", "launch 2 starts without it", ("n07",)
    ),
)

AT_MOST = "of the partition's 60 nodes at most 6 may be excluded"
CUT_CAP = "n07 cannot be excluded ... 60 nodes at most 6 may be excluded"
CAPPED = f"n07 cannot be excluded: {AT_MOST}"
BLAMED = (LaunchEnd("1007", 1, NOW - 60, "Xid 79 on n07", "", ("n07",)),)
STOPPED_BY_CAP = over("1007", "node", CAPPED, exclusions=CAP, launch_ends=BLAMED)

TWICE = f"the last 2 attempts failed: {CUT}"
FAILED_AT = (LaunchEnd("1007", 1, NOW - 2 * HOUR, reached=31_219, began_at=31_200),)
BAD_SAMPLE = over("1007", "software", SAMPLE)
FIRST_BAD = replace(wordless("1007", 2 * HOUR), cause="software", held_because=SAMPLE)
AGAIN_BAD = replace(wordless("1008", 60.0), cause="software", held_because=SAMPLE)
DONE_AGAIN = changed(
    goes_on(attempts=(FIRST_BAD, ended())), steps=steps(8, 31_210, "1008"), launch_ends=FAILED_AT
)
PASSED = replace(DONE_AGAIN, steps=steps(20, 31_220, "1008"))
BAD_AGAIN = changed(
    BAD_SAMPLE, jobs=(replace(NEXT, state=JobState.FAILED, end_time=NOW - 60.0, exit_code=1), HELD),
    attempts=(AGAIN_BAD, FIRST_BAD, ended()), heartbeats=beats(60.0, "ended", job_id="1008"),
    steps=steps(19, 31_219, "1008", age=120.0), launch_ends=FAILED_AT,
)  # fmt: skip

STALL = replace(WELL, heartbeats=beats(30.0), steps=steps(age=2 * HOUR))
SILENT = replace(WELL, heartbeats=beats(HOUR), steps=steps(age=2 * HOUR))

# the incident; what is seen one after another; the subjects of all mails
INCIDENTS: list[tuple[str, tuple[Snapshot, ...], list[str]]] = [
    ("nothing happens", (WELL, goes_on()), []),
    (
        "the batch host dies",
        (WELL, LOST_HOST, AFTER_CANCEL, AFTER_LOST_HOST),
        [LOST, f"[OK] over: {LOST.removeprefix(CRITICAL)}, and has ended"],
    ),
    (
        "a stall becomes a hang, shows life once more, and the next task trains",
        (WELL, STALL, SILENT, STALL, SILENT, goes_on(attempts=(ended("1007"),))),
        [STALLED, HANGS, f"[OK] over: {HANGS.removeprefix(CRITICAL)}"],
    ),
    (
        "the directory was unmounted",
        (WELL, over("1007", "storage", MOUNT), goes_on(attempts=(ended("1007"),))),
        [
            f"{CRITICAL}attempt 1000_7 failed: {told(MOUNT)}",
            f"[OK] over: attempt 1000_7 failed: {told(MOUNT)}",
        ],
    ),
    (
        "a bad sample",
        (WELL, over("1007", "software", SAMPLE), goes_on(attempts=(ended("1007"),))),
        [f"{CRITICAL}attempt 1000_7 failed: {CUT}", f"[OK] over: attempt 1000_7 failed: {CUT}"],
    ),
    (
        "a bad sample, and the next task comes past it",
        (WELL, BAD_SAMPLE, DONE_AGAIN, PASSED),
        [f"{CRITICAL}attempt 1000_7 failed: {CUT}", f"[OK] over: attempt 1000_7 failed: {CUT}"],
    ),
    (
        "a bad sample, and the next task fails at the same iteration",
        (WELL, BAD_SAMPLE, DONE_AGAIN, BAD_AGAIN),
        [f"{CRITICAL}attempt 1000_7 failed: {CUT}", f"{CRITICAL}not cured, {TWICE}"],
    ),
    (
        "what a task has come past fails in the task after it",
        (WELL, BAD_SAMPLE, PASSED, BAD_AGAIN),
        [
            f"{CRITICAL}attempt 1000_7 failed: {CUT}",
            f"[OK] over: attempt 1000_7 failed: {CUT}",
            f"{CRITICAL}{TWICE}",
        ],
    ),
    (
        "the disk is full, and a save fails",
        (
            WELL,
            changed(WELL, shut_folders=(FULL,)),
            changed(WELL, shut_folders=(FULL,), events=(FAILED_SAVE,)),
            changed(
                WELL, save_room=FolderRoom("/scratch/tr11", 216 * 2**10), events=(FAILED_SAVE,)
            ),
            changed(WELL, save_room=FolderRoom("/scratch/tr11", 2**42)),
        ),
        [
            f"{CRITICAL}/scratch/tr11 cannot be written to: no byte is left",
            "[OK] over: /scratch/tr11 has no room for the next save ... the last one has 2.5 T",
        ],
    ),
    (
        "the cap is reached, a node dies beyond it and is back, one is let in again",
        (
            replace(WELL, exclusions=CAP[:5]),
            replace(WELL, exclusions=CAP),
            changed(WELL, exclusions=CAP, launch_ends=DEAD, nodes=without("n07")),
            changed(WELL, exclusions=CAP, launch_ends=DEAD),
            changed(
                WELL, exclusions=CAP[:4], launch_ends=DEAD, readmissions=(Readmission("n54", NOW),)
            ),
        ),
        [
            f"[WARNING] {FULL_CAP}",
            "[WARNING] job 1000_7 has lost n07, and went on without it at 2022-05-01 11:30 UTC",
            "[OK] over: job 1000_7 has lost n07, and went on without it at 2022-05-01 11:30 UTC",
            f"[OK] over: {FULL_CAP}",
        ],
    ),
    (
        "a person excludes the bad node all the same, and the cap stays full",
        (
            WELL,
            STOPPED_BY_CAP,
            goes_on(attempts=(ended("1007"),), exclusions=(*CAP, BY_FORCE)),
        ),
        [
            f"{CRITICAL}attempt 1000_7 failed: {CUT_CAP}",
            f"[OK] over: attempt 1000_7 failed: {CUT_CAP}",
        ],
    ),
    (
        "an attempt ends because the cap has no room for its bad node, and two are let in again",
        (
            WELL,
            STOPPED_BY_CAP,
            goes_on(attempts=(ended("1007"),), exclusions=CAP[:4]),
        ),
        [
            f"{CRITICAL}attempt 1000_7 failed: {CUT_CAP}",
            f"[OK] over: attempt 1000_7 failed: {CUT_CAP}",
        ],
    ),
]


def mails(seen: tuple[Snapshot, ...]) -> list[Message]:
    """What is mailed when each of these moments is looked at some times; a moment's times move with
    the looks.
    """
    alert_state, found = AlertState(), list[Message]()
    now = NOW
    for moment in seen:
        for _ in range(LOOKS):
            now += LOOK_SECONDS
            findings = detect_all(moment)
            verdict = judge(moment, findings)
            trained = max(
                (step.time for step in known(moment.steps, ()) if step.time is not None),
                default=None,
            )
            is_live = trained is not None and NOW - trained < LOOK_SECONDS
            situation = RunSituation(
                condition=condition_of(verdict, moment),
                trained=now if is_live else trained,
                knows_acts=False,
            )
            alert_state = look(
                alert_state, findings, unjudged_detectors(moment), POLICY, now, situation.trained
            )
            alert_state, messages = tell(alert_state, POLICY, now, situation=situation)
            found += messages
    return found


@pytest.mark.parametrize(
    ("seen", "subjects"), [row[1:] for row in INCIDENTS], ids=[row[0] for row in INCIDENTS]
)
def test_an_incident_is_one_mail_and_its_all_clear(
    seen: tuple[Snapshot, ...], subjects: list[str]
) -> None:
    told = mails(seen)
    assert [message.subject.replace(" tr11-176B-ml:", "") for message in told] == subjects
    for line in (line for message in told for line in message.body.splitlines()):
        assert "--force" not in line or line.startswith("  tr11 "), "another advice beside `Type:`"


def test_what_still_stands_while_the_training_goes_on_names_no_resume() -> None:
    """An all-clear of something else lists it with its commands."""
    before = replace(FIRST_BAD, job_id="1006", changed=NOW - 3 * HOUR)
    ends = (*FAILED_AT, replace(FAILED_AT[0], job_id="1006"))
    trains = changed(
        goes_on(attempts=(FIRST_BAD, before, ended())), steps=steps(8, 31_210, "1008"), launch_ends=ends
    )  # fmt: skip
    (found,) = [one for one in detect_all(trains) if one.detector == "unfinished-end"]
    assert (found.severity, found.is_to_be_passed) == (Severity.WARNING, True)
    assert (found.fix, found.then) == ("tr11 diagnose --job 1000_7", ())


def test_the_mail_of_a_stop_at_the_cap_says_what_makes_the_run_go_on() -> None:
    (mail,) = mails((WELL, STOPPED_BY_CAP))
    typed = [line.strip() for line in mail.body.splitlines() if line.startswith("  tr11 ")]
    assert typed[:2] == [
        "tr11 nodes exclude n07 --force --reason 'Xid 79 on n07'",
        "tr11 resume",
    ]
    assert "-- tr11 runbook exclusion-cap --" in mail.body + mail.appendix


def test_a_stall_that_becomes_a_hang_is_told_again_in_its_thread_for_the_other_command() -> None:
    first, second, over = mails(
        (WELL, STALL, SILENT, STALL, SILENT, goes_on(attempts=(ended("1007"),)))
    )
    assert (second.kind, second.thread, over.thread) == (
        "cause",
        first.message_id,
        first.message_id,
    )
    assert "This began at 2022-05-01 10:00 UTC" in second.body, "with the stall"
