"""A table of the detectors of jobs, nodes and training: what is seen, whose finding it is, how
severe.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    checkpoints,
    ended,
    idle,
    pending,
    record,
    running,
    snapshot,
    steps,
    with_facts,
    without_slow_node,
    wordless,
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect import registry
from tr11ops.detect.detector import Finding
from tr11ops.observe.observations import LaunchEnd, TrainingEvent, Validation
from tr11ops.observe.snapshot import Attempt, Checkpoint, KillSwitch, Snapshot, Step
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.rundir.paths import Submission
from tr11ops.trainers.levels import TrainerStanding
from trainer.contract.attempt import UnheldCheckpoint

FOREIGN = TrainerStanding("none", 2, "it cannot be asked", saves_when_asked=False)
UNKNOWN = Unknown("the disk is unreachable")
HIDDEN = "/scratch/run holds no record of any launch, but job 1000 was queued from it"


ELSEWHERE = pending((), job_id="2000", raw_id="2000", array_id=None, partition="other")
SWITCH = KillSwitch(snapshot().run.kill_switch, "ben", NOW - 600.0, "new data")


def nodes_with(states: dict[str, set[str]]) -> tuple[Node, ...]:
    return tuple(
        Node(f"n{number:02d}", frozenset(states.get(f"n{number:02d}", {"allocated"})))
        for number in range(1, 49)
    )


FIFTY = tuple(f"n{number:02d}" for number in range(1, 51))
BEGAN_WITH_TWO = replace(wordless("1007"), nodes=FIFTY)  # spares, as an attempt trains on 48


def spared(*down: str, **changes: Any) -> Snapshot:
    """An attempt with two spare nodes, of whose nodes these are down."""
    base = snapshot(
        jobs=(running(nodes=FIFTY, node_count=50), pending()),
        nodes=tuple(Node(name, frozenset({"down" if name in down else "allocated"})) for name in FIFTY),
        attempts=(BEGAN_WITH_TWO,),
    )  # fmt: skip
    return changed(base, **changes)


def chained(job_id: str, left: int) -> Submission:
    return Submission(
        "t",
        job_id,
        "slurm",
        NOW,
        "ana",
        "h",
        "r",
        "main",
        None,
        48,
        "hash",
        chain="self",
        left=left,
    )


def zombie(states: dict[str, set[str]], age: float, **changes: Any) -> Snapshot:
    """A running job whose attempt began on n01, n02, ..., with its nodes in these states and
    heartbeats so old.
    """
    attempt = Attempt(
        "1007", NOW - HOUR, None, nodes=tuple(f"n{number:02d}" for number in range(1, 49))
    )
    return snapshot(
        jobs=(running(**changes),),
        attempts=(attempt,),
        nodes=nodes_with(states),
        heartbeats=beats(age=age),
        steps=(),
    )


def beside(age: float) -> tuple[Job, Job]:
    """The next task of the array, which began so long ago, beside the one that trains."""
    return running(), running(job_id="1000_8", raw_id="1008", task_id=8, start_time=NOW - age)


def with_steps(given: Snapshot) -> Snapshot:
    return replace(given, steps=steps(age=2 * HOUR))


# launches that began from a whole checkpoint failed twice at one step; a later save ends the doubt
FAILING = (
    LaunchEnd(
        "1007",
        1,
        NOW,
        "rank 3 died",
        failing_checks={"script:fans.sh": "script:fans.sh failed on n[01-48]"},
    ),
)
DOUBTED = (
    LaunchEnd(
        "1007", 2, NOW, "NaN", "again", reached=20_004, began_at=20_000, older_checkpoint=19_500
    ),
)
NOT_YET = (
    LaunchEnd(
        "1007", 2, NOW - 90 * DAY, "NaN", "again", reached=10**6, began_at=2, older_checkpoint=1
    ),
)
OVERCOME = (
    LaunchEnd("1007", 2, NOW - 90 * DAY, "NaN", "again", reached=4, began_at=2, older_checkpoint=1),
)

FAILED = (
    TrainingEvent(
        "save-failed", NOW, "1007", {"step": 31_200, "why": "EIO", "node": "n2", "said": "n2 alone"}
    ),
)

RISEN = tuple(
    Validation("valid", 1000 * place, 2.0 + 0.1 * place, NOW - DAY + place) for place in (1, 2, 3)
)

# name, snapshot, detector, expected severities
TABLE: list[tuple[str, Snapshot, str, list[str]]] = [
    ("nothing anywhere", idle(), "down", ["CRITICAL"]),
    (
        "evaluations rise",
        changed(snapshot(), validations=RISEN),
        "validation-loss-rises",
        ["WARNING"],
    ),
    ("one rise", changed(snapshot(), validations=RISEN[:2]), "validation-loss-rises", []),
    ("queued", idle(jobs=(pending(),)), "down", []),
    (
        "a limit as in the card",
        with_facts(snapshot(), exit_plan=ExitPlan(None, limit=100 * HOUR)),
        "limit-changed",
        [],
    ),
    (
        "a shorter limit",
        with_facts(snapshot(), exit_plan=ExitPlan(None, limit=101 * HOUR)),
        "limit-changed",
        ["WARNING"],
    ),
    (
        "a longer limit",
        with_facts(snapshot(), exit_plan=ExitPlan(None, limit=99 * HOUR)),
        "limit-changed",
        ["INFO"],
    ),
    (
        "another directory, queued",
        idle(jobs=(pending(),), unmounted=HIDDEN),
        "directory-unseen",
        ["CRITICAL"],
    ),
    ("another directory, running", snapshot(unmounted=HIDDEN), "directory-unseen", ["WARNING"]),
    (
        "another directory, and no word of the scheduler",
        idle(jobs=UNKNOWN, unmounted=HIDDEN),
        "directory-unseen",
        [],
    ),
    (
        "another directory, held",
        idle(jobs=(pending(reason="JobHeldUser"),), unmounted=HIDDEN),
        "held",
        [],
    ),
    ("the run's directory", idle(jobs=(pending(),)), "directory-unseen", []),
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
    ("the log cannot be read, the heartbeats can", idle(steps=UNKNOWN), "down", ["CRITICAL"]),
    ("no heartbeat, and the log cannot be read", idle(steps=UNKNOWN, heartbeats=()), "down", []),
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
            heartbeats=(*beats(age=30 * 60), *beats(age=30 * 60, phase="saving", ranks=1)),
            steps=steps(age=30 * 60),
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
    (
        "quick steps, short silence",
        snapshot(heartbeats=beats(age=100), steps=steps(age=100, pace=0.5)),
        "hung",
        [],
    ),
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
    (
        "some heartbeats unreadable",
        snapshot(heartbeats=(), steps=(), read_errors=("heartbeat 3.json: cut",)),
        "stalled",
        [],
    ),
    (
        "pending is not stalled",
        snapshot(jobs=(pending(),), heartbeats=beats(age=DAY), steps=steps(age=DAY)),
        "stalled",
        [],
    ),
    ("clock of the node ahead", snapshot(heartbeats=beats(age=-300)), "hung", []),
    # the nodes
    (
        "batch host down",
        snapshot(nodes=nodes_with({"n01": {"down", "not_responding"}})),
        "node-lost",
        ["CRITICAL"],
    ),
    ("another node down", snapshot(nodes=nodes_with({"n07": {"down"}})), "node-lost", ["WARNING"]),
    (
        "draining is not lost",
        snapshot(nodes=nodes_with({"n07": {"allocated", "drain"}})),
        "node-lost",
        [],
    ),
    (
        "failing is not lost",
        snapshot(nodes=nodes_with({"n01": {"allocated", "fail"}})),
        "node-lost",
        [],
    ),
    (
        "a silent host may live",
        snapshot(nodes=nodes_with({"n01": {"mixed", "not_responding"}})),
        "node-lost",
        ["WARNING"],
    ),
    (
        "powered down",
        snapshot(nodes=nodes_with({"n01": {"idle", "powered_down"}})),
        "node-lost",
        ["CRITICAL"],
    ),
    ("a controller just begun", snapshot(nodes=nodes_with({"n01": {"unknown"}})), "node-lost", []),
    ("nodes unknown", snapshot(nodes=UNKNOWN), "node-lost", []),
    (
        "a job whose nodes are not told",
        snapshot(jobs=(running(nodes=()),), attempts=()),
        "node-lost",
        [],
    ),
    ("a spare is left", spared("n07"), "no-spare", []),
    ("the last spare is gone", spared("n07", "n50"), "no-spare", ["INFO"]),
    # health checks
    ("a check fails everywhere", snapshot(launch_ends=FAILING), "check-failing", ["WARNING"]),
    (
        "of another attempt",
        snapshot(launch_ends=(LaunchEnd("999", 1, NOW, failing_checks={"fans": ""}),)),
        "check-failing",
        [],
    ),
    ("nothing runs", idle(launch_ends=FAILING), "check-failing", []),
    (
        "all checks are made",
        snapshot(launch_ends=(LaunchEnd("1007", 1, NOW, "rank 3 died"),)),
        "check-failing",
        [],
    ),
    ("launches unknown", snapshot(launch_ends=UNKNOWN), "check-failing", []),
    # an allocation without its batch script
    ("zombie", zombie({"n01": {"down"}}, age=300), "zombie", ["CRITICAL"]),
    ("its trainers live", zombie({"n01": {"down"}}, age=10), "zombie", []),
    ("at a known pace of 105 s", with_steps(zombie({"n01": {"down"}}, age=300)), "zombie", []),
    (
        "three steps of silence",
        with_steps(zombie({"n01": {"down"}}, age=320)),
        "zombie",
        ["CRITICAL"],
    ),
    ("another node down", zombie({"n02": {"down"}}, age=300), "zombie", []),
    (
        "batch host out of the allocation",
        zombie({}, age=300, nodes=("n02", "n03")),
        "zombie",
        ["CRITICAL"],
    ),
    # jobs
    ("suspended", snapshot(jobs=(running(state=JobState.SUSPENDED),)), "suspended", ["CRITICAL"]),
    (
        "two at once",
        snapshot(jobs=(running(), running(job_id="1001", raw_id="1001"))),
        "two-attempts",
        ["CRITICAL"],
    ),
    ("the next task beside its array's", snapshot(jobs=beside(age=60)), "two-attempts", []),
    ("it has not left", snapshot(jobs=beside(age=130)), "two-attempts", ["CRITICAL"]),
    (
        "it trains",
        snapshot(jobs=beside(age=60), heartbeats=(*beats(), *beats(job_id="1008"))),
        "two-attempts",
        ["CRITICAL"],
    ),
    ("trainers unknown", snapshot(jobs=beside(age=60), heartbeats=UNKNOWN), "two-attempts", []),
    (
        "it stays, trainers unknown",
        snapshot(jobs=beside(age=130), heartbeats=UNKNOWN),
        "two-attempts",
        ["CRITICAL"],
    ),
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
    (
        "waiting for the one before",
        snapshot(jobs=(pending(reason="Dependency"),)),
        "dead-chain",
        [],
    ),
    ("held, nothing runs", snapshot(jobs=(pending(reason="JobHeldUser"),)), "held", ["CRITICAL"]),
    (
        "held, all is trained",
        idle(
            jobs=(pending(reason="JobHeldUser"),),
            attempts=(ended("1007", 60.0, "finished", iteration=115311),),
        ),
        "held",
        ["INFO"],
    ),
    (
        "held, one runs",
        snapshot(jobs=(running(), pending(reason="JobHeldAdmin"))),
        "held",
        ["WARNING"],
    ),
    (
        "held, stopped by someone",
        snapshot(jobs=(pending(reason="JobHeldUser"),), kill_switch=SWITCH),
        "held",
        ["WARNING"],
    ),
    # what is over a limit, without its reservation, or waits for the site
    (
        "hours used up",
        idle(jobs=(pending(reason="AssocGrpCPUMinutesLimit"),)),
        "limit-reached",
        ["CRITICAL"],
    ),
    (
        "hours used up, one runs",
        snapshot(jobs=(running(), pending(reason="QOSGrpWallLimit"))),
        "limit-reached",
        ["WARNING"],
    ),
    (
        "others use what is allowed",
        idle(jobs=(pending(reason="AssocGrpNodeLimit"),)),
        "limit-reached",
        [],
    ),
    (
        "more than a job may",
        idle(jobs=(pending(reason="AssocMaxNodePerJobLimit"),)),
        "limit-reached",
        ["CRITICAL"],
    ),
    (
        "that is no dead chain",
        idle(jobs=(pending(reason="AssocMaxNodePerJobLimit"),)),
        "dead-chain",
        [],
    ),
    (
        "time limit lowered",
        idle(jobs=(pending(reason="PartitionTimeLimit"),)),
        "limit-reached",
        ["CRITICAL"],
    ),
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
    (
        "partition down",
        idle(jobs=(pending(reason="PartitionDown"),)),
        "waits-for-site",
        ["CRITICAL"],
    ),
    (
        "partition down, one runs",
        snapshot(jobs=(running(), pending(reason="PartitionDown"))),
        "waits-for-site",
        ["WARNING"],
    ),
    (
        "partition down, one runs, the kill switch is set",
        snapshot(jobs=(running(), pending(reason="PartitionDown")), kill_switch=SWITCH),
        "waits-for-site",
        ["INFO"],
    ),
    (
        "partition down, one runs, another is queued elsewhere",
        snapshot(jobs=(running(), pending(reason="PartitionDown"), ELSEWHERE)),
        "waits-for-site",
        ["INFO"],
    ),
    (
        "maintenance to come, one runs",
        snapshot(jobs=(running(), pending(reason="ReqNodeNotAvail, Reserved for maintenance"))),
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
    (
        "a reason of tomorrow",
        idle(jobs=(pending(reason="MoonInWrongPhase"),)),
        "held",
        ["CRITICAL"],
    ),
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
    (
        "what is left is held",
        snapshot(jobs=(running(), pending(reason="JobHeldUser"))),
        "chain-end",
        ["WARNING"],
    ),
    (
        "the last task is enough",
        with_facts(snapshot(jobs=(running(),), steps=(Step(record(115_300), NOW, "1007"),))),
        "chain-end",
        [],
    ),
    ("stopped by someone", snapshot(jobs=(running(),), kill_switch=SWITCH), "chain-end", []),
    (
        "the last task leaves: nothing can be queued behind it any more",
        snapshot(
            jobs=(running(),),
            launch_ends=(
                LaunchEnd("1007", 1, NOW, "n48 was lost", "ending this task", is_last=True),
            ),
            heartbeats=beats(phase="ended"),
        ),
        "chain-end",
        [],
    ),
    (
        "the last task is being ended",
        snapshot(jobs=(running(state=JobState.COMPLETING),)),
        "chain-end",
        [],
    ),
    ("a new attempt on other nodes has not stepped", without_slow_node(0), "chain-end", []),
    ("it has shown its speed", without_slow_node(3), "chain-end", ["WARNING"]),
    ("nothing at all", idle(), "chain-end", []),
    # kill switch
    (
        "switch set, tasks queued",
        snapshot(jobs=(pending(),), kill_switch=SWITCH),
        "kill-switch-left-on",
        ["WARNING"],
    ),
    (
        "switch set a moment ago, the hold of what is queued not seen yet",
        idle(kill_switch=replace(SWITCH, time=NOW - 5.0), jobs=(pending(),)),
        "kill-switch-left-on",
        [],
    ),
    ("switch set, nothing queued", idle(kill_switch=SWITCH), "kill-switch-left-on", []),
    (
        "switch set, runs on",
        snapshot(jobs=(running(),), kill_switch=replace(SWITCH, time=NOW - 2 * HOUR)),
        "kill-switch-left-on",
        ["CRITICAL"],
    ),
    ("switch not set", snapshot(), "kill-switch-left-on", []),
    ("switch unknown", snapshot(kill_switch=UNKNOWN), "kill-switch-left-on", []),
    # ends
    (
        "a set-up failed",
        idle(attempts=(ended("1007", reason="refused", launch=0),)),
        "start-failed",
        ["CRITICAL"],
    ),
    (
        "the trainer refused",
        idle(attempts=(ended("1007", reason="refused", launch=1),)),
        "start-failed",
        [],
    ),
    (
        "the next attempt runs",
        snapshot(attempts=(ended("1007", reason="refused"),)),
        "start-failed",
        [],
    ),
    (
        "the next job has its nodes, and no attempt of it has begun",
        snapshot(
            jobs=(running(raw_id="1008", job_id="1000_8", task_id=8),),
            attempts=(ended("1007", reason="refused", launch=0),),
        ),
        "start-failed",
        ["WARNING"],
    ),
    (
        "an older start failed",
        idle(attempts=(ended("1008"), ended("1007", 20 * HOUR, "refused"))),
        "start-failed",
        [],
    ),
    (
        "no word at the end",
        idle(attempts=(wordless("1007"), ended())),
        "unfinished-end",
        ["WARNING"],
    ),
    (
        "an error",
        idle(attempts=(ended("1007", reason="error"), ended())),
        "unfinished-end",
        ["WARNING"],
    ),
    (
        "twice in a row",
        idle(attempts=(wordless("1007"), wordless("1006", age=2 * HOUR))),
        "unfinished-end",
        ["CRITICAL"],
    ),
    (
        "older than a good end",
        idle(attempts=(ended("1007"), wordless("1006", age=DAY))),
        "unfinished-end",
        [],
    ),
    (
        "the next attempt went on",
        snapshot(attempts=(Attempt("1007", NOW - HOUR, None), wordless("1006", DAY))),
        "unfinished-end",
        [],
    ),
    ("end unreadable", idle(attempts=(Attempt("1007", NOW, UNKNOWN),)), "unfinished-end", []),
    (
        "scheduler silent, no word",
        idle(jobs=UNKNOWN, attempts=(wordless("1007"),)),
        "unfinished-end",
        [],
    ),
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
    (
        "cancelled in the queue",
        idle(jobs=(pending(state=JobState.CANCELLED),)),
        "unfinished-end",
        [],
    ),
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
    (
        "a save failed since",
        snapshot(checkpoints=checkpoints(31_100), events=FAILED),
        "checkpoint-overdue",
        ["WARNING"],
    ),
    (
        "and is over",
        snapshot(checkpoints=checkpoints(31_100, age=-9.0), events=FAILED),
        "checkpoint-overdue",
        [],
    ),
    (
        "saved in another trainer's folder, and not held yet",
        with_facts(
            snapshot(
                checkpoints=checkpoints(30_900),
                heartbeats=tuple(
                    replace(one, saved=UnheldCheckpoint(31_100, NOW - 60.0)) for one in beats()
                ),
            ),
            standing=FOREIGN,
        ),
        "checkpoint-overdue",
        [],
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
            checkpoints=checkpoints(
                examined=(Checkpoint(31_200, False), Checkpoint(31_100, True, NOW, 1, "sizes"))
            ),
        ),
        "checkpoint-unsound",
        [],
    ),
    ("a whole one is doubted", snapshot(launch_ends=DOUBTED), "checkpoint-unsound", ["INFO"]),
    (
        "it is saved again, below where it ended",
        snapshot(launch_ends=NOT_YET),
        "checkpoint-unsound",
        ["INFO"],
    ),
    ("a doubted one is saved again", snapshot(launch_ends=OVERCOME), "checkpoint-unsound", []),
    (
        "latest names nothing",
        snapshot(checkpoints=checkpoints(latest=9)),
        "checkpoint-unsound",
        ["WARNING"],
    ),
    (
        "latest unreadable",
        snapshot(checkpoints=checkpoints(latest=UNKNOWN)),
        "checkpoint-unsound",
        [],
    ),
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
    (
        "a namesake of long ago",
        snapshot(namesakes=(running(state=JobState.COMPLETED),)),
        "namesake",
        [],
    ),
]


def found(given: Snapshot, detector: str) -> list[Finding]:
    """The findings of one detector, whatever the others say."""
    return [finding for finding in registry.detect_all(given) if finding.detector == detector]


def severities(given: Snapshot, detector: str) -> list[str]:
    return [finding.severity.name for finding in found(given, detector)]
