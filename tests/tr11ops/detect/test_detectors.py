"""Each detector: when it speaks, how loudly, and when it must keep silent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tr11ops.detect.test_operation_detectors import OPERATION
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    checkpoints,
    ended,
    idle,
    pending,
    record,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect import registry, signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.rundir import Submission
from tr11ops.snapshot import Attempt, Checkpoint, KillSwitch, Snapshot, Step, Unknown

UNKNOWN = Unknown("the disk is away")
SWITCH = KillSwitch(snapshot().run.kill_switch, "ben", NOW - 600.0, "new data")


def found(given: Snapshot, detector: str) -> list[Finding]:
    return [finding for finding in registry.detect_all(given) if finding.detector == detector]


def severities(given: Snapshot, detector: str) -> list[str]:
    return [finding.severity.name for finding in found(given, detector)]


def test_a_healthy_run_has_no_findings() -> None:
    assert registry.detect_all(with_facts(snapshot(), total_iterations=32_000)) == ()


def nodes_with(states: dict[str, set[str]]) -> tuple[Node, ...]:
    return tuple(
        Node(f"n{number:02d}", frozenset(states.get(f"n{number:02d}", {"allocated"}))) for number in range(1, 49)
    )


def chained(job_id: str, left: int) -> Submission:
    return Submission("t", job_id, "slurm", NOW, "ana", "h", "r", "main", None, 48, "hash", chain="self", left=left)


def zombie(states: dict[str, set[str]], age: float, **changes: Any) -> Snapshot:
    """A running job whose attempt began on n01, n02, ..., with its nodes in these states and heartbeats so old."""
    attempt = Attempt("1007", NOW - HOUR, None, nodes=tuple(f"n{number:02d}" for number in range(1, 49)))
    return snapshot(
        jobs=(running(**changes),), attempts=(attempt,), nodes=nodes_with(states), heartbeats=beats(age=age), steps=()
    )


def with_steps(given: Snapshot) -> Snapshot:
    return dataclasses.replace(given, steps=steps(age=2 * HOUR))


# name, snapshot, detector, expected severities
TABLE: list[tuple[str, Snapshot, str, list[str]]] = [
    ("nothing anywhere", idle(), "down", ["CRITICAL"]),
    ("queued", idle(jobs=(pending(),)), "down", []),
    ("scheduler silent", idle(jobs=UNKNOWN), "down", []),
    ("attempts unreadable", idle(attempts=UNKNOWN), "down", []),
    ("kill switch unreadable", idle(kill_switch=UNKNOWN), "down", []),
    ("stopped by someone", idle(kill_switch=SWITCH), "down", []),
    ("finished", idle(attempts=(ended("1007", DAY, "finished", iteration=115311),)), "down", []),
    ("trains in the foreground", idle(heartbeats=beats(job_id="foreground-9")), "down", []),
    (
        "a foreground that fell silent",
        idle(heartbeats=beats(age=3 * HOUR, job_id="foreground-9")),
        "down",
        ["CRITICAL"],
    ),
    # hung, stalled
    ("training in time", snapshot(heartbeats=beats(age=17 * 60)), "hung", []),
    (
        "training too long ago",
        snapshot(heartbeats=beats(age=18 * 60), steps=steps(age=18 * 60)),
        "hung",
        ["CRITICAL"],
    ),
    ("a step is a sign of life too", snapshot(heartbeats=beats(age=18 * 60)), "hung", []),
    (
        "saving takes its time",
        snapshot(heartbeats=beats(age=50 * 60, phase="saving"), steps=steps(age=50 * 60)),
        "hung",
        [],
    ),
    (
        "evaluating",
        snapshot(heartbeats=beats(age=50 * 60, phase="evaluating"), steps=steps(age=50 * 60)),
        "hung",
        [],
    ),
    (
        "one rank still saves",
        snapshot(
            heartbeats=(*beats(age=30 * 60), *beats(age=30 * 60, phase="saving", ranks=1)), steps=steps(age=30 * 60)
        ),
        "hung",
        [],
    ),
    (
        "saving for ever",
        snapshot(heartbeats=beats(age=2 * HOUR, phase="saving"), steps=steps(age=2 * HOUR)),
        "hung",
        ["CRITICAL"],
    ),
    (
        "first step of an attempt",
        snapshot(heartbeats=beats(age=30 * 60), steps=steps(job_id="1006", age=DAY)),
        "hung",
        [],
    ),
    ("quick steps, short silence", snapshot(heartbeats=beats(age=100), steps=steps(age=100, pace=0.5)), "hung", []),
    (
        "quick steps, long silence",
        snapshot(heartbeats=beats(age=130), steps=steps(age=130, pace=0.5)),
        "hung",
        ["CRITICAL"],
    ),
    (
        "no life since the start",
        snapshot(heartbeats=beats(job_id="1006"), steps=steps(job_id="1006")),
        "stalled",
        ["CRITICAL"],
    ),
    (
        "just started",
        snapshot(jobs=(running(start_time=NOW - 60), pending()), heartbeats=beats(job_id="1006")),
        "stalled",
        [],
    ),
    ("heartbeats unreadable", snapshot(heartbeats=UNKNOWN, steps=()), "stalled", []),
    ("some heartbeats unreadable", snapshot(heartbeats=(), steps=(), doubts=("heartbeat 3.json: cut",)), "stalled", []),
    ("pending is not stalled", snapshot(jobs=(pending(),), heartbeats=beats(age=DAY)), "stalled", []),
    ("clock of the node ahead", snapshot(heartbeats=beats(age=-300)), "hung", []),
    # the nodes
    ("batch host down", snapshot(nodes=nodes_with({"n01": {"down", "not_responding"}})), "node-lost", ["CRITICAL"]),
    ("another node down", snapshot(nodes=nodes_with({"n07": {"down"}})), "node-lost", ["WARNING"]),
    ("draining is not lost", snapshot(nodes=nodes_with({"n07": {"allocated", "drain"}})), "node-lost", []),
    ("nodes unknown", snapshot(nodes=UNKNOWN), "node-lost", []),
    ("a job whose nodes are not told", snapshot(jobs=(running(nodes=()),), attempts=()), "node-lost", []),
    # an allocation without its batch script
    ("zombie", zombie({"n01": {"down"}}, age=300), "zombie", ["CRITICAL"]),
    ("its trainers live", zombie({"n01": {"down"}}, age=10), "zombie", []),
    ("at a known pace of 105 s", with_steps(zombie({"n01": {"down"}}, age=300)), "zombie", []),
    ("three steps of silence", with_steps(zombie({"n01": {"down"}}, age=320)), "zombie", ["CRITICAL"]),
    ("another node down", zombie({"n02": {"down"}}, age=300), "zombie", []),
    ("batch host out of the allocation", zombie({}, age=300, nodes=("n02", "n03")), "zombie", ["CRITICAL"]),
    # jobs
    ("suspended", snapshot(jobs=(running(state=JobState.SUSPENDED),)), "suspended", ["CRITICAL"]),
    ("two at once", snapshot(jobs=(running(), running(job_id="1001", raw_id="1001"))), "two-attempts", ["CRITICAL"]),
    (
        "one leaving, one running",
        snapshot(jobs=(running(state=JobState.COMPLETING), running(job_id="1001"))),
        "two-attempts",
        [],
    ),
    (
        "dependency can never be met",
        snapshot(jobs=(pending(reason="DependencyNeverSatisfied"),)),
        "dead-chain",
        ["CRITICAL"],
    ),
    ("waiting for the one before", snapshot(jobs=(pending(reason="Dependency"),)), "dead-chain", []),
    ("held, nothing runs", snapshot(jobs=(pending(reason="JobHeldUser"),)), "held", ["CRITICAL"]),
    ("held, one runs", snapshot(jobs=(running(), pending(reason="JobHeldAdmin"))), "held", ["WARNING"]),
    (
        "held, stopped by someone",
        snapshot(jobs=(pending(reason="JobHeldUser"),), kill_switch=SWITCH),
        "held",
        ["WARNING"],
    ),
    # what is over a limit, without its reservation, or waits for the site
    ("hours used up", idle(jobs=(pending(reason="AssocGrpCPUMinutesLimit"),)), "limit-reached", ["CRITICAL"]),
    (
        "hours used up, one runs",
        snapshot(jobs=(running(), pending(reason="QOSGrpNodeLimit"))),
        "limit-reached",
        ["WARNING"],
    ),
    ("more than a job may", idle(jobs=(pending(reason="AssocMaxNodePerJobLimit"),)), "limit-reached", ["CRITICAL"]),
    ("that is no dead chain", idle(jobs=(pending(reason="AssocMaxNodePerJobLimit"),)), "dead-chain", []),
    ("time limit lowered", idle(jobs=(pending(reason="PartitionTimeLimit"),)), "limit-reached", ["CRITICAL"]),
    (
        "over a limit, stopped",
        idle(jobs=(pending(reason="QOSGrpWallLimit"),), kill_switch=SWITCH),
        "limit-reached",
        ["WARNING"],
    ),
    (
        "reservation over",
        idle(jobs=(pending(reason="Reservation r1 was deleted", priority=0),)),
        "reservation-ended",
        ["CRITICAL"],
    ),
    ("reservation to come", idle(jobs=(pending(reason="Reservation"),)), "reservation-ended", []),
    ("partition down", idle(jobs=(pending(reason="PartitionDown"),)), "waits-for-site", ["WARNING"]),
    (
        "partition down, one runs",
        snapshot(jobs=(running(), pending(reason="PartitionDown"))),
        "waits-for-site",
        ["INFO"],
    ),
    (
        "maintenance",
        idle(jobs=(pending(reason="ReqNodeNotAvail, Reserved for maintenance"),)),
        "waits-for-site",
        ["WARNING"],
    ),
    ("closed is not dead", idle(jobs=(pending(reason="PartitionInactive"),)), "dead-chain", []),
    ("priority 0", idle(jobs=(pending(reason="Priority", priority=0),)), "held", ["CRITICAL"]),
    ("a reason of tomorrow", idle(jobs=(pending(reason="MoonInWrongPhase"),)), "held", ["CRITICAL"]),
    # the array's end
    ("last task runs", snapshot(jobs=(running(),)), "chain-end", ["WARNING"]),
    ("one task left", snapshot(jobs=(running(), pending((8,)))), "chain-end", ["WARNING"]),
    (
        "each job queues the next, three to come",
        snapshot(jobs=(running(), pending((8,))), submissions=(chained("1000", 3),)),
        "chain-end",
        [],
    ),
    ("two tasks left", snapshot(jobs=(running(), pending((8, 9)))), "chain-end", []),
    ("what is left is held", snapshot(jobs=(running(), pending(reason="JobHeldUser"))), "chain-end", ["WARNING"]),
    (
        "the last task is enough",
        with_facts(snapshot(jobs=(running(),), steps=(Step(record(115_300), NOW, "1007"),))),
        "chain-end",
        [],
    ),
    ("stopped by someone", snapshot(jobs=(running(),), kill_switch=SWITCH), "chain-end", []),
    ("nothing at all", idle(), "chain-end", []),
    # kill switch
    ("switch set, tasks queued", snapshot(jobs=(pending(),), kill_switch=SWITCH), "kill-switch-left-on", ["WARNING"]),
    ("switch set, nothing queued", idle(kill_switch=SWITCH), "kill-switch-left-on", []),
    (
        "switch set, runs on",
        snapshot(jobs=(running(),), kill_switch=dataclasses.replace(SWITCH, time=NOW - 2 * HOUR)),
        "kill-switch-left-on",
        ["CRITICAL"],
    ),
    ("switch not set", snapshot(), "kill-switch-left-on", []),
    ("switch unknown", snapshot(kill_switch=UNKNOWN), "kill-switch-left-on", []),
    # ends
    ("a set-up failed", idle(attempts=(ended("1007", reason="refused", launch=0),)), "start-failed", ["CRITICAL"]),
    ("the trainer refused", idle(attempts=(ended("1007", reason="refused", launch=1),)), "start-failed", []),
    ("the next attempt runs", snapshot(attempts=(ended("1007", reason="refused"),)), "start-failed", []),
    ("an older start failed", idle(attempts=(ended("1008"), ended("1007", 20 * HOUR, "refused"))), "start-failed", []),
    ("no word at the end", idle(attempts=(wordless("1007"), ended())), "unfinished-end", ["WARNING"]),
    ("an error", idle(attempts=(ended("1007", reason="error"), ended())), "unfinished-end", ["WARNING"]),
    (
        "twice in a row",
        idle(attempts=(wordless("1007"), wordless("1006", age=2 * HOUR))),
        "unfinished-end",
        ["CRITICAL"],
    ),
    ("older than a good end", idle(attempts=(ended("1007"), wordless("1006", age=DAY))), "unfinished-end", []),
    (
        "the next attempt went on",
        snapshot(attempts=(Attempt("1007", NOW - HOUR, None), wordless("1006", DAY))),
        "unfinished-end",
        ["INFO"],
    ),
    ("end unreadable", idle(attempts=(Attempt("1007", NOW, UNKNOWN),)), "unfinished-end", []),
    ("scheduler silent, no word", idle(jobs=UNKNOWN, attempts=(wordless("1007"),)), "unfinished-end", []),
    (
        "gone before it began",
        idle(
            jobs=(
                running(
                    raw_id="1008",
                    job_id="1000_8",
                    state=JobState.FAILED,
                    start_time=NOW - 70,
                    end_time=NOW - 60,
                    exit_code=127,
                ),
            )
        ),
        "unfinished-end",
        ["WARNING"],
    ),
    ("cancelled in the queue", idle(jobs=(pending(state=JobState.CANCELLED),)), "unfinished-end", []),
    # the training's own numbers
    ("loss is a number", snapshot(), "loss-not-finite", []),
    (
        "loss is not a number",
        snapshot(steps=(*steps(), Step(record(31220, lm_loss=math.nan), NOW))),
        "loss-not-finite",
        ["CRITICAL"],
    ),
    (
        "loss was not a number",
        snapshot(steps=(Step(record(31218, lm_loss=math.nan)), *steps(1))),
        "loss-not-finite",
        [],
    ),
    # checkpoints
    ("in time", snapshot(checkpoints=checkpoints(31_100)), "checkpoint-overdue", []),
    ("late", snapshot(checkpoints=checkpoints(31_000)), "checkpoint-overdue", ["WARNING"]),
    ("very late", snapshot(checkpoints=checkpoints(30_900)), "checkpoint-overdue", ["CRITICAL"]),
    (
        "never one",
        snapshot(checkpoints=checkpoints(steps=(), latest=None, examined=())),
        "checkpoint-overdue",
        ["CRITICAL"],
    ),
    ("late but nothing runs", idle(checkpoints=checkpoints(30_000)), "checkpoint-overdue", []),
    ("checkpoints unreadable", snapshot(checkpoints=UNKNOWN), "checkpoint-overdue", []),
    (
        "file cut short",
        snapshot(
            checkpoints=checkpoints(
                examined=(
                    Checkpoint(31_200, True, NOW, 1, "sizes", ("a.bin: 1 bytes",)),
                    Checkpoint(31_100, True, NOW, 1, "sizes"),
                )
            )
        ),
        "checkpoint-unsound",
        ["WARNING"],
    ),
    (
        "none is whole",
        snapshot(checkpoints=checkpoints(examined=(Checkpoint(31_200, False),))),
        "checkpoint-unsound",
        ["CRITICAL"],
    ),
    (
        "being saved",
        snapshot(
            heartbeats=beats(phase="saving"),
            checkpoints=checkpoints(examined=(Checkpoint(31_200, False), Checkpoint(31_100, True, NOW, 1, "sizes"))),
        ),
        "checkpoint-unsound",
        [],
    ),
    ("latest names nothing", snapshot(checkpoints=checkpoints(latest=9)), "checkpoint-unsound", ["WARNING"]),
    ("latest unreadable", snapshot(checkpoints=checkpoints(latest=UNKNOWN)), "checkpoint-unsound", []),
    # leaving
    ("just ended", snapshot(attempts=(ended("1007", age=60),)), "lingering", []),
    (
        "ended long ago",
        snapshot(attempts=(ended("1007", age=HOUR),), heartbeats=beats(age=HOUR, phase="ended")),
        "lingering",
        ["CRITICAL"],
    ),
    ("a new launch lives", snapshot(attempts=(ended("1007", age=HOUR),)), "lingering", []),
    # others
    ("a namesake", snapshot(namesakes=(running(job_id="77", user="eve"),)), "namesake", ["INFO"]),
    ("a namesake of long ago", snapshot(namesakes=(running(state=JobState.COMPLETED),)), "namesake", []),
]


@pytest.mark.parametrize(
    ("given_snapshot", "detector", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_table(given_snapshot: Snapshot, detector: str, expected: list[str]) -> None:
    assert severities(given_snapshot, detector) == expected


ELSEWHERE = {  # those of test_training_numbers.py, which need a course of steps, and of test_operation_detectors.py
    "slow", "slow-node", "loss-spike", "gradient-norm", "counters-jump", "log-not-growing",
    *(detector.NAME for detector in OPERATION),
}  # fmt: skip


def test_every_detector_speaks_somewhere_in_the_table() -> None:
    spoken = {finding.detector for row in TABLE for finding in registry.detect_all(row[1])}
    assert spoken >= {detector.NAME for detector in registry.DETECTORS} - ELSEWHERE


def test_the_slowest_ranks_are_named() -> None:
    ranks = (*beats(age=3 * HOUR, ranks=4), *beats(age=4 * HOUR, iteration=31200, ranks=1))
    (finding,) = found(snapshot(heartbeats=ranks, steps=steps(age=3 * HOUR)), "hung")
    assert finding.evidence[1] == "rank 0 on n01: training, iteration 31200, 4 h 00 min ago"


def test_the_first_cause_is_quoted() -> None:
    dead = running(state=JobState.FAILED, exit_code=143, derived_exit_code=134, end_time=NOW - 60)
    (finding,) = found(
        idle(jobs=(dead,), attempts=(wordless("1007", failure="rank 12 on n02: RuntimeError: NCCL"),)), "unfinished-end"
    )
    assert finding.evidence == (
        "1000_7: no end marker (FAILED, derived exit code 134, rank 12 on n02: RuntimeError: NCCL)",
    )


@pytest.mark.parametrize(
    ("scheduler", "card", "expected"),
    [
        ("slurm", "", ["scancel 1000_7", "tr11 resume"]),
        ("local", "my card.toml", ["", "tr11 resume --run 'my card.toml'"]),
    ],
)
def test_fixes_are_commands_for_this_run(scheduler: str, card: str, expected: list[str]) -> None:
    given = with_facts(
        snapshot(scheduler=scheduler, nodes=nodes_with({"n01": {"down"}}), kill_switch=SWITCH), card=card
    )
    assert [found(given, name)[0].fix for name in ("node-lost", "kill-switch-left-on")] == expected


def test_a_command_of_two_words_takes_the_card_after_both() -> None:
    given_snapshot = with_facts(snapshot(), card="my.toml")
    assert signs.command(given_snapshot, "nodes check n07") == "tr11 nodes check --run my.toml n07"
    assert signs.command(given_snapshot, "logs --rank 3") == "tr11 logs --run my.toml --rank 3"


def test_a_refused_submission_is_told() -> None:
    lost = Submission("t", None, "slurm", NOW, "ana", "h", "r", "main", "1-10", 48, "hash")
    (finding,) = found(idle(submissions=(lost,)), "down")
    assert "the scheduler never said whether it took submission t" in finding.evidence


@pytest.mark.parametrize(
    ("array", "scheduler", "reason", "typed"),
    [
        ("1-3%1", "slurm", "exit-duration", "tr11 launch --array 1-3"),
        (None, "slurm", "exit-duration", "tr11 launch"),
        ("1-3%1", "local", "kill-switch", "tr11 launch --array 1-3 --scheduler local"),
        ("1-3%1", "slurm", "refused", "tr11 logs"),
        ("1-3%1", "slurm", "error", "tr11 logs"),
    ],
)
def test_a_run_that_is_down_is_launched_as_before_or_looked_into(
    array: str | None, scheduler: str, reason: str, typed: str
) -> None:
    last = Submission("t", "1000", scheduler, NOW, "ana", "h", "r", "main", array, 48, "hash")
    (finding,) = found(idle(submissions=(last,), attempts=(ended("1007", DAY, reason),)), "down")
    assert finding.fix == typed


FIELDS = [
    "jobs", "nodes", "steps", "heartbeats", "attempts", "checkpoints", "kill_switch", "exclusions", "submissions", "phases",
    "events", "logs", "node_warnings", "periodic_jobs",
]  # fmt: skip


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(FIELDS)),
    later=st.floats(-DAY, 30 * DAY),
)
def test_detectors_survive_any_blindness(base: Snapshot, hidden: set[str], later: float) -> None:
    """Whatever is unknown, nothing is raised; and what is unknown is never reported as absent."""
    changes: dict[str, Any] = dict.fromkeys(hidden, UNKNOWN)
    seen = dataclasses.replace(base, time=base.time + later, **changes)
    findings = registry.detect_all(seen)
    assert [finding.severity for finding in findings] == sorted((f.severity for f in findings), reverse=True)
    if hidden & {"jobs", "kill_switch", "attempts"}:
        assert not [finding for finding in findings if finding.detector == "down"]
    if len(hidden) == len(FIELDS):
        assert {finding.detector for finding in findings} <= {"namesake"}


@given(st.integers(1, 200), st.floats(0.01, 1e4))
def test_the_pace_is_a_median(count: int, pace: float) -> None:
    given = list(steps(count, pace=pace))
    given[0] = Step(dataclasses.replace(given[0].record, seconds_per_iteration=pace * 1000 if count > 2 else pace))
    assert signs.seconds_per_iteration(snapshot(steps=tuple(given))) == pytest.approx(pace)


def test_queue_coverage_counts_what_will_really_train() -> None:
    given = snapshot(
        jobs=(running(), pending((8, 9)), pending((3,), reason="JobHeldUser"), running(state=JobState.COMPLETED))
    )
    assert signs.queue_coverage_seconds(given) == 359_400.0 - 12 * HOUR + 2 * 359_400.0
    assert signs.queue_coverage_seconds(snapshot(jobs=UNKNOWN)) is None


def test_severities_are_ordered() -> None:
    assert Severity.INFO < Severity.WARNING < Severity.CRITICAL
