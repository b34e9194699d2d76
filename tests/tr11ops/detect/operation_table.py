"""Facts of the operation that detectors judge, and the table of what each finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    changed,
    checkpoints,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
)
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect.copies import backup_overdue, copy_damaged, secret_in_log, sync_overdue
from tr11ops.detect.nodes import exclusion_cap, exclusion_due
from tr11ops.detect.numbers import silent_corruption
from tr11ops.detect.queued_work import chain_end
from tr11ops.detect.site import nodes_short, queued_too_long
from tr11ops.detect.storage import filesystem_filling, filesystem_full, purge_near
from tr11ops.detect.watch import (
    clock_skew,
    cron_dead,
    damaged_state,
    kill_switch_left_on,
    periodic_job_failed,
    switch_unseen,
)
from tr11ops.observe.observations import (
    ClockReading,
    Copied,
    CopyStatus,
    Corruption,
    FolderRoom,
    FoundSecret,
    LaunchEnd,
    LeastUsed,
    Readmission,
    UnwritableDirectory,
)
from tr11ops.observe.snapshot import Checkpoint, Checkpoints, KillSwitch, Snapshot
from tr11ops.runcard.watching import BackupSection, FilesystemSection, HubSection, WatchSection
from tr11ops.rundir import cron_records as periodic
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import Submission
from tr11ops.rundir.state_files import Damage

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


# ---------------------------------------------------------------------------
# A table of the detectors of the operation: what is seen, whose finding it is, how severe.


WRONG = (
    Corruption("n07", 25, NOW - HOUR, 31_000, True, "rank 25 on n07 (GPU 1) has another result"),
)


UNDECIDED = tuple(
    Corruption(f"n0{node}", node, NOW - HOUR, 31_000, False, "no third decides") for node in (7, 8)
)


BAD = (LaunchEnd("1007", 1, NOW - HOUR, "Xid 79 on n20", "launch 2 starts without it", ("n20",)),)

LOST = (
    LaunchEnd(
        "1007", 1, NOW - HOUR, "n20: lost to the scheduler", "launch 2 starts without it", ("n20",)
    ),
)
TWICE = (
    LaunchEnd(
        "1007", 1, NOW - HOUR, "the second time on n20: n20: lost to the scheduler", "", ("n20",)
    ),
)
LET_IN = (Readmission("n20", NOW - 60),)
BEFORE = (Readmission("n20", NOW - 2 * HOUR),)


# what is wrong, what is seen, which detector, what it says
SECRET = FoundSecret("logs/main/main_log.txt", "AWS access key", 12, NOW - 60)


TORN = Damage(
    "/run/state/submissions/1/submission.json", "is empty", "its job is found by its comment", True
)


TABLE: list[tuple[str, Snapshot, Any, list[str]]] = [
    # the queue
    ("waits for nodes for two hours", queued(), queued_too_long, ["WARNING"]),
    ("since yesterday", queued(jobs=(pending(reason="Priority"),)), queued_too_long, ["CRITICAL"]),
    ("nodes are down", queued("Nodes_required_for_job_are_DOWN"), queued_too_long, ["WARNING"]),
    ("no reason given", queued(""), queued_too_long, ["WARNING"]),
    ("behind a task of its array, and none runs", queued("JobArrayTaskLimit"), queued_too_long, ["WARNING"]),
    ("waits for another job", queued("Dependency"), queued_too_long, []),
    ("the log cannot be read, the heartbeats can", queued(steps=UNKNOWN), queued_too_long, ["WARNING"]),
    ("no heartbeat, and no log to be read", queued(steps=UNKNOWN, heartbeats=()), queued_too_long, []),
    ("begins tomorrow", queued("BeginTime"), queued_too_long, []),
    ("held", queued("JobHeldUser"), queued_too_long, []),
    ("cannot start", queued("DependencyNeverSatisfied"), queued_too_long, []),
    ("another task trains", operated(jobs=(running(), pending(reason="Resources"))), queued_too_long, []),
    ("stopped by someone", queued(kill_switch=KillSwitch(Path("k"))), queued_too_long, []),
    ("whether stopped is unknown", queued(kill_switch=UNKNOWN), queued_too_long, []),
    ("queue unknown", queued(jobs=UNKNOWN), queued_too_long, []),
    (
        "released half an hour ago",
        queued(jobs=(pending(reason="Resources", eligible_time=NOW - 1800),)),
        queued_too_long,
        [],
    ),
    (
        "the task before it ended just now",
        queued(jobs=(pending(reason="Resources"), running(state=JobState.TIMEOUT, end_time=NOW - 60))),
        queued_too_long,
        [],
    ),
    ("the attempt before it ended just now", queued(attempts=(ended("1007", age=60),)), queued_too_long, []),
    ("tr11 released it ten minutes ago", queued(holds_changed=NOW - 600), queued_too_long, []),
    ("a longer queue is normal", queued(watch=WatchSection(longest_queue_minutes=180)), queued_too_long, []),
    # the array's end
    (
        "two tasks left, three wanted",
        with_facts(operated(jobs=(running(), pending((8, 9))), watch=WatchSection(tasks_left=3)), total_iterations=115_311),
        chain_end,
        ["WARNING"],
    ),
    (
        "no one wants to know",
        with_facts(operated(jobs=(running(),), watch=WatchSection(tasks_left=0)), total_iterations=115_311),
        chain_end,
        [],
    ),
    # the kill switch
    (
        "held since the day before yesterday",
        operated(idle(jobs=(pending(reason="JobHeldUser"),)), kill_switch=KillSwitch(Path("k"), "ben", NOW - 2 * DAY)),
        kill_switch_left_on,
        ["WARNING"],
    ),
    # copies
    ("copied in time", operated(), backup_overdue, []),
    ("due step just reached", operated(backup=CopyStatus(NOW - 9 * DAY, 30_000)), backup_overdue, []),
    (
        "not copied for two days",
        operated(
            backup=CopyStatus(NOW - 9 * DAY, 30_000),
            checkpoints=checkpoints(examined=(Checkpoint(31_000, True, NOW - 2 * DAY, 1, "sizes"),), steps=(31_000,)),
        ),
        backup_overdue,
        ["WARNING"],
    ),
    (
        "never, since the first submission",
        operated(
            backup=None,
            checkpoints=checkpoints(examined=(Checkpoint(31_000, True, NOW - 8 * DAY, 1, "sizes"),), steps=(31_000,)),
        ),
        backup_overdue,
        ["CRITICAL"],
    ),
    (
        "copied a day ago, but a step of days ago is missing",
        operated(
            backup=CopyStatus(NOW - DAY, 28_000),
            steps=steps(age=0),
            checkpoints=checkpoints(steps=(29_000, 30_000, 31_000, 31_200)),
        ),
        backup_overdue,
        ["WARNING"],
    ),
    ("never, but nothing is due yet", operated(backup=None, checkpoints=checkpoints(900)), backup_overdue, []),
    ("copied, which step is not known", operated(backup=CopyStatus(NOW - HOUR)), backup_overdue, []),
    ("the card wants no copies", operated(backup=None, facts=facts(backup=BackupSection())), backup_overdue, []),
    ("unknown", operated(backup=UNKNOWN), backup_overdue, []),
    ("both archives have theirs", backed_up(store=(30_000, 31_000), url=(30_000,)), backup_overdue, []),
    ("one archive lags behind the other", backed_up(store=(30_000, 31_000), url=()), backup_overdue, ["WARNING"]),
    ("both lag", backed_up(store=(), url=()), backup_overdue, ["WARNING", "WARNING"]),
    ("weights are no whole copy", backed_up(store=(30_000, 31_000), url=(), weights=(30_000,)), backup_overdue, ["WARNING"]),
    ("rounds are a week apart", backed_up(store=(), url=(), interval_hours=7 * 24), backup_overdue, []),
    ("copies in order", operated(), copy_damaged, []),
    ("a copy has rotted", operated(backup=CopyStatus(NOW, 31_000, damaged=("store: step 9",))), copy_damaged, ["CRITICAL"]),
    ("a copy holds NaN", operated(backup=CopyStatus(NOW, 31_000, not_finite=("store: step 9",))), copy_damaged, ["WARNING"]),
    ("NaN, and rot", operated(backup=CopyStatus(NOW, 31_000, damaged=("url: 8",), not_finite=("store: 9",))), copy_damaged, ["CRITICAL"]),
    ("never copied", operated(backup=None), copy_damaged, []),
    ("unknown", operated(backup=UNKNOWN), copy_damaged, []),
    ("mirrored", operated(), sync_overdue, []),
    ("not mirrored for four hours", operated(sync=CopyStatus(NOW - 4 * HOUR)), sync_overdue, ["WARNING"]),
    ("never mirrored", operated(sync=None), sync_overdue, ["WARNING"]),
    ("nothing logged since", operated(idle(), sync=CopyStatus(NOW - 20 * HOUR)), sync_overdue, []),
    ("no repository", operated(sync=None, facts=facts(hub=HubSection())), sync_overdue, []),
    ("unknown", operated(sync=UNKNOWN), sync_overdue, []),
    # secrets in what is mirrored
    ("a secret was found", operated(sync=CopyStatus(NOW, secrets=(SECRET,))), secret_in_log, ["WARNING"]),
    (
        "of several kinds",
        operated(sync=CopyStatus(NOW, secrets=(SECRET, replace(SECRET, kind="password or key")))),
        secret_in_log,
        ["WARNING", "WARNING"],
    ),
    ("it is revoked", operated(sync=CopyStatus(NOW, secrets=(replace(SECRET, revoked=NOW),))), secret_in_log, []),
    ("nothing was found", operated(), secret_in_log, []),
    ("what was found is unknown", operated(sync=UNKNOWN), secret_in_log, []),
    # file systems
    ("half full", operated(), filesystem_full, []),
    ("at its share", operated(usage=(usage(75.0),)), filesystem_full, []),
    ("over its share", operated(usage=(usage(75.1),)), filesystem_full, ["WARNING"]),
    ("nearly to the brim", operated(usage=(usage(97.5),)), filesystem_full, ["CRITICAL"]),
    ("no room", operated(usage=(usage(free=9.9 * TERA),)), filesystem_full, ["WARNING"]),
    ("really no room", operated(usage=(usage(free=4 * TERA),)), filesystem_full, ["CRITICAL"]),
    ("was full once", operated(usage=(usage(99.0, age=DAY), usage())), filesystem_full, []),
    (
        "inodes run out",
        operated(usage=(usage(inodes_used=99.0, inodes_limit=100.0),)),
        filesystem_full,
        ["CRITICAL"],
    ),
    ("never looked", operated(usage=()), filesystem_full, []),
    (
        "the run's own folders",
        operated(shut_folders=(UnwritableDirectory("/a b", "no byte is left", True), UnwritableDirectory("/c", "read-only", False))),
        filesystem_full,
        ["CRITICAL", "WARNING"],
    ),
    ("no room for a save", operated(save_room=FolderRoom("/run", 216 * 2**10)), filesystem_full, ["WARNING"]),
    ("just room for a save", operated(save_room=FolderRoom("/run", 2_463_000_000_000)), filesystem_full, []),
    ("room unknown", operated(save_room=UNKNOWN), filesystem_full, []),
    ("nothing was saved yet", operated(checkpoints=Checkpoints((), None, ()), save_room=FolderRoom("/run", 1)), filesystem_full, []),
    (
        "full, and so no room",
        operated(shut_folders=(UnwritableDirectory("/run", "no byte is left", True),), save_room=FolderRoom("/run", 0)),
        filesystem_full,
        ["CRITICAL"],
    ),
    ("unknown", operated(usage=UNKNOWN), filesystem_full, []),
    ("grows slowly", operated(usage=growing(40, 41)), filesystem_filling, []),
    ("full in a week", operated(usage=growing(30, 65)), filesystem_filling, ["INFO"]),
    (
        "full tomorrow",
        operated(usage=growing(0, 89), facts=facts(filesystems=(RULE.model_copy(update={"bytes_percent": 90}),))),
        filesystem_filling,
        ["WARNING"],
    ),
    ("full already", operated(usage=growing(30, 80)), filesystem_filling, []),
    ("one look is no trend", operated(usage=(usage(),)), filesystem_filling, []),
    # purge
    ("read yesterday", operated(), purge_near, []),
    ("untouched for 23 days", operated(least_used=(LeastUsed("data", Path("/a b"), NOW - 23 * DAY),)), purge_near, ["WARNING"]),
    ("for 28 days", operated(least_used=(LeastUsed("data", Path("/a"), NOW - 28 * DAY),)), purge_near, ["CRITICAL"]),
    ("for 40 days", operated(least_used=(LeastUsed("data", Path("/a"), NOW - 40 * DAY),)), purge_near, ["CRITICAL"]),
    ("the site deletes nothing", operated(least_used=(LeastUsed("d", Path("/a"), 0.0),), watch=WatchSection()), purge_near, []),
    # a node that computes wrongly
    ("no suspect", operated(corruptions=()), silent_corruption, []),
    ("a suspect", operated(corruptions=WRONG), silent_corruption, ["CRITICAL"]),
    ("two without a third", operated(corruptions=UNDECIDED), silent_corruption, ["CRITICAL"] * 2),
    ("suspects that are excluded", operated(corruptions=UNDECIDED, exclusions=excluded(8)), silent_corruption, []),
    ("unknown whether excluded", operated(corruptions=WRONG, exclusions=UNKNOWN), silent_corruption, []),
    # exclusions: 52 nodes, 48 needed, so at most 4 of the 6 that 10 % would be
    ("two of four", operated(exclusions=excluded(2)), exclusion_cap, []),
    ("three of four", operated(exclusions=excluded(3)), exclusion_cap, ["INFO"]),
    ("four of four", operated(exclusions=excluded(4)), exclusion_cap, ["WARNING"]),
    ("too few left, one trains", operated(exclusions=excluded(2), nodes=nodes(bad=3)), nodes_short, ["WARNING"]),
    ("too few left", queued(exclusions=excluded(2), nodes=nodes(bad=3)), nodes_short, ["CRITICAL"]),
    ("too few, none excluded", queued(exclusions=(), nodes=nodes(bad=5)), nodes_short, ["CRITICAL"]),
    ("just enough", queued(exclusions=(), nodes=nodes(bad=4)), nodes_short, []),
    ("too few nodes, unknown", queued(exclusions=(), nodes=UNKNOWN), nodes_short, []),
    ("too few nodes, exclusions unknown", queued(exclusions=UNKNOWN, nodes=nodes(bad=5)), nodes_short, []),
    ("none excluded, no room", operated(exclusions=(), nodes=nodes(48)), exclusion_cap, []),
    ("a bad one beyond four", operated(exclusions=excluded(4), launch_ends=BAD), exclusion_cap, ["WARNING"] * 2),
    ("a bad one, no room for any", operated(exclusions=(), nodes=nodes(48), launch_ends=BAD), exclusion_cap, ["WARNING"]),
    ("a bad one, let in again below the cap", operated(exclusions=excluded(2), launch_ends=BAD), exclusion_cap, []),
    ("a bad one that a person let in", operated(exclusions=excluded(4), launch_ends=BAD, readmissions=LET_IN), exclusion_cap, ["WARNING"]),
    ("a bad one, let in before", operated(exclusions=excluded(4), launch_ends=BAD, readmissions=BEFORE), exclusion_cap, ["WARNING"] * 2),
    ("one that was lost is still", operated(exclusions=excluded(4), launch_ends=LOST, nodes=nodes(bad=33)), exclusion_cap, ["INFO", "WARNING"]),
    ("one that was lost is back", operated(exclusions=excluded(4), launch_ends=LOST), exclusion_cap, ["WARNING"]),
    ("one that was lost twice is back", operated(exclusions=excluded(4), launch_ends=TWICE), exclusion_cap, ["WARNING"] * 2),
    ("unknown who let it in", operated(exclusions=excluded(4), launch_ends=BAD, readmissions=UNKNOWN), exclusion_cap, ["WARNING"]),
    ("a bad one that is excluded", operated(exclusions=excluded(40), launch_ends=BAD), exclusion_cap, ["WARNING"]),
    ("excluded by a queued job alone", operated(exclusions=(Exclusion("n01", "excluded by job 9"),)), exclusion_cap, []),
    ("nodes unknown", operated(exclusions=excluded(4), nodes=UNKNOWN), exclusion_cap, []),
    ("due this morning", operated(exclusions=excluded(1, NOW - 4 * HOUR)), exclusion_due, []),
    ("due for two days", operated(exclusions=excluded(2, NOW - 2 * DAY)), exclusion_due, ["INFO"]),
    ("never due", operated(exclusions=excluded(1, None)), exclusion_due, []),
    # periodic jobs
    ("the digest failed", operated(periodic_jobs=(job("digest", failures_in_a_row=1),)), periodic_job_failed, ["INFO"]),
    ("three times", operated(periodic_jobs=(job("digest", failures_in_a_row=3),)), periodic_job_failed, ["WARNING"]),
    ("the watchdog failed", operated(periodic_jobs=(job(failures_in_a_row=1),)), periodic_job_failed, ["WARNING"]),
    ("three times in a row", operated(periodic_jobs=(job(failures_in_a_row=3),)), periodic_job_failed, ["CRITICAL"]),
    (
        "the card skips it",
        operated(periodic_jobs=(job(failures_in_a_row=9),), facts=facts(periodic_jobs=("digest",))),
        periodic_job_failed,
        [],
    ),
    ("never installed", operated(periodic_jobs=(), chains=()), cron_dead, []),
    ("an hour late", operated(periodic_jobs=(job(next_due=NOW - 3500),)), cron_dead, []),
    ("two hours late", operated(periodic_jobs=(job(next_due=NOW - 7300),)), cron_dead, ["CRITICAL"]),
    (
        "the digest is five hours late",
        operated(periodic_jobs=(job("digest", interval_seconds=DAY, next_due=NOW - 5 * HOUR),)),
        cron_dead,
        [],
    ),
    (
        "the digest is seven hours late",
        operated(periodic_jobs=(job("digest", interval_seconds=DAY, next_due=NOW - 7 * HOUR),)),
        cron_dead,
        ["WARNING"],
    ),
    ("was run by hand once", operated(periodic_jobs=(job(way="hand", next_due=NOW - DAY),)), cron_dead, []),
    (
        "runs, for long",
        operated(periodic_jobs=(job(started=NOW - 2 * HOUR, ended=None, next_due=NOW - 90 * 60),)),
        cron_dead,
        [],
    ),
    (
        "was killed while it ran",
        operated(periodic_jobs=(job(started=NOW - 9 * HOUR, ended=None, next_due=NOW - 8 * HOUR),)),
        cron_dead,
        ["CRITICAL"],
    ),
    (
        "two daemons' jobs, one finding for each way",
        operated(
            periodic_jobs=(job(next_due=0.0), job("digest", next_due=0.0), job("filesystems", way="daemon", next_due=0.0))
        ),
        cron_dead,
        ["CRITICAL", "WARNING"],
    ),
    (
        "the chain is dead, and its jobs with it",
        operated(
            periodic_jobs=(job(way="slurm", next_due=NOW - DAY),),
            chains=(periodic.ChainState("hourly", "77", NOW - DAY, NOW - DAY),),
        ),
        cron_dead,
        ["CRITICAL"],
    ),
    (
        "the daily chain waits in the queue",
        operated(chains=(periodic.ChainState("daily", "78", NOW - DAY, NOW - 5 * HOUR),)),
        cron_dead,
        [],
    ),
    # clocks
    ("the switch is not mounted", operated(switch_fault="/far/switch: /far is not there"), switch_unseen, ["WARNING"]),
    ("it is seen", operated(), switch_unseen, []),
    ("a record is empty", operated(damaged_files=(TORN,)), damaged_state, ["WARNING"]),
    ("two are damaged", operated(damaged_files=(TORN, TORN)), damaged_state, ["WARNING"]),
    ("none is", operated(), damaged_state, []),
    ("a minute ahead", operated(clocks=(clock(ahead=60), clock("n02"))), clock_skew, ["WARNING"]),
    ("a minute behind", operated(clocks=(clock(ahead=-60),)), clock_skew, ["WARNING"]),
    ("one slow write", operated(clocks=(clock(ahead=-60), clock(ahead=-0.1))), clock_skew, []),
    ("a copied run directory", operated(clocks=(clock(ahead=-40 * DAY, age=2 * HOUR),)), clock_skew, []),
    ("this machine is behind", operated(clock_ahead=-90.0), clock_skew, ["WARNING"]),
    ("this machine is an hour ahead", operated(clock_ahead=3600.0), clock_skew, ["WARNING"]),
    ("this machine is a little ahead", operated(clock_ahead=20.0), clock_skew, []),
    ("unknown", operated(clocks=UNKNOWN, clock_ahead=UNKNOWN), clock_skew, []),
]  # fmt: skip
