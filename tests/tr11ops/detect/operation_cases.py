"""Snapshots of the operation around a run, and their parts, for the tests of its detectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    changed,
    checkpoints,
    idle,
    pending,
    snapshot,
    with_facts,
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.detect.copies import backup_overdue, copy_damaged, secret_in_log, sync_overdue
from tr11ops.detect.nodes import exclusion_cap, exclusion_due
from tr11ops.detect.site import nodes_short, queued_too_long
from tr11ops.detect.speed import silent_corruption
from tr11ops.detect.state import damaged_state, switch_unseen
from tr11ops.detect.storage import filesystem_filling, filesystem_full, purge_near
from tr11ops.detect.watch import clock_skew, cron_dead, periodic_job_failed
from tr11ops.observe.observations import (
    ClockReading,
    Copied,
    CopyStatus,
    LeastUsed,
)
from tr11ops.observe.snapshot import Checkpoint, Snapshot
from tr11ops.runcard.copies import BackupSection, HubSection
from tr11ops.runcard.watching import FilesystemSection, WatchSection
from tr11ops.rundir import cron_records as periodic
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import Submission

UNKNOWN = Unknown("the disk is unreachable")
TERA = 2.0**40
RULE = FilesystemSection(name="SCRATCH", source="df", bytes_percent=75, least_free="10 TiB")
FACTS: dict[str, Any] = {
    "partition": "gpu_p5",
    "allocated_nodes": 48,
    "backup": BackupSection(store="/a", milestone_percent=0),
    "hub": HubSection(repository="bigscience/logs"),
    "filesystems": (RULE,),
}
WATCH = WatchSection(act=True, resubmissions_per_day=0, scratch_purge_days=30)
SUBMITTED = Submission(
    "t", "1000", "slurm", NOW - 9 * DAY, "ana", "h", "r", "main", "1-10%1", 48, "hash"
)
OPERATION = (
    queued_too_long,
    backup_overdue,
    copy_damaged,
    sync_overdue,
    secret_in_log,
    silent_corruption,
    filesystem_full,
    filesystem_filling,
    purge_near,
    exclusion_cap,
    exclusion_due,
    nodes_short,
    periodic_job_failed,
    cron_dead,
    damaged_state,
    switch_unseen,
    clock_skew,
)


def nodes(count: int = 52, bad: int = 0, down: tuple[str, ...] = ()) -> tuple[Node, ...]:
    """Nodes of one partition; the last `bad` of them are down, and those that `down` names."""
    names = [f"n{number:02d}" for number in range(1, count + 1)]
    dead = {*names[count - bad :], *down}
    return tuple(
        Node(name, frozenset({"down"} if name in dead else {"idle"}), partitions=("gpu_p5",))
        for name in names
    )


def excluded(count: int, until: float | None = NOW + DAY) -> tuple[Exclusion, ...]:
    return tuple(
        Exclusion(f"n{number:02d}", "Xid 79", "tr11", until, (), NOW - 5 * DAY)
        for number in range(1, count + 1)
    )


def usage(
    percent: float = 50.0, age: float = HOUR, free: float = 200 * TERA, **changes: Any
) -> Usage:
    values: dict[str, Any] = {
        "bytes_used": percent * TERA,
        "bytes_limit": 100 * TERA,
        "bytes_free": free,
    }
    return Usage(NOW - age, "SCRATCH", "df", "/scratch", **{**values, **changes})


def growing(first: float, last: float, days: int = 10) -> tuple[Usage, ...]:
    return tuple(
        usage(first + (last - first) * day / days, age=(days - day) * DAY + HOUR)
        for day in range(days + 1)
    )


def job(name: str = "pulse", **changes: Any) -> periodic.PeriodicJobState:
    values: dict[str, Any] = {
        "way": "crontab",
        "host": "login1",
        "started": NOW - 600,
        "ended": NOW - 590,
        "exit_code": 0,
        "message": "",
        "interval_seconds": HOUR,
        "runs": 100,
        "failures_in_a_row": 0,
        "next_due": NOW + 3000,
    }
    return periodic.PeriodicJobState(name, **{**values, **changes})


def clock(
    host: str = "n01", ahead: float = 0.5, age: float = 20.0, what: str = "heartbeat of rank 0"
) -> ClockReading:
    return ClockReading(host, NOW - age + ahead, NOW - age, what)


def operated(
    base: Snapshot | None = None,
    facts: dict[str, Any] = FACTS,
    watch: WatchSection = WATCH,
    **changes: Any,
) -> Snapshot:
    """A healthy moment with every part of the operation in place; each test changes what it is
    about.
    """
    values: dict[str, Any] = {
        "nodes": nodes(),
        "submissions": (SUBMITTED,),
        "exclusions": excluded(1),
        "backup": CopyStatus(NOW - 20 * HOUR, 31_000),
        "sync": CopyStatus(NOW - 1200.0),
        "checkpoints": checkpoints(steps=(31_000, 31_100, 31_200)),
        "periodic_jobs": (job(), job("digest", interval_seconds=DAY, next_due=NOW + 20 * HOUR)),
        "chains": (periodic.ChainState("hourly", "77", NOW - 600, NOW + 3000),),
        "usage": (usage(age=2 * DAY), usage()),
        "clocks": (clock(), clock("n02", -1.0)),
        "least_used": (LeastUsed("data", Path("/scratch/a.bin"), NOW - DAY),),
    }
    return with_facts(
        changed(base or snapshot(), **{**values, **changes}),
        **{"watch": watch, "total_iterations": 32_000, **facts},
    )


def queued(reason: str = "Resources", **changes: Any) -> Snapshot:
    jobs = changes.pop(
        "jobs", (pending(reason=reason, submit_time=NOW - 2 * HOUR, partition="gpu_p5"),)
    )
    return operated(idle(), jobs=jobs, **changes)


def facts(**changes: Any) -> dict[str, Any]:
    """What the card says of the operation, with other values."""
    return {**FACTS, **changes}


def backed_up(
    store: tuple[int, ...], url: tuple[int, ...], weights: tuple[int, ...] = (), **changes: Any
) -> Snapshot:
    """Both archives want multiples of a thousand whole; of 30,000 and 31,000, trained two days ago,
    they have these.
    """
    copies = (
        *(Copied("store", "full", step) for step in store),
        *(Copied("url", "full", step) for step in url),
        *(Copied("url", "weights", step) for step in weights),
    )
    examined = tuple(Checkpoint(step, True, NOW - 2 * DAY, 1, "sizes") for step in (30_000, 31_000))
    wanted = BackupSection(
        store="/a", url="gs://b", weights_interval=0, milestone_percent=0, **changes
    )
    return operated(
        facts=facts(backup=wanted),
        backup=CopyStatus(NOW - HOUR, 31_000, copied=copies),
        checkpoints=checkpoints(steps=(30_000, 31_000), examined=examined),
    )
