"""Detectors of the operation around a run: queue, copies, disks, purges, exclusions, periodic jobs, clocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.detect.operation_cases import (
    OPERATION,
    RULE,
    SUBMITTED,
    TERA,
    UNKNOWN,
    backed_up,
    clock,
    excluded,
    facts,
    growing,
    job,
    nodes,
    operated,
    queued,
    usage,
)
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    checkpoints,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import JobState
from tr11ops.crontab import state as periodic
from tr11ops.detect import (
    backup_overdue,
    chain_end,
    clock_skew,
    copy_damaged,
    cron_dead,
    damaged_state,
    exclusion_cap,
    exclusion_due,
    filesystem_filling,
    filesystem_full,
    held,
    kill_switch_left_on,
    nodes_short,
    periodic_job_failed,
    purge_near,
    queued_too_long,
    registry,
    secret_in_log,
    silent_corruption,
    switch_unseen,
    sync_overdue,
)
from tr11ops.detect.finding import Finding
from tr11ops.operation import CopyStatus, FoundSecret, Hold, LeastUsed, ShutFolder
from tr11ops.report.status_care import nodes as row_of_nodes
from tr11ops.report.status_surroundings import NodeUse, Surroundings, node_use
from tr11ops.snapshot import Checkpoint, Damage, Exclusion, KillSwitch, Snapshot
from tr11ops.training import Corruption, LaunchEnd


def test_a_clean_operation_has_no_findings() -> None:
    assert registry.detect_all(operated()) == ()


def test_a_card_that_asks_for_nothing_is_never_told_anything() -> None:
    bare = snapshot(submissions=(SUBMITTED,), usage=(usage(99.0),), least_used=(LeastUsed("data", Path("/a"), 0.0),))
    spoken = {finding.detector for finding in registry.detect_all(bare)}
    assert not spoken & {detector.NAME for detector in OPERATION}


WRONG = (Corruption("n07", 25, NOW - HOUR, 31_000, True, "rank 25 on n07 (GPU 1) has another result"),)
UNDECIDED = tuple(Corruption(f"n0{node}", node, NOW - HOUR, 31_000, False, "no third decides") for node in (7, 8))
BAD = (LaunchEnd("1007", 1, NOW - HOUR, "Xid 79 on n20", "launch 2 starts without it", ("n20",)),)


def test_a_wrong_node_is_named_with_rank_and_gpu_and_can_be_excluded() -> None:
    (finding,) = silent_corruption.detect(operated(corruptions=WRONG))
    assert (finding.subject, finding.title) == ("n07", "n07 computes wrongly")
    assert finding.evidence == (
        "iteration 31000: rank 25 on n07 (GPU 1) has another result",
        "last found 1 h 00 min ago",
    )
    assert finding.fix.startswith("tr11 nodes exclude") and finding.fix.endswith("n07")
    titles = [found.title for found in silent_corruption.detect(operated(corruptions=UNDECIDED))]
    assert titles == ["n07 or another node computes wrongly", "n08 or another node computes wrongly"]


def test_a_bad_node_that_the_cap_leaves_in_use_is_named_and_is_no_spare() -> None:
    held = running(nodes=tuple(f"n{number:02d}" for number in range(1, 51)), node_count=50)
    seen: dict[str, Any] = {"exclusions": (), "nodes": nodes(50), "jobs": (held, pending()), "launch_ends": BAD}
    launched = tuple(node for node in held.nodes if node not in {"n20", "n50"})
    assert node_use(operated(**seen), Surroundings(launch_nodes=launched)) == NodeUse(48, 2, 0)
    capped = operated(facts=facts(allocated_nodes=50), **seen)
    assert node_use(capped, Surroundings(launch_nodes=launched)) == NodeUse(48, 1, 0)
    (finding,) = exclusion_cap.detect(capped)
    assert finding.subject == "n20" and finding.title.startswith("n20 was found bad and is not excluded")
    assert "Xid 79 on n20" in finding.evidence and finding.fix.endswith("nodes check n20")
    ((_, text, _),) = row_of_nodes(capped, Surroundings(launch_nodes=launched))
    assert text == "48 used, 1 spare; none excluded; bad but not excluded: n20"


def test_too_few_nodes_do_not_deny_the_attempt_that_trains() -> None:
    (finding,) = nodes_short.detect(operated(exclusions=excluded(2), nodes=nodes(bad=3)))
    assert finding.title.endswith("are needed: no further attempt can start")
    (finding,) = nodes_short.detect(queued(exclusions=excluded(2), nodes=nodes(bad=3)))
    assert finding.title.endswith("are needed: no attempt can start")


# what is wrong, what is seen, which detector, what it says
SECRET = FoundSecret("logs/main/main_log.txt", "AWS access key", 12, NOW - 60)
TORN = Damage("/run/state/submissions/1/submission.json", "is empty", "its job is found by its comment", True)
TABLE: list[tuple[str, Snapshot, Any, list[str]]] = [
    # the queue
    ("waits for nodes for two hours", queued(), queued_too_long, ["WARNING"]),
    ("since yesterday", queued(jobs=(pending(reason="Priority"),)), queued_too_long, ["CRITICAL"]),
    ("nodes are down", queued("Nodes_required_for_job_are_DOWN"), queued_too_long, ["WARNING"]),
    ("no reason given", queued(""), queued_too_long, ["WARNING"]),
    ("behind the task before it", queued("JobArrayTaskLimit"), queued_too_long, []),
    ("waits for another job", queued("Dependency"), queued_too_long, []),
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
    ("a longer queue is normal", queued(facts=facts(longest_queue_seconds=3 * HOUR)), queued_too_long, []),
    # the array's end
    (
        "two tasks left, three wanted",
        with_facts(operated(jobs=(running(), pending((8, 9))), facts=facts(tasks_left=3)), total_iterations=115_311),
        chain_end,
        ["WARNING"],
    ),
    (
        "nobody wants to know",
        with_facts(operated(jobs=(running(),), facts=facts(tasks_left=0)), total_iterations=115_311),
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
    ("the card wants no copies", operated(backup=None, facts=facts(copies=None)), backup_overdue, []),
    ("unknown", operated(backup=UNKNOWN), backup_overdue, []),
    ("both archives have theirs", backed_up(store=(30_000, 31_000), url=(30_000,)), backup_overdue, []),
    ("one archive lags behind the other", backed_up(store=(30_000, 31_000), url=()), backup_overdue, ["WARNING"]),
    ("both lag", backed_up(store=(), url=()), backup_overdue, ["WARNING", "WARNING"]),
    ("weights are no whole copy", backed_up(store=(30_000, 31_000), url=(), weights=(30_000,)), backup_overdue, ["WARNING"]),
    ("rounds are a week apart", backed_up(store=(), url=(), copy_seconds=7 * DAY), backup_overdue, []),
    ("copies in order", operated(), copy_damaged, []),
    ("a copy has rotted", operated(backup=CopyStatus(NOW, 31_000, damaged=("store: step 9",))), copy_damaged, ["CRITICAL"]),
    ("never copied", operated(backup=None), copy_damaged, []),
    ("unknown", operated(backup=UNKNOWN), copy_damaged, []),
    ("mirrored", operated(), sync_overdue, []),
    ("not mirrored for four hours", operated(sync=CopyStatus(NOW - 4 * HOUR)), sync_overdue, ["WARNING"]),
    ("never mirrored", operated(sync=None), sync_overdue, ["WARNING"]),
    ("nothing logged since", operated(idle(), sync=CopyStatus(NOW - 20 * HOUR)), sync_overdue, []),
    ("no repository", operated(sync=None, facts=facts(sync_seconds=None)), sync_overdue, []),
    ("unknown", operated(sync=UNKNOWN), sync_overdue, []),
    # secrets in what is mirrored
    ("a secret was found", operated(sync=CopyStatus(NOW, secrets=(SECRET,))), secret_in_log, ["WARNING"]),
    (
        "of several kinds",
        operated(sync=CopyStatus(NOW, secrets=(SECRET, dataclasses.replace(SECRET, kind="password or key")))),
        secret_in_log,
        ["WARNING", "WARNING"],
    ),
    ("it is revoked", operated(sync=CopyStatus(NOW, secrets=(dataclasses.replace(SECRET, revoked=NOW),))), secret_in_log, []),
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
        operated(shut_folders=(ShutFolder("/a b", "no byte is left", True), ShutFolder("/c", "read-only", False))),
        filesystem_full,
        ["CRITICAL", "WARNING"],
    ),
    ("unknown", operated(usage=UNKNOWN), filesystem_full, []),
    ("grows slowly", operated(usage=growing(40, 41)), filesystem_filling, []),
    ("full in a week", operated(usage=growing(30, 65)), filesystem_filling, ["INFO"]),
    (
        "full tomorrow",
        operated(usage=growing(0, 89), facts=facts(filesystems=(dataclasses.replace(RULE, bytes_percent=90),))),
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
    ("the site deletes nothing", operated(least_used=(LeastUsed("d", Path("/a"), 0.0),), facts=facts(purge_days=None)), purge_near, []),
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


@pytest.mark.parametrize(("seen", "detector", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(seen: Snapshot, detector: Any, expected: list[str]) -> None:
    found = list(detector.detect(seen))
    assert [finding.severity.name for finding in found] == expected
    assert all(finding.detector == detector.NAME and finding.title for finding in found)


def test_every_detector_of_the_operation_is_registered_and_speaks_in_the_table() -> None:
    assert set(OPERATION) <= set(registry.DETECTORS)
    assert {row[2].NAME for row in TABLE if row[3]} >= {detector.NAME for detector in OPERATION}


@pytest.mark.parametrize("detector", OPERATION, ids=lambda detector: detector.NAME)
def test_what_a_detector_needs_is_what_it_looks_at(detector: Any) -> None:
    """Each need hidden: blind, and silent wherever it spoke, if the need bears the fault."""
    spoken = [row[1] for row in TABLE if row[2] is detector and row[3]]
    first = detector.NEEDS[0]
    for seen in spoken:
        hidden = dataclasses.replace(seen, **{first: UNKNOWN})
        assert detector.NAME in registry.blind(hidden)
        if detector not in {cron_dead, filesystem_full, clock_skew}:  # whose two needs tell of different faults
            assert list(detector.detect(hidden)) == []
    assert detector.NAME not in registry.blind(operated())


def only(seen: Snapshot, detector: Any) -> Finding:
    (finding,) = detector.detect(seen)
    return finding


def test_what_is_told_of_a_long_queue() -> None:
    finding = only(queued(exclusions=excluded(3), nodes=nodes(bad=2)), queued_too_long)
    assert finding.title == "nothing trains: job 1000_[8-10%1] has waited for nodes for 2 h 00 min"
    assert finding.evidence == (
        "reason: Resources",
        "48 nodes are asked for, 47 of the partition are usable and not excluded",
    )
    assert (finding.subject, finding.fix) == ("1000", "tr11 nodes list")


def test_who_holds_is_told_and_only_what_tr11_holds_is_resumed() -> None:
    other = pending((11, 12), array_id="2000", raw_id="2000", job_id="2000_[11-12]", reason="JobHeldAdmin")
    jobs = (pending(reason="JobHeldUser"), pending((9, 10), reason="JobHeldUser"), other)
    mine, theirs = held.detect(operated(jobs=jobs, holds=(Hold("1000", "ben", NOW, "new data"),)))
    assert (mine.subject, mine.evidence, mine.fix) == ("1000", ("by ben, because: new data",), "tr11 resume")
    assert (theirs.subject, theirs.evidence, theirs.fix) == ("2000", (), "scontrol release 2000")


def test_a_clock_that_is_wrong_is_named_with_its_host() -> None:
    readings = (clock("n07", 90.0), clock("n03", -45.0, what="heartbeat of rank 9"), clock("n01"))
    ahead, behind = clock_skew.detect(operated(clocks=readings))
    assert ahead.title == "the clock of n07 is 1 min 30 s ahead of the file system's"
    assert behind.title == "the clock of n03 is 45 s behind the file system's"
    assert ahead.evidence == ("heartbeat of rank 0: n07 wrote 1 min 30 s ahead",)


def test_the_command_for_a_file_that_nobody_touched_is_safe_to_type() -> None:
    seen = operated(least_used=(LeastUsed("data", Path("/a b/$(rm)"), NOW - 29 * DAY),))
    assert only(seen, purge_near).fix == "touch -a -c '/a b/$(rm)'"


def test_an_end_that_the_scheduler_has_forgotten_is_told_from_its_log() -> None:
    gone = running(state=JobState.NODE_FAIL, end_time=NOW - HOUR, exit_code=0, derived_exit_code=134)
    seen = dataclasses.replace(idle(attempts=(wordless("1007"),)), ended_jobs=(gone,))
    (finding,) = [found for found in registry.detect_all(seen) if found.detector == "unfinished-end"]
    assert finding.evidence == ("1000_7: no end marker (NODE_FAIL, derived exit code 134)",)
    wordy = dataclasses.replace(seen, jobs=(dataclasses.replace(gone, derived_exit_code=None, exit_code=None),))
    assert [found.evidence for found in registry.detect_all(wordy) if found.detector == "unfinished-end"] == [
        finding.evidence
    ]
