"""A table of verdicts: what is seen, the word, and a part of the reason."""

from __future__ import annotations

import math

from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    beats,
    changed,
    ended,
    idle,
    pending,
    record,
    running,
    slowed,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import JobState, Node
from tr11ops.observe.observations import LaunchEnd
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot, Step
from tr11ops.trainers.levels import TrainerStanding
from tr11ops.watchdog.verdict import VerdictWord

AWAY = Unknown("squeue did not answer within 10 s")


NODES = tuple(f"n{number:02d}" for number in range(1, 49))


SWITCH = KillSwitch(snapshot().run.kill_switch, "ben", NOW - 600.0, "new data")


CANNOT_BE_ASKED = TrainerStanding("none", 2, "it cannot be asked", saves_when_asked=False)


FINISHED = ended("1007", 60.0, "finished", iteration=115311)


REFUSED = ended("1007", 60.0, "refused", message="data.prefixes: no such file")


# a running job whose trainer has failed a moment ago: nothing is queued behind it
FAILED = ended("1007", 8.0, "error", message="rank 3 died")
AGAIN = LaunchEnd(
    "1007", 1, NOW - 6.0, "n02: lost", "starting again: without n02; n49 takes its place"
)
LAST = LaunchEnd(
    "1007", 1, NOW - 6.0, "n02: lost", "ending this task: no spare node is left", is_last=True
)
BETWEEN = snapshot(
    jobs=(running(),), attempts=(FAILED,), heartbeats=beats(8.0, "ended"), steps=steps(age=12.0)
)


