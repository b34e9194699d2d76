"""The lines of a pulse: the original's to the letter, and the states that it could not tell apart."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest

from tests.tr11ops.logs.log_cases import CountingReader
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
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.registry import detect_all
from tr11ops.logs.summary import summarise
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.watchdog.log_lines import (
    Remark,
    State,
    lines,
    prefix,
    remarks,
    state_of,
    without_told_alert,
)
from tr11ops.watchdog.verdict import judge, seen_something

AT = "[2022-05-01 12:00:00] PULSE:"
NAME = "tr11-176B-ml"


def pulse(given: Snapshot, pause: str = "") -> tuple[State, int, list[str]]:
    findings = detect_all(given)
    verdict = judge(given, findings)
    reported = remarks(given, findings, verdict, pause)
    return (
        state_of(verdict, reported),
        verdict.exit_code,
        list(lines(given, verdict, reported, zone=UTC)),
    )


def job_line(job: Job) -> str:
    given = snapshot(jobs=(job,))
    verdict = judge(given, ())
    (line,) = lines(given, verdict, (), zone=UTC)
    return line


# -------------------------------------------------------------------------- the original's six rows
NODES = tuple(f"jean-zay-iam{number:02d}" for number in (1, 2, 3, 7))
ROWS = [
    (
        running(partition="gpu_p5", nodes=NODES, start_time=NOW - 29_109),
        f"{NAME} is running for 8:05:09 since 2022-05-01T03:54:51 "
        "(1000_7 on 'gpu_p5' partition (jean-zay-iam[01-03,07])",
    ),
    (
        pending((1, 2, 3), partition="gpu_p5", job_id="1528874_[1-3%1]"),
        f"{NAME} is waiting for the previous Job Array job to finish before scheduling a new one "
        "(1528874_[1-3%1] on 'gpu_p5' partition)",
    ),
    (
        pending((), partition="gpu_p5", reason="Dependency"),
        f"{NAME} is waiting for the previous job to finish before scheduling a new one using the dependency mechanism "
        "(1000 on 'gpu_p5' partition)",
    ),
    (
        pending((), partition="gpu_p5", reason="Priority"),
        f"{NAME} is waiting to be scheduled (1000 on 'gpu_p5' partition)",
    ),
    (
        pending((), partition="gpu_p5", reason="Resources", start_time=NOW + DAY + 3 * HOUR + 62),
        f"{NAME} is scheduled to start in 1 day, 3:01:02 (at 2022-05-02T15:01:02) (1000 on 'gpu_p5' partition)",
    ),
    (
        running(
            partition="gpu_p5", nodes=NODES[:1], state=JobState.COMPLETING, start_time=NOW - HOUR
        ),
        f"{NAME} is leaving its nodes, and was started (at 2022-05-01T11:00:00) (1000_7 on 'gpu_p5' partition) "
        "(jean-zay-iam01)",
    ),
    (
        running(
            partition="gpu_p5", nodes=NODES[:1], state=JobState.SUSPENDED, start_time=NOW - HOUR
        ),
        f"{NAME} is suspended, and was started (at 2022-05-01T11:00:00) (1000_7 on 'gpu_p5' partition) "
        "(jean-zay-iam01)",
    ),
]


@pytest.mark.parametrize(("job", "expected"), ROWS)
def test_each_row_of_the_original(job: Job, expected: str) -> None:
    assert job_line(job) == f"{AT} {expected}"


def test_the_summary_of_a_log_knows_every_pulse() -> None:
    """It took the lines of tasks that wait for another one for no state at all."""
    text = "".join(f"{job_line(job)}\n" for job, _ in ROWS[:5]).encode()
    assert summarise(CountingReader(text), len(text)).pulses == {
        "running": 1, "waiting for the previous task": 1, "waiting for a dependency": 1, "waiting to be scheduled": 1,
        "start is scheduled": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        (0.0, "0:00:00"),
        (18 * HOUR + 26 * 60 + 48, "18:26:48"),
        (3 * DAY, "3 days, 0:00:00"),
        (-30, "-1 day, 23:59:30"),
    ],
)
def test_the_time_until_a_start_is_written_as_before(delta: float, text: str) -> None:
    line = job_line(pending((), reason="Resources", start_time=NOW + delta))
    assert f"is scheduled to start in {text} (at " in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12, "0:12"), (188, "3:08"), (3723, "1:02:03"), (4 * DAY + 61, "4-00:01:01")],
)
def test_elapsed_times_are_squeues(seconds: float, text: str) -> None:
    assert f"is running for {text} since" in job_line(running(start_time=NOW - seconds))


def test_the_alert_is_the_originals() -> None:
    state, code, found = pulse(idle())
    assert (state, code) == (State.DOWN, 1)
    assert found == [
        f"{AT} ***ALERT: {NAME} is not RUNNING or SCHEDULED! Alert someone at Eng WG***"
    ]


def test_an_alert_that_the_log_ends_with_is_written_again_after_an_hour() -> None:
    told = (f"{prefix(NOW)} ***ALERT: ",)
    assert without_told_alert(told, told, NOW + HOUR) == ()
    assert without_told_alert(told, told, NOW + HOUR + 1) == told


def test_one_line_for_each_entry_of_the_queue_while_all_is_well() -> None:
    state, code, found = pulse(snapshot())
    assert (state, code, len(found)) == (State.RUNNING, 0, 2)
    assert all(line.startswith(f"{AT} {NAME} is ") for line in found)
    assert len(pulse(snapshot(jobs=(running(),)))[2]) == 1


# ---------------------------------------------------------------------------- what it could not see
SWITCH = KillSwitch("/scratch/tr11/kill-switch", "ana", NOW - 60, "a test")  # type: ignore[arg-type]
LOST_HOST: dict[str, Any] = {
    "nodes": tuple(
        Node(f"n{number:02d}", frozenset({"down" if number == 1 else "allocated"}))
        for number in range(1, 49)
    ),
    "attempts": (Attempt("1007", NOW - HOUR, None, nodes=("n01", "n02")),),
}
LOST_NODE = {"nodes": (Node("n02", frozenset({"down"})),)}
AWAY: dict[str, Any] = {
    "jobs": Unknown("squeue did not answer"),
    "nodes": Unknown("squeue did not answer"),
}
STATES = [
    ("held", idle(jobs=(pending((8, 9), reason="JobHeldUser"),)), "", State.HELD, 1, "is HELD: nothing trains: job 1000_[8-9%1] is held"),
    ("dead chain", idle(jobs=(pending((), reason="DependencyNeverSatisfied"),)), "", State.DEAD_CHAIN, 1, "is DEAD CHAIN: "),
    ("hung", snapshot(heartbeats=beats(age=9 * HOUR), steps=steps(age=9 * HOUR)), "", State.HUNG, 1, "is HUNG: job 1000_7 hangs"),
    ("half-dead", snapshot(**LOST_NODE), "", State.HALF_DEAD, 0, "is HALF-DEAD: job 1000_7 has lost n02"),
    ("half-dead host", snapshot(**LOST_HOST), "", State.HALF_DEAD, 1, "the allocation lives"),
    ("zombie", snapshot(**LOST_HOST, heartbeats=beats(age=HOUR), steps=steps(age=HOUR)), "", State.ZOMBIE, 1, "is ZOMBIE: "),
    ("away, alive", snapshot(**AWAY), "", State.CONTROLLER_AWAY, 0, "is CONTROLLER AWAY: training"),
    ("away, silent", idle(**AWAY, attempts=()), "", State.CONTROLLER_AWAY, 3, "is CONTROLLER AWAY: "),
    ("kill switch", idle(kill_switch=SWITCH), "", State.STOPPED, 0, "is STOPPED: the kill switch was set by ana"),
    ("kill switch, held", idle(kill_switch=SWITCH, jobs=(pending(reason="JobHeldUser"),)), "", State.STOPPED, 0, "is HELD: "),
    ("paused, held", idle(jobs=(pending(reason="JobHeldUser"),)), "ana", State.PAUSED, 1, "is HELD: "),
    ("paused", idle(), "ana (a test)", State.PAUSED, 1, "is PAUSED: paused by ana (a test)"),
    ("finished", idle(attempts=(ended("1007", reason="finished", iteration=31219),)), "", State.FINISHED, 0, "is FINISHED: "),
    ("unreadable", idle(attempts=Unknown("no access")), "", State.UNKNOWN, 3, "is UNKNOWN: nothing runs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "pause", "state", "code", "words"),
    [case[1:] for case in STATES],
    ids=[c[0] for c in STATES],
)
def test_each_state_has_its_word_its_line_and_its_exit_code(
    given: Snapshot, pause: str, state: State, code: int, words: str
) -> None:
    found, exit_code, texts = pulse(given, pause)
    assert (found, exit_code) == (state, code), texts
    assert any(words in line and line.startswith(f"{AT} {NAME} ") for line in texts), texts


def test_an_absent_controller_is_not_taken_for_an_empty_queue() -> None:
    for given in (snapshot(**AWAY), idle(**AWAY)):
        assert not any("ALERT" in line for line in pulse(given)[2])


def test_a_sign_of_life_goes_out_only_after_something_was_seen() -> None:
    for given, expected in (
        (snapshot(), True),
        (idle(), True),
        (snapshot(**AWAY), True),
        (idle(**AWAY, attempts=()), False),
    ):
        assert seen_something(given, judge(given, ())) is expected


def test_hostile_words_cannot_begin_a_line_or_move_the_cursor() -> None:
    reported = (Remark(State.HELD, "held\n[2022-05-01 12:00:00] PULSE: all is well\x1b[2J"),)
    given = snapshot(jobs=(running(job_id="1\n2"),))
    for line in lines(given, judge(given, ()), reported, ("done\rnothing",), UTC):
        assert line.startswith(AT) and line.isprintable()


def test_local_time_is_the_default() -> None:
    assert prefix(NOW, UTC) == AT and len(prefix(NOW)) == len(AT)
