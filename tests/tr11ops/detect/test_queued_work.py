"""What is said of a queue: what waits, for whom, and what covers the next days."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    HIDDEN,
    UNKNOWN,
    found,
)
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    ended,
    idle,
    pending,
    running,
    snapshot,
    with_facts,
)
from tr11ops.base.observed import known
from tr11ops.cluster.base import JobState, Node
from tr11ops.detect import registry
from tr11ops.detect.causes import by_cause
from tr11ops.detect.finding import Severity
from tr11ops.observe.forecast import queue_coverage_seconds
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import with_mark
from tr11ops.rundir.paths import Submission
from tr11ops.watchdog.verdict import judge


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
def test_a_run_that_is_down_is_launched_as_before_or_examined(
    array: str | None, scheduler: str, reason: str, typed: str
) -> None:
    last = Submission("t", "1000", scheduler, NOW, "ana", "h", "r", "main", array, 48, "hash")
    (finding,) = found(idle(submissions=(last,), attempts=(ended("1007", DAY, reason),)), "down")
    assert finding.fix == typed


def test_queue_coverage_counts_what_will_really_train() -> None:
    given = snapshot(
        jobs=(
            running(),
            pending((8, 9)),
            pending((3,), reason="JobHeldUser"),
            running(state=JobState.COMPLETED),
        )
    )
    assert queue_coverage_seconds(given) == 359_400.0 - 12 * HOUR + 2 * 359_400.0
    assert queue_coverage_seconds(snapshot(jobs=UNKNOWN)) is None


def test_of_jobs_that_never_began_the_newest_leads_whatever_the_scheduler_still_knows() -> None:
    """The alert's subject was the oldest; when Slurm forgot that one, a mail said `not cured`."""
    jobs = [
        running(
            job_id=f"1000_{task}",
            raw_id=f"100{task}",
            task_id=task,
            state=JobState.FAILED,
            start_time=NOW - age,
            end_time=NOW - age + 1.0,
        )
        for task, age in ((7, 300.0), (8, 200.0))
    ]
    for order in (jobs, jobs[::-1], jobs[1:]):
        given = snapshot(jobs=tuple(order), attempts=(), heartbeats=(), steps=())
        assert found(given, "unfinished-end")[0].subject == "1000_8"


def test_before_the_first_step_no_one_knows_whether_the_last_task_is_enough() -> None:
    """It was told, and "over" as soon as a step had shown that the task lasts to the end."""
    assert found(snapshot(jobs=(running(),), steps=()), "chain-end") == []
    endless = with_facts(snapshot(jobs=(running(),), steps=()), total_iterations=None)
    assert len(found(endless, "chain-end")) == 1


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_both_ends_of_a_changed_limit_are_told_in_one_form(scheduler: str) -> None:
    seen = with_facts(snapshot(scheduler=scheduler), exit_plan=ExitPlan(None, limit=101 * HOUR))
    (one,) = found(seen, "limit-changed")
    assert one.title.endswith(
        "ends job 1000_7 at 2022-05-05 04:00 UTC, the card says 2022-05-05 05:00 UTC"
    )


def test_what_can_never_start_for_want_of_nodes_is_one_incident_with_the_cure_first() -> None:
    nodes = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 49))
    listed = (Exclusion(node="n03", since=NOW, owner="ann"),)
    seen = idle(jobs=(pending(reason="BadConstraints"),), nodes=nodes, exclusions=listed)
    seen = with_facts(seen, nodes=46, allocated_nodes=48)
    cure = "tr11 launch --replace --set slurm.spare_nodes=1"
    told = [one for one in by_cause(registry.detect_all(seen)) if one.severity is Severity.CRITICAL]
    assert [(one.detector, one.fix) for one in told] == [("nodes-short", cure)]
    (dead,) = found(seen, "dead-chain")
    assert dead.fix == cure
    (other,) = found(idle(jobs=(pending(reason="BadConstraints"),)), "dead-chain")
    assert (other.fix, other.fault) == ("tr11 launch --repair", "")


@pytest.mark.parametrize("is_said", [True, False])
def test_a_closed_partition_wakes_someone_where_nothing_trains_and_says_so(is_said: bool) -> None:
    """The scheduler gives another reason of a part that waits for another one too: the nodes tell."""
    reason = "PartitionDown" if is_said else "Dependency"
    waits = pending(reason=reason, partition="gpu_p5")
    closed = tuple(
        replace(node, partitions=("gpu_p5",), shut_partitions=("gpu_p5",))
        for node in known(snapshot().nodes, ())
    )
    (finding,) = found(idle(jobs=(waits,), nodes=closed), "waits-for-site")
    assert finding.title == "the site has closed partition gpu_p5: nothing trains"
    assert finding.severity is Severity.CRITICAL
    seen = snapshot(jobs=(running(), waits), nodes=closed)
    (finding,) = found(seen, "waits-for-site")
    assert finding.title == (
        "nothing starts after job 1000_7 (until 2022-05-05 03:50 UTC at most): the site has closed"
        " partition gpu_p5"
    )
    assert finding.severity is Severity.WARNING, "what runs lasts days, and nothing comes after it"
    timeless = snapshot(jobs=(running(start_time=None), waits), nodes=closed)
    (unknown,) = found(timeless, "waits-for-site")
    assert "(until when it lasts is not known)" in unknown.title


def test_where_a_job_leaves_no_one_is_told_that_a_closed_queue_comes_next() -> None:
    leaving = running(state=JobState.COMPLETING)
    seen = snapshot(jobs=(leaving, pending(reason="PartitionDown", partition="gpu_p5")))
    why = judge(seen, registry.detect_all(seen)).why
    assert "comes next" not in why and "waits: the site has closed its partition" in why


@pytest.mark.parametrize(("kind", "is_to_be_released"), [("fault", True), ("switch", False)])
def test_what_a_task_held_that_found_no_directory_is_released_after_the_mount(
    kind: str, is_to_be_released: bool
) -> None:
    """What a person's switch holds is not: whether it is to go on is not known from here."""
    held = pending(
        reason="JobHeldAdmin", comment=with_mark("tr11:a@b", "nothing lies there", kind == "fault", NOW - 30)
    )  # fmt: skip
    (found,) = [
        one
        for one in registry.detect_all(idle(jobs=(held,), unmounted=HIDDEN))
        if one.detector == "directory-unseen"
    ]
    assert ("nothing trains" in found.title) is is_to_be_released
    assert ("tr11 resume" in found.then) is is_to_be_released and found.then[-1] == "tr11 pulse"
    if is_to_be_released:
        assert "what is queued is held, for 30 s now: nothing lies there" in found.evidence