# name, snapshot, word, a part of the sentence
TABLE: list[tuple[str, Snapshot, VerdictWord, str]] = [
    (
        "trains",
        snapshot(),
        VerdictWord.HEALTHY,
        "job 1000_7 on 48 nodes: training at iteration 31219, last sign of life 20 s ago",
    ),
    (
        "trains on what is no number",
        snapshot(steps=(*steps(), Step(record(31220, lm_loss=math.nan), NOW))),
        VerdictWord.AT_RISK,
        "the loss is not a number",
    ),
    ("is slow", slowed(), VerdictWord.SLOW, "n02 holds the others back (its rank 1 computes"),
    ("saves", snapshot(heartbeats=beats(phase="saving", age=900)), VerdictWord.HEALTHY, "saving"),
    ("loads", snapshot(heartbeats=beats(phase="loading")), VerdictWord.STARTING, "loading"),
    (
        "gets nodes",
        snapshot(jobs=(running(state=JobState.CONFIGURING),), heartbeats=(), steps=()),
        VerdictWord.STARTING,
        "gets its nodes",
    ),
    (
        "no sign yet",
        snapshot(jobs=(running(start_time=NOW - 90),), heartbeats=(), steps=()),
        VerdictWord.STARTING,
        "has started; no sign of life yet",
    ),
    (
        "no sign for long",
        snapshot(heartbeats=(), steps=()),
        VerdictWord.STALLED,
        "held its nodes for 12 h 00 min",
    ),
    (
        "hangs",
        snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR)),
        VerdictWord.STALLED,
        "no sign of life for 1 h 00 min",
    ),
    (
        "zombie",
        snapshot(nodes=(Node("n01", frozenset({"down"})),)),
        VerdictWord.STALLED,
        "which ran its batch script",
    ),
    (
        "a spare node down",
        snapshot(nodes=(Node("n09", frozenset({"down"})),)),
        VerdictWord.HEALTHY,
        "training",
    ),
    (
        "the batch host has left the job, its trainers are just silent",
        snapshot(
            jobs=(running(nodes=NODES[1:]),),
            attempts=(Attempt("1007", NOW - HOUR, None, nodes=NODES),),
        ),
        VerdictWord.STALLED,
        "job 1000_7 has lost n01, which ran its batch script",
    ),
    (
        "the workers have ended, what follows is not seen yet",
        snapshot(attempts=(), heartbeats=beats(phase="ended", age=20), steps=steps(age=25)),
        VerdictWord.STARTING,
        "its workers have ended at iteration 31219 without a word",
    ),
    (
        "the workers have ended, and no one hears of the batch host",
        snapshot(
            heartbeats=beats(phase="ended", age=20),
            steps=steps(age=25),
            attempts=(Attempt("1007", NOW - HOUR, None, nodes=NODES),),
            nodes=(Node("n01", frozenset({"allocated", "not_responding"})),),
        ),
        VerdictWord.UNKNOWN,
        "n01, which runs its batch script, does not answer the scheduler, so that nothing may start them again",
    ),
    (
        "the workers have ended, and nothing follows",
        snapshot(attempts=(), heartbeats=beats(phase="ended", age=40), steps=steps(age=45)),
        VerdictWord.STALLED,
        "its workers have ended at iteration 31219 without a word, last sign of life 40 s ago",
    ),
    (
        "the trainer has failed, and the batch controller starts it again",
        changed(BETWEEN, launch_ends=(AGAIN,)),
        VerdictWord.STARTING,
        "job 1000_7 on 48 nodes: starting again: without n02; n49 takes its place",
    ),
    (
        "the trainer has failed, and the batch controller still looks why",
        BETWEEN,
        VerdictWord.STARTING,
        "its workers have ended (error: rank 3 died), and may be started again",
    ),
    (
        "the trainer has failed, and the batch controller gives up",
        changed(BETWEEN, launch_ends=(LAST,)),
        VerdictWord.DOWN,
        "job 1000_7 is leaving its nodes (error) and nothing is queued behind it",
    ),
    (
        "workers were killed, and the batch controller gives up",
        changed(BETWEEN, attempts=(), heartbeats=beats(8.0), launch_ends=(LAST,)),
        VerdictWord.DOWN,
        "is leaving its nodes (ending this task: no spare node is left) and nothing is queued",
    ),
    (
        "the trainer has failed, and the attempt has let nothing follow",
        changed(BETWEEN, attempts=(replace(FAILED, cause="software", held_because="software"),)),
        VerdictWord.DOWN,
        "nothing is queued behind it",
    ),
    (
        "the trainer has failed, and its batch host is gone",
        changed(
            BETWEEN,
            attempts=(replace(FAILED, nodes=NODES),),
            nodes=(Node("n01", frozenset({"down"})),),
        ),
        VerdictWord.STALLED,
        "which ran its batch script",
    ),
    (
        "suspended",
        snapshot(jobs=(running(state=JobState.SUSPENDED),)),
        VerdictWord.STALLED,
        "suspended",
    ),
    (
        "two at once",
        snapshot(jobs=(running(), running(job_id="1001", raw_id="1001"))),
        VerdictWord.STALLED,
        "2 jobs",
    ),
    (
        "stays after its end",
        snapshot(attempts=(ended("1007", HOUR),), heartbeats=beats(HOUR, "ended")),
        VerdictWord.STALLED,
        "still holds",
    ),
    (
        "leaves, next one waits",
        snapshot(attempts=(ended("1007", 5.0),), heartbeats=beats(5.0, "ended")),
        VerdictWord.QUEUED,
        "comes next",
    ),
    (
        "leaves, nothing waits",
        snapshot(jobs=(running(state=JobState.COMPLETING),)),
        VerdictWord.DOWN,
        "nothing is queued behind",
    ),
    (
        "leaves, finished",
        snapshot(attempts=(FINISHED,), heartbeats=beats(70.0, "ended")),
        VerdictWord.FINISHED,
        "leaving its nodes",
    ),
    (
        "leaves, stopped",
        snapshot(
            attempts=(ended("1007", 5.0, "kill-switch"),),
            heartbeats=beats(9.0, "ending"),
            kill_switch=SWITCH,
        ),
        VerdictWord.STOPPING,
        "the kill switch was set by ben (new data); it has saved at iteration 30800; job 1000_7 is leaving",
    ),
    (
        "is being stopped",
        snapshot(kill_switch=SWITCH),
        VerdictWord.STOPPING,
        "is saving and leaving",
    ),
    (
        "is being stopped, and cannot be asked to save",
        with_facts(snapshot(kill_switch=SWITCH), standing=CANNOT_BE_ASKED),
        VerdictWord.STOPPING,
        "job 1000_7 on 48 nodes leaves after its next checkpoint",
    ),
    (
        "ignores the switch",
        snapshot(kill_switch=replace(SWITCH, time=NOW - 2 * HOUR)),
        VerdictWord.STALLED,
        "still runs",
    ),
    (
        "runs, cannot be seen",
        snapshot(heartbeats=Unknown("no rights"), steps=()),
        VerdictWord.UNKNOWN,
        "no rights",
    ),
    (
        "logs steps, the rest unseen",
        snapshot(heartbeats=Unknown("no rights")),
        VerdictWord.HEALTHY,
        "training at iteration",
    ),
    (
        "logged steps an hour ago, the rest unseen",
        snapshot(heartbeats=Unknown("no rights"), steps=steps(age=HOUR)),
        VerdictWord.UNKNOWN,
        "last sign of life 1 h 00 min ago, and more cannot be seen: no rights",
    ),
    (
        "runs, start not known",
        snapshot(jobs=(running(start_time=None),), heartbeats=(), steps=()),
        VerdictWord.UNKNOWN,
        "not known",
    ),
    (
        "paused, nothing waits",
        idle(jobs=(), pause=SWITCH),
        VerdictWord.STOPPED,
        "the run was paused by ben (new data)",
    ),
    (
        "paused, the rest is held",
        idle(jobs=(pending(reason="JobHeldUser"),), pause=SWITCH),
        VerdictWord.STOPPED,
        "the run was paused by ben (new data); what is queued is held",
    ),
    (
        "paused, trains to its limit",
        snapshot(pause=SWITCH),
        VerdictWord.HEALTHY,
        "training at iteration",
    ),
    (
        "queued",
        idle(jobs=(pending(),)),
        VerdictWord.QUEUED,
        "job 1000_[8-10%1] (3 tasks) waits: JobArrayTaskLimit",
    ),
    (
        "held",
        idle(jobs=(pending(reason="JobHeldUser"),)),
        VerdictWord.DOWN,
        "3 tasks of job 1000 are held",
    ),
    (
        "dead chain",
        idle(jobs=(pending(reason="DependencyNeverSatisfied"),)),
        VerdictWord.DOWN,
        "DependencyNeverSatisfied",
    ),
    (
        "hours used up",
        idle(jobs=(pending(reason="AssocGrpCPUMinutesLimit"),)),
        VerdictWord.DOWN,
        "granted time is used up",
    ),
    (
        "reservation over",
        idle(jobs=(pending(reason="ReservationDeleted", priority=0),)),
        VerdictWord.DOWN,
        "reservation has ended",
    ),
    (
        "priority 0",
        idle(jobs=(pending(reason="Resources", priority=0),)),
        VerdictWord.DOWN,
        "its priority is 0",
    ),
    (
        "a reason of tomorrow",
        idle(jobs=(pending(reason="MoonPhase"),)),
        VerdictWord.DOWN,
        "MoonPhase: tr11 does not know",
    ),
    (
        "maintenance",
        idle(jobs=(pending(reason="PartitionInactive"),)),
        VerdictWord.QUEUED,
        "waits for the site: PartitionInact",
    ),
    (
        "others use what is allowed",
        idle(jobs=(pending(reason="AssocGrpNodeLimit"),)),
        VerdictWord.QUEUED,
        "AssocGrpNodeLimit: its account, QoS or user may not have so much at one time",
    ),
    (
        "what waits behind a blocked job is blocked",
        idle(
            jobs=(
                pending(
                    (),
                    reason="Dependency",
                    raw_id="3",
                    job_id="3",
                    array_id=None,
                    dependency="afterany:2(unfulfilled)",
                ),
                pending(
                    (),
                    reason="Dependency",
                    raw_id="2",
                    job_id="2",
                    array_id=None,
                    dependency="afterany:1(unfulfilled)",
                ),
                pending((), reason="AssocGrpWallLimit", raw_id="1", job_id="1", array_id=None),
            )
        ),
        VerdictWord.DOWN,
        "job 1 waits for a person (AssocGrpWallLimit",
    ),
    (
        "one held, one waits",
        idle(jobs=(pending(reason="JobHeldUser"), pending((), reason="Priority"))),
        VerdictWord.QUEUED,
        "Priority",
    ),
    (
        "queued but stopped",
        idle(jobs=(pending(),), kill_switch=SWITCH),
        VerdictWord.STOPPED,
        "will leave at once",
    ),
    (
        "stopped a moment ago, seen in an answer from before the hold",
        idle(jobs=(pending(),), kill_switch=replace(SWITCH, time=NOW - 5.0)),
        VerdictWord.STOPPED,
        "what is queued is being held",
    ),
    (
        "held and stopped",
        idle(jobs=(replace(pending(), reason="JobHeldUser"),), kill_switch=SWITCH),
        VerdictWord.STOPPED,
        "what is queued is held",
    ),
    (
        "held but finished",
        idle(jobs=(pending(reason="JobHeldUser"),), attempts=(FINISHED,)),
        VerdictWord.FINISHED,
        "still queued",
    ),
    (
        "queued but finished",
        idle(jobs=(pending(),), attempts=(FINISHED,)),
        VerdictWord.FINISHED,
        "still queued",
    ),
    (
        "queued but finished, and stopped since",
        idle(jobs=(pending(),), attempts=(FINISHED,), kill_switch=SWITCH),
        VerdictWord.FINISHED,
        "still queued",
    ),
    (
        "queued after a refusal",
        idle(jobs=(pending(),), attempts=(REFUSED,)),
        VerdictWord.DOWN,
        "data.prefixes: no such file",
    ),
    (
        "queued since a refusal",
        idle(jobs=(pending(submit_time=NOW),), attempts=(REFUSED,)),
        VerdictWord.QUEUED,
        "waits",
    ),
    (
        "down",
        idle(),
        VerdictWord.DOWN,
        "nothing runs and nothing is queued; the last exit record says exit-duration at iteration 30800",
    ),
    (
        "down, and the last attempt left before it trained",
        idle(attempts=(ended("1007", HOUR, "pause", restart=False, launch=0), ended("1006"))),
        VerdictWord.DOWN,
        "nothing runs and nothing is queued; the last exit record says pause before it trained",
    ),
    (
        "down, no word",
        idle(attempts=(wordless("1007"),)),
        VerdictWord.DOWN,
        "nothing runs and nothing is queued",
    ),
    (
        "never launched",
        idle(attempts=(), steps=(), heartbeats=()),
        VerdictWord.DOWN,
        "nothing was launched yet",
    ),
    ("finished", idle(attempts=(FINISHED,)), VerdictWord.FINISHED, "finished at iteration"),
    (
        "stopped",
        idle(kill_switch=SWITCH),
        VerdictWord.STOPPED,
        "the kill switch was set by ben (new data)",
    ),
    (
        "stopped by no one known",
        idle(kill_switch=KillSwitch(SWITCH.path)),
        VerdictWord.STOPPED,
        "was set by someone",
    ),
    (
        "nothing, and blind",
        idle(attempts=Unknown("no rights")),
        VerdictWord.UNKNOWN,
        "finished, stopped or down? no rights",
    ),
    (
        "nothing, switch unseen",
        idle(kill_switch=Unknown("no rights")),
        VerdictWord.UNKNOWN,
        "no rights",
    ),
    (
        "in the foreground",
        idle(heartbeats=beats(job_id="foreground-9")),
        VerdictWord.HEALTHY,
        "outside the scheduler, as foreground-9",
    ),
    (
        "scheduler away, alive",
        snapshot(jobs=AWAY, nodes=AWAY),
        VerdictWord.HEALTHY,
        "scheduler unreachable: squeue did not answer",
    ),
    (
        "scheduler away, starts",
        snapshot(jobs=AWAY, heartbeats=beats(phase="starting")),
        VerdictWord.STARTING,
        "scheduler unreachable",
    ),
    (
        "scheduler away, silent",
        idle(jobs=AWAY),
        VerdictWord.UNKNOWN,
        "last sign of life 1 d 0 h ago",
    ),
    (
        "scheduler away, ended",
        snapshot(jobs=AWAY, attempts=(ended("1007", 5.0),)),
        VerdictWord.UNKNOWN,
        "scheduler unreachable",
    ),
    (
        "scheduler away, finished",
        idle(jobs=AWAY, attempts=(FINISHED,)),
        VerdictWord.FINISHED,
        "scheduler unreachable",
    ),
    (
        "scheduler away, no life",
        idle(jobs=AWAY, heartbeats=()),
        VerdictWord.UNKNOWN,
        "no sign of life to go by",
    ),
]
