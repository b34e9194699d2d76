"""Screens of the status, for tests."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.status.care_cases import FAULT, alert, look
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    cron_job,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    told_little,
    with_facts,
    wordless,
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.detect.registry import detect_all
from tr11ops.dialects.settings import settings_of
from tr11ops.observe.observations import CopyStatus
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.rundir.attempts import CodeIdentity
from tr11ops.rundir.copies import DrillRecord
from tr11ops.rundir.cron_records import ChainState
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.status.assessment import status_of
from tr11ops.status.document import Status
from tr11ops.status.extra_observations import ExtraObservations, RunningCopy
from tr11ops.trainers.levels import standing_of
from tr11ops.watchdog.verdict import judge
from trainer.contract.origin import BranchOrigin

AWAY = Unknown("squeue did not answer within 10 s")


# name: snapshot, width, unicode
SCREENS: dict[str, tuple[Snapshot, int, bool]] = {
    "healthy-80": (snapshot(), 80, True),
    "healthy-60-ascii": (snapshot(), 60, False),
    "healthy-120": (snapshot(exclusions=(Exclusion("n77", "Xid 79", "ana", NOW + 9),)), 120, True),
    # a trainer that tells the numbers and times of its steps, and no card that says the last one
    "little-told-80": (
        with_facts(
            snapshot(steps=told_little(steps())), total_iterations=None, checkpoint_interval=None
        ),
        80,
        True,
    ),
    "last-task-80": (snapshot(jobs=(running(),)), 80, True),
    "stalled-80": (snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR)), 80, True),
    "zombie-80-ascii": (
        snapshot(nodes=(Node("n01", frozenset({"down", "not_responding"}), "no answer"),)),
        80,
        False,
    ),
    "down-80": (
        idle(
            attempts=(wordless("1007", failure="rank 12 on n02: RuntimeError: NCCL error"), ended())
        ),
        80,
        True,
    ),
    "stopped-80": (
        idle(
            jobs=(pending(),),
            kill_switch=KillSwitch(Path("/scratch/tr11/kill-switch"), "ben", NOW - 600, "new data"),
        ),
        80,
        True,
    ),
    "scheduler-away-80": (snapshot(jobs=AWAY, nodes=AWAY), 80, True),
    "nothing-launched-80": (idle(steps=(), attempts=(), heartbeats=()), 80, True),
    "blind-60-ascii": (
        replace(
            snapshot(),
            jobs=Unknown("no answer"),
            nodes=Unknown("no answer"),
            **dict.fromkeys(
                (
                    "steps",
                    "heartbeats",
                    "attempts",
                    "checkpoints",
                    "kill_switch",
                    "exclusions",
                    "submissions",
                ),
                Unknown("/scratch/tr11 is not there"),
            ),
        ),
        60,
        False,
    ),
}


VERSIONS = dict.fromkeys(
    ("torch", "deepspeed", "numpy", "transformers", "python", "cuda", "nccl", "driver"), "1"
)


def full() -> Status:
    """The status of a run of which everything is known, so that every key at every depth is in it."""
    given = snapshot(
        kill_switch=KillSwitch(Path("/k"), "ben", NOW, "new data"),
        attempts=(replace(ended(), code=CodeIdentity("/c", "ab" * 20), versions=VERSIONS),),
        exclusions=(Exclusion("n77", "Xid 79", "ana", NOW + 9),),
        backup=CopyStatus(NOW - HOUR, 31000),
        sync=CopyStatus(NOW - HOUR),
        holds=(HoldRecord("1000", "ben", NOW, "new data"),),
        periodic_jobs=(cron_job(),),
        chains=(ChainState("hourly", "77", NOW, NOW + HOUR),),
        origin=BranchOrigin(
            "/big/checkpoints/main", 30, "big/main", True, True, NOW, "3", ("seed/main step 7",)
        ),
        usage=tuple(look("SCRATCH", 80.0 - day, age=600.0 + day * DAY) for day in range(10)),
    )
    findings = detect_all(snapshot(jobs=(running(),))) or ()
    extra = ExtraObservations(
        (alert(),),
        (152.0, 20.0),
        copying=(RunningCopy("store", "ana", "login1", NOW - 60, 31000),),
        drill=DrillRecord(NOW - DAY, "store", 30000, passed=True),
    )
    foreign = settings_of({"dialect": "huggingface", "command": ["train.py"]}, "a card")
    given = with_facts(given, standing=standing_of(foreign, 2))
    return status_of(given, (FAULT, *findings), judge(given, ()), extra)


def keys_below(value: object) -> set[str]:
    """The names in the objects inside a value, at any depth."""
    if isinstance(value, list):
        return set().union(*map(keys_below, value)) if value else set()
    return set(value).union(*map(keys_below, value.values())) if isinstance(value, dict) else set()
