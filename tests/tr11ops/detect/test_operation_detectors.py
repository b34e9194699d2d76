"""Detectors of the operation around a run: queue, copies, disks, purges, exclusions, periodic jobs,
clocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.operation_table import (
    BAD,
    OPERATION,
    SUBMITTED,
    TABLE,
    UNDECIDED,
    UNKNOWN,
    WRONG,
    clock,
    excluded,
    facts,
    nodes,
    operated,
    queued,
    usage,
)
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    changed,
    checkpoints,
    ended,
    facts_with,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect import registry
from tr11ops.detect.detector import Detector, Finding, Severity, by_cause
from tr11ops.detect.nodes import exclusion_cap
from tr11ops.detect.nodes_left import start_next
from tr11ops.detect.numbers import silent_corruption
from tr11ops.detect.queued_work import held, limit_reached, reservation_ended
from tr11ops.detect.saved import checkpoint_overdue
from tr11ops.detect.site import nodes_short, queued_too_long
from tr11ops.detect.storage import filesystem_full, purge_near
from tr11ops.detect.watch import clock_skew
from tr11ops.observe.observations import FolderRoom, LeastUsed, TrainingEvent, UnwritableDirectory
from tr11ops.observe.snapshot import Checkpoint, Checkpoints, Snapshot
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.exclusion import KEY, Exclusion
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations, NodeUse, node_use
from tr11ops.status.screen import node_rows
from tr11ops.watchdog.verdict import judge
from trainer.contract.units import size


def test_a_clean_operation_has_no_findings() -> None:
    assert registry.detect_all(operated()) == ()


def test_a_card_that_asks_for_nothing_is_never_told_anything() -> None:
    bare = snapshot(
        submissions=(SUBMITTED,),
        usage=(usage(99.0),),
        least_used=(LeastUsed("data", Path("/a"), 0.0),),
    )
    spoken = {finding.detector for finding in registry.detect_all(bare)}
    assert not spoken & {detector.name for detector in OPERATION}


def test_a_wrong_node_is_named_with_rank_gpu_and_exclusion() -> None:
    (finding,) = silent_corruption.detect(operated(corruptions=WRONG))
    assert (finding.subject, finding.title) == ("n07", "n07 computes wrongly")
    assert finding.evidence == (
        "iteration 31000: rank 25 on n07 (GPU 1) has another result",
        "last found 1 h 00 min ago",
    )
    assert finding.fix.startswith("tr11 nodes exclude") and "exclude n07 --reason" in finding.fix
    titles = [found.title for found in silent_corruption.detect(operated(corruptions=UNDECIDED))]
    assert titles == [
        "n07 or another node computes wrongly",
        "n08 or another node computes wrongly",
    ]


def test_a_bad_node_that_the_cap_keeps_is_named_and_no_spare() -> None:
    held = running(nodes=tuple(f"n{number:02d}" for number in range(1, 51)), node_count=50)
    seen: dict[str, Any] = {
        "exclusions": (),
        "nodes": nodes(50),
        "jobs": (held, pending(node_count=50)),
        "launch_ends": BAD,
    }
    launched = tuple(node for node in held.nodes if node not in {"n20", "n50"})
    seen["launch_nodes"] = launched
    below = operated(**{**seen, "jobs": (held, pending())})
    assert node_use(below) == NodeUse(48, 1, 0), "its attempt never uses it again"
    capped = operated(facts=facts(allocated_nodes=50), **seen)
    assert node_use(capped) == NodeUse(48, 1, 0)
    (finding,) = exclusion_cap.detect(capped)
    assert finding.subject == "n20" and finding.title.startswith(
        "n20 was found bad and is not excluded"
    )
    assert "Xid 79 on n20" in finding.evidence and finding.fix.endswith("nodes check n20")
    shown = status_of(capped, (), judge(capped, ()), ExtraObservations())
    ((_, text, _),) = node_rows(shown)
    assert text == "48 used, 1 spare; none excluded; bad but not excluded: n20"


def test_the_disk_is_not_well_before_the_next_save_fits() -> None:
    """One incident from the last byte to the room for a save; what helps makes room, and a save is
    then typed.
    """
    full = operated(
        shut_folders=(UnwritableDirectory("/run", "no byte is left", True),),
        save_room=FolderRoom("/run", 0),
    )
    freed = operated(save_room=FolderRoom("/run", 216 * 2**10))
    (first,), (second,) = (filesystem_full.detect(seen) for seen in (full, freed))
    assert first.identity == second.identity == ("/run",)
    assert (
        second.title
        == "/run has no room for the next save: 221.2 k bytes are free, the last one has 2.5 T"
    )
    assert "checkpoints prune --keep 2" in first.fix and first.fix == second.fix


@pytest.mark.parametrize(
    ("kept", "helps"), [(3, "tr11 checkpoints prune --keep 2"), (2, "du -xhd 2 /run")]
)
def test_a_full_disk_names_what_fills_it_and_what_makes_room(kept: int, helps: str) -> None:
    """Where a resume needs all checkpoints that there are, pruning them would free nothing."""
    newest = Checkpoint(300, True, NOW - 60, 2 * 2**30, "sizes")
    seen = operated(
        checkpoints=Checkpoints(tuple(range(300, 300 - kept, -1))[::-1], 300, (newest,)),
        shut_folders=(UnwritableDirectory("/run", "no byte is left", True),),
        save_room=FolderRoom("/run", 0, 8 * 2**30),
    )
    seen = replace(seen, run=facts_with(seen.run, directory=Path("/run")))
    (told,) = filesystem_full.detect(seen)
    assert told.fix == helps
    share, others = (
        f"{2 * kept}.0 GiB of the 8.0 GiB there",
        f"{8 - 2 * kept}.0 GiB are no checkpoints",
    )
    assert f"the run's {kept} checkpoints are about {share}" in told.evidence
    assert any(line.startswith(others) for line in told.evidence)
    assert (
        "the training goes on meanwhile, and saves again by itself once there is room"
        in told.evidence
    )
    (elsewhere,) = filesystem_full.detect(
        changed(seen, save_room=FolderRoom("/fast", 2**40, 2**41))
    )
    assert not any("checkpoints" in line for line in elsewhere.evidence)


def test_where_most_of_a_full_disk_is_no_checkpoint_the_mail_shows_how_to_find_it() -> None:
    """Pruning alone was mailed as the cure, and the disk was full again six minutes later."""
    newest = Checkpoint(300, True, NOW - 60, 2**30, "sizes")
    seen = operated(
        checkpoints=Checkpoints((298, 299, 300), 300, (newest,)),
        shut_folders=(UnwritableDirectory("/run", "no byte is left", True),),
        save_room=FolderRoom("/run", 0, 8 * 2**30),
    )
    (told,) = filesystem_full.detect(seen)
    [line] = [line for line in told.evidence if "no checkpoints" in line]
    assert line.startswith("5.0 GiB, most of it, are no checkpoints") and line.endswith(
        "`du -xhd 2 /run`"
    )
    assert "prune --keep 2" in told.fix


@pytest.mark.parametrize(
    ("largest", "fix", "then"),
    [
        (
            {"/run/core-dumps/core.python.4711": 5 * 2**30},
            "rm -ri /run/core-dumps/core.python.4711",
            True,
        ),
        ({"/run/someone's copy": 5 * 2**30}, """du -xhd 2 '/run/someone'"'"'s copy'""", True),
        (
            {"/run/small-logs/logs/main": 5 * 2**30},
            "tr11 checkpoints prune --keep 2",
            False,
        ),  # the run's own
        ({"/run/core.1": 2**29}, "tr11 checkpoints prune --keep 2", False),  # pruning frees more
    ],
)
def test_what_frees_the_most_of_a_full_disk_is_typed_first(
    largest: dict[str, int], fix: str, then: bool
) -> None:
    """Pruning was mailed first though a foreign file was most of the disk."""
    newest = Checkpoint(300, True, NOW - 60, 2**30, "sizes")
    seen = operated(
        checkpoints=Checkpoints((298, 299, 300), 300, (newest,)),
        shut_folders=(UnwritableDirectory("/run", "no byte is left", True),),
        save_room=FolderRoom("/run", 0, 8 * 2**30, largest, is_all_seen=False),
    )
    (told,) = filesystem_full.detect(
        replace(seen, run=facts_with(seen.run, directory=Path("/run")))
    )
    assert (told.fix, told.then) == (fix, ("tr11 checkpoints prune --keep 2",) * then)
    ((path, held),) = largest.items()
    whose = "of this run" if "logs" in path else "not tr11's"
    assert f"{path}: {size(held)}, {whose}" in told.evidence
    assert "what else is large there is not known: it was not looked at to the end" in told.evidence


@pytest.mark.parametrize(
    ("folder", "kept"),
    [
        ("/run", "alerts, requests and the trainer's own records"),
        ("/run/state", "alerts, requests and the trainer's own records"),
        ("/run/checkpoints", "checkpoints"),
        ("/fast/checkpoints/main", "checkpoints"),
        ("/run/small-logs/logs", "the log"),
    ],
)
@pytest.mark.parametrize("is_full", [True, False])
def test_what_is_kept_on_a_file_system_that_takes_nothing_is_said_of_that_one(
    folder: str, kept: str, is_full: bool
) -> None:
    """A mount of the checkpoints alone was said to hold the alerts."""
    seen = operated(shut_folders=(UnwritableDirectory(folder, "no byte is left", is_full),))
    (told,) = filesystem_full.detect(
        replace(seen, run=facts_with(seen.run, directory=Path("/run")))
    )
    assert told.evidence[0] == f"{kept} are kept there".replace("the log are", "the log is")


def test_a_save_that_a_full_disk_has_cost_follows_from_the_disk() -> None:
    why = (
        "[Errno 28] No space left on device: '/run/checkpoints/main/global_step31300/weights/0.bin'"
    )
    event = TrainingEvent(
        "save-failed", NOW - 60, "1007", {"step": 31_300, "why": why, "node": "", "said": ""}
    )
    base = snapshot(jobs=(running(), pending()))
    full = {"shut_folders": (UnwritableDirectory("/run", "no byte is left", True),)}
    (told,) = [
        one
        for one in by_cause(registry.detect_all(operated(base, events=(event,), **full)))
        if one.consequences
    ]
    assert told.detector == "filesystem-full" and [one.detector for one in told.consequences] == [
        "checkpoint-overdue"
    ]
    assert told.consequences[0].then == ("tr11 checkpoint-now --wait",), "once there is room"
    (late,) = checkpoint_overdue.detect(operated(checkpoints=checkpoints(30_800), **full))
    assert late.fault == "storage", "what failed could not even be noted"
    (alone,) = checkpoint_overdue.detect(operated(base, events=(event,)))
    assert "checkpoints prune --keep 2" in alone.fix and alone.then == (
        "tr11 checkpoint-now --wait",
    )
    other = replace(event, values={"step": 31_300, "why": "EIO", "node": "n2", "said": "n2 alone"})
    (node,) = checkpoint_overdue.detect(operated(base, events=(other,)))
    assert (node.fault, node.fix) == ("", "tr11 checkpoint-now --wait")


@pytest.mark.parametrize(
    ("free", "reached", "severity"),
    [(None, 31_389, "CRITICAL"), (0, 31_389, "CRITICAL"), (10**15, 31_389, "WARNING"), (10**15, 31_400, "CRITICAL")],
    ids=["room unknown", "no room", "room again", "and the save that was due did not come"],
)  # fmt: skip
@pytest.mark.parametrize("is_noted", [True, False])
def test_where_there_is_room_again_no_checkpoint_is_critical_before_the_next_save_is_due(
    free: int | None, reached: int, severity: str, is_noted: bool
) -> None:
    """The fault is noted, or only the lines of the time are missing, which the full disk has cost."""
    why = "[Errno 28] No space left on device: '/run'"
    event = TrainingEvent("save-failed", NOW - 60, "1007", {"step": 31_300, "why": why})
    lines = steps(400, last=reached)
    found = operated(
        snapshot(
            jobs=(running(),), events=(event,) * is_noted,
            steps=tuple(step for step in lines if is_noted or not 31_250 < step.record.iteration < 31_385),
        ),
        checkpoints=checkpoints(31_000),
        save_room=None if free is None else FolderRoom("/run", free),
    )  # fmt: skip
    (told,) = checkpoint_overdue.detect(found)
    assert told.severity.name == severity, told
    is_due_later = "; there is room again, and the next save is due at iteration 31400"
    assert (is_due_later in told.title) is (severity == "WARNING")
    if severity == "WARNING":
        assert (told.fix, told.fault) == ("tr11 checkpoint-now --wait", "")


def test_at_the_cap_it_is_said_how_many_nodes_an_attempt_may_still_lose() -> None:
    """With spares the next bad node stops nothing: the attempt goes on without it."""
    held = running(nodes=tuple(f"n{number:02d}" for number in range(3, 53)), node_count=50)
    full: dict[str, Any] = {"exclusions": excluded(2), "facts": facts(allocated_nodes=50)}
    said = "2 nodes are excluded, no more may be: "
    (waits,) = exclusion_cap.detect(operated(jobs=(pending(node_count=50),), **full))
    assert waits.title == said + "an attempt can lose 2 nodes, and stops at the next"
    (trains,) = exclusion_cap.detect(operated(jobs=(held,), **full))
    assert trains.title == said + "the attempt can lose 2 more nodes, and stops at the next"
    gone = tuple(
        replace(node, states=frozenset({"down"})) if node.name == "n07" else node
        for node in nodes()
    )
    (trains,) = exclusion_cap.detect(operated(jobs=(held,), nodes=gone, **full))
    assert trains.title == said + "the attempt can lose 1 more node, and stops at the next"
    (tight,) = exclusion_cap.detect(operated(exclusions=excluded(4)))
    assert tight.title == "4 nodes are excluded, no more may be: the next bad node stops the run"


WITH_STATE = [
    ("all answer", "", {}, "tr11 nodes include n01"),
    ("the first is down", "", {"n01": "down"}, "tr11 nodes include n02"),
    ("the first is silent", "", {"n01": "idle not_responding"}, "tr11 nodes include n02"),
    ("the first fails", "", {"n01": "idle fail"}, "tr11 nodes include n02"),
    ("its state is not known", "", {"n01": "unknown"}, "tr11 nodes include n02"),
    ("all are down", "", dict.fromkeys(("n01", "n02", "n03", "n04"), "down"), "tr11 nodes list --excluded --report note.txt"),
    ("a person has just excluded one", "n01", {}, "tr11 nodes include n02"),
    ("a person has just excluded all", "n01 n02 n03 n04", {}, ""),
    ("and one of these is down", "n01 n02 n03 n04", {"n01": "down not_responding"}, ""),
    ("the others are down", "n01 n02", {"n03": "down", "n04": "down"}, "tr11 nodes list --excluded --report note.txt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("by_person", "states", "fix"),
    [row[1:] for row in WITH_STATE],
    ids=[row[0] for row in WITH_STATE],
)
def test_at_the_cap_only_what_can_come_back_is_asked_back(
    by_person: str, states: dict[str, str], fix: str
) -> None:
    """Neither a node that is gone, silent or failing now, nor what a person excluded on purpose
    within the day.
    """
    entries = tuple(
        replace(entry, owner="ana", since=NOW - 60) if entry.node in by_person.split() else entry
        for entry in excluded(4)
    )
    there = tuple(
        replace(node, states=frozenset(states.get(node.name, "idle").split())) for node in nodes()
    )
    (finding,) = exclusion_cap.detect(operated(exclusions=entries, nodes=there))
    assert finding.fix == fix
    why = [line for line in finding.evidence if line.startswith("none can come back now: n01 ")]
    assert bool(why) is ("include" not in fix)


OFF, TAKE_BACK, GO_ON = "tr11 nodes exclude n20 --force", "tr11 nodes include n01", "tr11 resume"
# what is seen when the tasks are held because n20 cannot be excluded; what is to be typed then
AT_THE_CAP: list[tuple[str, dict[str, Any], list[str]]] = [
    ("others are free", {"nodes": nodes(60), "exclusions": excluded(6)}, [OFF, GO_ON]),
    ("an attempt needs it", {}, [TAKE_BACK, OFF, GO_ON]),
    ("it is down", {"nodes": nodes(down=("n20",))}, [TAKE_BACK, GO_ON]),
    ("it is down, others are free", {"nodes": nodes(60, down=("n20",)), "exclusions": excluded(6)}, [GO_ON]),
    ("someone excluded it", {"nodes": nodes(60), "exclusions": (*excluded(6), Exclusion("n20", owner="ana", since=NOW))}, [GO_ON]),
    ("no other can come back", {"nodes": nodes(down=("n01", "n02", "n03", "n04"))}, ["tr11 nodes check n20", GO_ON]),
    ("none can", {"nodes": nodes(down=("n01", "n02", "n03", "n04", "n20"))}, ["tr11 nodes list --excluded --report note.txt", GO_ON]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "typed"), [row[1:] for row in AT_THE_CAP], ids=[row[0] for row in AT_THE_CAP]
)
@pytest.mark.parametrize("has_attempt", [True, False], ids=["", "by the hold alone"])
def test_tasks_that_the_cap_holds_go_on_by_what_is_typed(
    seen: dict[str, Any], typed: list[str], has_attempt: bool
) -> None:
    """The mail had `tr11 diagnose`, which makes no room and lets no task start."""
    why = f"n20 cannot be excluded: of the partition's 52 nodes at most 4 may be excluded ({KEY})"
    failed = replace(wordless("1007", 60.0), cause="node", held_because=why)
    now = operated(
        jobs=(pending(reason="JobHeldAdmin"),),
        attempts=(failed,) if has_attempt else (),
        holds=(HoldRecord("1000", "tr11", NOW - 60, why, is_for_fault=True),),
        launch_ends=BAD,
        **{"exclusions": excluded(4), **seen},
    )
    told, *others = by_cause(registry.detect_all(now))
    after = (*told.then, *(line for one in told.consequences for line in one.then))
    commands = list(dict.fromkeys((told.fix, *after)))
    assert [line.partition(" --reason")[0] for line in commands] == typed
    assert not {"exclusion-cap", "held"} & {one.detector for one in others}


def test_what_a_person_excluded_days_ago_may_be_asked_back() -> None:
    entries = tuple(replace(entry, owner="ana") for entry in excluded(4))
    (finding,) = exclusion_cap.detect(operated(exclusions=entries))
    assert finding.fix == "tr11 nodes include n01"


def test_where_no_attempt_can_start_none_can_lose_a_node() -> None:
    waiting = queued(exclusions=excluded(4), nodes=nodes(bad=3))
    (finding,) = exclusion_cap.detect(waiting)
    assert finding.title == "4 nodes are excluded, no more may be: too few are left for an attempt"
    (finding,) = exclusion_cap.detect(replace(waiting, nodes=nodes()))
    assert "can lose" in finding.title or "stops the run" in finding.title


def test_it_is_said_where_a_greater_percentage_would_help() -> None:
    (finding,) = exclusion_cap.detect(
        with_facts(
            operated(exclusions=excluded(1)), resilience=ResilienceSection(exclusion_cap_percent=0)
        )
    )
    assert (
        "so that more may be: resilience.exclusion_cap_percent = 2 in the card; for what is queued now,"
        " `tr11 launch --replace --set resilience.exclusion_cap_percent=2`"
    ) in finding.evidence
    room = ResilienceSection(exclusion_cap_percent=2)  # two of its nodes
    (finding,) = exclusion_cap.detect(with_facts(operated(exclusions=excluded(1)), resilience=room))
    assert finding.title == "1 node is excluded, one more may be"
    assert "resilience.exclusion_cap_percent = 4 in the card" in finding.evidence[-1], "for a third"
    (finding,) = exclusion_cap.detect(operated(exclusions=excluded(4)))
    needed = (
        "a greater resilience.exclusion_cap_percent would not help: an attempt needs all others"
    )
    assert needed in finding.evidence


def test_too_few_nodes_do_not_deny_the_attempt_that_trains() -> None:
    (finding,) = nodes_short.detect(operated(exclusions=excluded(2), nodes=nodes(bad=3)))
    assert finding.title.endswith("are needed: no further attempt can start")
    (finding,) = nodes_short.detect(queued(exclusions=excluded(2), nodes=nodes(bad=3)))
    assert finding.title.endswith("are needed: no attempt can start")


@pytest.mark.parametrize(
    ("seen", "detector", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_table(seen: Snapshot, detector: Any, expected: list[str]) -> None:
    found = list(detector.detect(seen))
    assert [finding.severity.name for finding in found] == expected
    assert all(finding.detector == detector.name and finding.title for finding in found)


def test_every_operation_detector_is_registered_and_documented() -> None:
    assert set(OPERATION) <= set(registry.DETECTORS)
    assert {row[2].name for row in TABLE if row[3]} >= {detector.name for detector in OPERATION}


@pytest.mark.parametrize("detector", OPERATION, ids=lambda detector: detector.name)
def test_what_a_detector_needs_is_what_it_looks_at(detector: Detector) -> None:
    """Each part hidden: blind; and silent wherever it spoke, where it cannot do without it."""
    spoken = [row[1] for row in TABLE if row[2] is detector and row[3]]
    for seen in spoken:
        for part in (*detector.needs, *detector.uses):
            hidden = changed(seen, **{part: UNKNOWN})
            assert detector.name in registry.unjudged_detectors(hidden)
            if part in detector.needs:
                assert detector.detect(hidden) == ()
    assert detector.name not in registry.unjudged_detectors(operated())


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


def test_a_limit_that_others_use_is_told_of_by_its_age() -> None:
    finding = only(queued("AssocGrpNodeLimit"), queued_too_long)
    assert "has waited for room below a limit for 2 h" in finding.title
    assert (
        "if it alone asks for more (`tr11 launch --replace --dry-run` says it)"
        in finding.evidence[2]
    )


def waiting(reason: str, start: float | None, **changes: Any) -> Job:
    values = {"submit_time": NOW - 60, "partition": "gpu_p5", "start_time": start, **changes}
    return pending(reason=reason, **values)


def test_a_start_that_is_expected_in_days_is_told_at_once() -> None:
    seen = queued(jobs=(waiting("Priority", NOW + 3 * DAY),))
    finding = only(seen, queued_too_long)
    assert (
        finding.title
        == "nothing trains: job 1000_[8-10%1] is not expected to start before 2022-05-04 12:00 UTC"
    )
    assert (finding.severity, finding.subject, finding.fix) == (
        Severity.WARNING,
        "1000",
        "tr11 nodes list",
    )
    verdict = judge(seen, (finding,))
    assert (
        verdict.why
        == "nothing runs now; job 1000_[8-10%1] (3 tasks) waits: Priority, expected to start in 3 d 0 h"
    )
    begins = only(
        queued(jobs=(waiting("BeginTime", NOW + 3 * DAY),), scheduler="slurm"), queued_too_long
    )
    assert begins.fix == "scontrol update JobId=1000 StartTime=now"
    assert begins.evidence[1] == "it may not start before its time, which is in 3 d 0 h"


@pytest.mark.parametrize(
    "jobs",
    [
        (waiting("Priority", NOW + HOUR / 2),),
        (waiting("Priority", None),),  # the scheduler does not say it
        (
            waiting("Priority", NOW + 3 * DAY),
            waiting("Resources", NOW + 60, job_id="2000", raw_id="2000"),
        ),
        (
            waiting("Priority", NOW + 60),
            waiting("Dependency", NOW + 3 * DAY, job_id="2000", raw_id="2000"),
        ),
    ],
    ids=["soon", "not told", "another starts before", "behind another"],
)
def test_a_start_that_is_not_far_or_not_known_is_no_finding(jobs: tuple[Job, ...]) -> None:
    assert list(queued_too_long.detect(queued(jobs=jobs))) == []


@pytest.mark.parametrize(
    ("detector", "reason"),
    [
        (held, "JobHeldAdmin"),
        (held, "SomeNewReason"),
        (limit_reached, "PartitionTimeLimit"),
        (reservation_ended, "ReservationDeleted"),
    ],
)
def test_what_is_worse_because_nothing_trains_says_so(detector: Detector, reason: str) -> None:
    """The mail that it has become worse had the headline of the one before it."""
    queue = pending(reason=reason)
    (first,) = detector.detect(snapshot(jobs=(running(), queue)))
    (worse,) = detector.detect(idle(jobs=(queue,)))
    assert (first.severity, worse.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert worse.title == f"nothing trains: {first.title}"


def test_who_holds_is_told_and_only_what_tr11_holds_is_resumed() -> None:
    other = pending(
        (11, 12), array_id="2000", raw_id="2000", job_id="2000_[11-12]", reason="JobHeldAdmin"
    )
    jobs = (pending(reason="JobHeldUser"), pending((9, 10), reason="JobHeldUser"), other)
    mine, theirs = held.detect(
        operated(jobs=jobs, holds=(HoldRecord("1000", "ben", NOW, "new data"),))
    )
    assert (mine.subject, mine.evidence, mine.fix) == (
        "1000",
        ("by ben, because: new data",),
        "tr11 resume",
    )
    assert (theirs.subject, theirs.evidence, theirs.fix) == ("2000", (), "scontrol release 2000")


def test_after_a_refusal_of_the_trainer_the_queue_takes_another_card() -> None:
    """Released as it is, the next task would be refused as well."""
    holds = (HoldRecord("1000", "tr11", NOW, "refused: the learning rate is another"),)
    jobs = (pending(reason="JobHeldUser"),)
    refused = (ended("1006", 60.0, "refused", launch=1), ended("1005", HOUR))
    (finding,) = held.detect(operated(idle(jobs=jobs, attempts=refused), holds=holds))
    assert finding.fix == "tr11 launch --replace"
    (finding,) = held.detect(
        operated(idle(jobs=jobs, attempts=(ended("1007", 30.0), *refused)), holds=holds)
    )
    assert finding.fix == "tr11 resume"  # another has trained since


@pytest.mark.parametrize(
    ("reason", "typed"),
    [
        ("ReservationDeleted", ("tr11 launch --replace",)),
        ("PartitionTimeLimit", ("scontrol show partition", "tr11 launch --replace")),
        ("BadConstraints", ("tr11 launch --replace --set slurm.spare_nodes=0",)),
        ("DependencyNeverSatisfied", ("tr11 launch --repair",)),
        ("JobHeldUser", ("tr11 launch --replace",)),
    ],
)
def test_what_starts_the_next_attempt_is_what_the_queue_s_own_finding_says(
    reason: str, typed: tuple[str, ...]
) -> None:
    """`launch --repair` leaves alone what waits for a person, and asks for as many nodes again."""
    holds = (HoldRecord("1000", "tr11", NOW, "refused: the learning rate is another"),)
    refused = (ended("1006", 60.0, "refused", launch=1), ended("1005", HOUR))
    changes: dict[str, Any] = {"attempts": refused} if reason == "JobHeldUser" else {}
    left = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 48))
    seen = operated(
        idle(jobs=(pending(reason=reason),), **changes),
        holds=holds if reason == "JobHeldUser" else (),
    )
    seen = with_facts(changed(seen, nodes=left), nodes=46, allocated_nodes=48)
    queue = {"dead-chain", "limit-reached", "reservation-ended", "held"}
    [own] = [one for one in registry.detect_all(seen) if one.detector in queue]
    commands = (own.fix, *own.then)
    assert start_next(seen) == commands
    assert all(map(str.startswith, commands, typed)) and len(commands) == len(typed)


def test_the_part_of_an_array_that_a_person_holds_is_a_finding() -> None:
    jobs = (
        pending((8,), job_id="1000_8", reason="JobHeldUser"),
        pending((9, 10), reason="JobHeldUser"),
    )
    mine, theirs = held.detect(
        operated(jobs=jobs, holds=(HoldRecord("1000_[9-10]", "ben", NOW, "new data"),))
    )
    assert (mine.subject, mine.fix) == ("1000", "tr11 resume")
    assert mine.title.startswith("nothing trains: job 1000_[9-10%1] is held")
    assert (theirs.subject, theirs.evidence, theirs.fix) == (
        "1000_8",
        (),
        "scontrol release 1000_8",
    )


def test_a_clock_that_is_wrong_is_named_with_its_host() -> None:
    readings = (clock("n07", 90.0), clock("n03", -45.0, what="heartbeat of rank 9"), clock("n01"))
    ahead, behind = clock_skew.detect(operated(clocks=readings))
    assert ahead.title == "the clock of n07 is 1 min 30 s ahead of the file system's"
    assert behind.title == "the clock of n03 is 45 s behind the file system's"
    assert ahead.evidence == ("heartbeat of rank 0: n07 wrote 1 min 30 s ahead",)


def test_the_command_for_an_untouched_file_is_safe_to_type() -> None:
    seen = operated(least_used=(LeastUsed("data", Path("/a $(rm)/b"), NOW - 29 * DAY),))
    assert only(seen, purge_near).fix == "find '/a $(rm)' -type f -exec touch -a -c {} +"


def test_an_end_that_slurm_has_forgotten_is_told_from_its_log() -> None:
    gone = running(
        state=JobState.NODE_FAIL, end_time=NOW - HOUR, exit_code=0, derived_exit_code=134
    )
    seen = changed(idle(attempts=(wordless("1007"),)), ended_jobs=(gone,))
    (finding,) = [
        found for found in registry.detect_all(seen) if found.detector == "unfinished-end"
    ]
    assert finding.evidence == (
        "1000_7: ended without an end marker: the scheduler says NODE_FAIL, a step of it was ended by SIGABRT (exit code 134)",
    )
    wordy = replace(seen, jobs=(replace(gone, derived_exit_code=None, exit_code=None),))
    assert [
        found.evidence for found in registry.detect_all(wordy) if found.detector == "unfinished-end"
    ] == [finding.evidence]


@pytest.mark.parametrize(
    ("owner", "hours", "severity"),
    [("ana", 1, "INFO"), ("ana", 25, "WARNING"), ("tr11", 1, "WARNING")],
)
def test_what_people_have_just_excluded_is_no_mail(owner: str, hours: int, severity: str) -> None:
    """The command has told them how many more may be; a day later, and of what tr11 excluded, it is
    a warning.
    """
    entry = Exclusion("n4", since=NOW - hours * HOUR, owner=owner, why="a doubt")
    nodes = tuple(Node(f"n{number}", frozenset({"idle"})) for number in range(5))
    given = operated(nodes=nodes, exclusions=(entry,), readmissions=())
    cap = ResilienceSection(exclusion_cap_percent=20)
    seen = with_facts(given, nodes=2, allocated_nodes=2, partition="", resilience=cap)
    (told,) = exclusion_cap.detect(seen)
    assert told.severity.name == severity
