"""What is said of nodes that are lost, silent or spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    BEGAN_WITH_TWO,
    FIFTY,
    HIDDEN,
    SWITCH,
    UNKNOWN,
    found,
    nodes_with,
    spared,
)
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState, Node, lost_words
from tr11ops.detect import registry
from tr11ops.detect.detector import Severity, by_cause
from tr11ops.detect.nodes_left import exclude_command, start_again
from tr11ops.observe.forecast import queue_coverage_seconds
from tr11ops.observe.observations import LaunchEnd
from tr11ops.runcard.card import load_card
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import HoldRecord, with_mark
from tr11ops.rundir.paths import Submission
from tr11ops.status.extra_observations import NodeUse, node_use
from tr11ops.watchdog.verdict import judge

HOST_ATTEMPT = replace(wordless("1007"), nodes=tuple(f"n{number:02d}" for number in range(1, 49)))


@pytest.mark.parametrize(("queued", "seconds"), [((), 0), ((pending((8,)),), 359_400.0)])
def test_a_task_without_its_batch_host_covers_nothing_and_is_not_the_last_of_the_queue(
    queued: tuple[Job, ...], seconds: float
) -> None:
    seen = snapshot(
        jobs=(running(), *queued),
        nodes=(Node("n01", frozenset({"down"})),),
        attempts=(HOST_ATTEMPT,),
    )
    assert queue_coverage_seconds(seen) == seconds
    assert [one.title for one in found(seen, "chain-end")] == [
        "the last task of the queue is waiting"
    ] * len(queued)


def test_a_job_that_was_put_back_has_not_the_batch_host_of_its_earlier_start() -> None:
    """Its number is the same, and what is on record of it may be of the nodes that it had."""
    down = (Node("n01", frozenset({"down"})),)
    job = running(nodes=tuple(f"n{number:02d}" for number in range(2, 50)))
    assert job.start_time is not None
    before = replace(HOST_ATTEMPT, start=job.start_time - HOUR)
    assert found(snapshot(jobs=(job,), nodes=down, attempts=(before,)), "node-lost") == []
    now = replace(HOST_ATTEMPT, start=job.start_time + 1)
    assert found(snapshot(jobs=(job,), nodes=down, attempts=(now,)), "node-lost")


@pytest.mark.parametrize(
    ("queued", "then"),
    [
        ((), ("tr11 launch --array 1-10",)),
        ((pending(),), ()),
        ((pending(reason="JobHeldUser"),), ("scontrol release 1000",)),
    ],
)
def test_a_lost_batch_host_with_nothing_queued_names_the_launch_too(
    queued: tuple[Job, ...], then: tuple[str, ...]
) -> None:
    """The repair cancels the job alone, and nothing would be left."""
    down = (Node("n01", frozenset({"down"})),)
    (lost,) = found(
        snapshot(jobs=(running(), *queued), nodes=down, attempts=(HOST_ATTEMPT,)), "node-lost"
    )
    assert (lost.fix, lost.then) == ("tr11 launch --repair", then)


def test_a_silent_batch_host_promises_nothing_and_has_no_cure_before_it_is_known_to_be_lost() -> (
    None
):
    silent = nodes_with({"n01": {"allocated", "not_responding"}})
    for queued in ((), (pending(),)):
        (one,) = found(snapshot(jobs=(running(), *queued), nodes=silent), "node-lost")
        assert (one.severity, one.fix, one.by_itself) == (Severity.WARNING, "", "")
        assert one.title == (
            "n01, which runs the batch script of job 1000_7, does not answer the scheduler"
        )
        assert one.evidence[1].startswith("its workers: training, last sign of life ")
        behind = "behind it is queued: job 1000_[8-10%1]"
        nothing = "nothing is queued behind it: `tr11 launch --array 1-10 --after 1000` queues more"
        assert one.evidence[2].endswith(behind if queued else nothing)


@pytest.mark.parametrize("state", ["down", "not_responding"])
def test_a_spare_that_is_lost_trains_nothing_and_needs_no_one(state: str) -> None:
    """One that trains, or that the launch before was lost by, is told as before."""
    nodes = (Node("n50", frozenset({"allocated", state})),)
    given = changed(spared(), nodes=nodes, launch_nodes=FIFTY[:48])
    (spare,) = found(given, "node-lost")
    assert "n50, a spare" in spare.title and (spare.severity, spare.fix) == (Severity.WARNING, "")
    assert spare.by_itself.startswith("No rank runs there.") and len(spare.evidence) == 1
    blamed = (LaunchEnd("1007", 1, NOW, "n50: lost to the scheduler", blamed=("n50",)),)
    for other in (
        changed(given, launch_nodes=FIFTY[2:]),
        changed(given, launch_ends=blamed),
        changed(given, launch_nodes=UNKNOWN),
    ):
        (one,) = found(other, "node-lost")
        assert "a spare" not in one.title and "The run goes on" in one.by_itself.replace(
            "If it is lost, the", "The"
        )


def test_a_lost_batch_host_that_another_job_sees_to_is_one_warning_without_a_command() -> None:
    """Its zombie follows from it, and was CRITICAL beside it, with a command that was not needed."""
    following = running(
        job_id="1000_8", raw_id="1008", task_id=8, nodes=("n49", "n50"), start_time=NOW - 5.0
    )
    seen = snapshot(
        jobs=(running(), following),
        nodes=nodes_with({"n01": {"down"}}),
        attempts=(HOST_ATTEMPT,),
        heartbeats=beats(age=HOUR),
        steps=(),
    )
    (told,) = [one for one in by_cause(registry.detect_all(seen)) if one.detector == "node-lost"]
    assert [one.detector for one in told.consequences] == ["zombie"]
    assert (told.severity, told.fix, told.then) == (Severity.WARNING, "", ())
    assert told.by_itself.startswith(
        "Job 1000_8, which has its own nodes, ends job 1000_7 before it trains, and excludes n01"
    )
    assert "should job 1000_8 not come to train, `tr11 launch --repair`" in told.evidence[1]
    for without in (
        replace(seen, jobs=(running(),)),
        replace(seen, jobs=(running(), replace(following, array_id="2000"))),
        replace(seen, jobs=(running(), replace(following, state=JobState.COMPLETING))),
        replace(seen, steps=steps(1, 31220, "1008", 1.0)),
    ):
        findings = by_cause(registry.detect_all(without))
        (told,) = [one for one in findings if one.detector == "node-lost"]
        assert (told.severity, told.fix) == (Severity.CRITICAL, "tr11 launch --repair")
        assert told.by_itself == "", "no job ends it that is of another launch, leaves or trains"


NEXT_TASK = running(job_id="1000_8", raw_id="1008", task_id=8, nodes=("n49",))


HELD_TASKS = pending(reason="JobHeldUser")


HELD_BY_US = HoldRecord("1000", "tr11", NOW - 60, "n07 is lost", is_for_fault=True)


RUNS, STARTS = (
    f"The run goes on in job {job} by itself: there is nothing to type."
    for job in ("1000_8", "1000_[8-10%1], which is queued,")
)


# what is queued when the job without its host has ended; what is said then, and what is to be typed
AFTER_ITS_HOST: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("another task runs", {"jobs": (NEXT_TASK, pending())}, RUNS, []),
    ("it leaves", {"jobs": (replace(NEXT_TASK, state=JobState.COMPLETING), pending())}, STARTS, []),
    ("tasks wait", {"jobs": (pending(),)}, STARTS, []),
    ("tr11 holds them", {"jobs": (HELD_TASKS,), "holds": (HELD_BY_US,)}, "", ["tr11 resume"]),
    ("a person does", {"jobs": (HELD_TASKS,)}, "", ["scontrol release 1000"]),
    ("none can ever start", {"jobs": (pending(reason="DependencyNeverSatisfied"),)}, "", ["tr11 launch --repair"]),
    ("none is there", {"jobs": ()}, "", ["tr11 launch --array 1-10"]),
    ("the run is stopped", {"jobs": (), "kill_switch": SWITCH}, "", []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "says", "typed"),
    [row[1:] for row in AFTER_ITS_HOST],
    ids=[row[0] for row in AFTER_ITS_HOST],
)
def test_what_follows_a_job_that_ended_with_its_host_is_what_the_queue_is_now(
    queued: dict[str, Any], says: str, typed: list[str]
) -> None:
    """A launch was advised where held tasks were queued, and no word said that what waits goes on."""
    unseen = {"attempts": (HOST_ATTEMPT,), "heartbeats": (), "steps": ()}
    base = snapshot(nodes=nodes_with({"n01": {"down"}}), **unseen)
    (told,) = found(changed(base, **queued), "node-lost")
    assert told.title.endswith("has lost n01, which ran its batch script, and has ended")
    assert (told.by_itself, [line for line in (told.fix, *told.then) if line]) == (says, typed)


@pytest.mark.parametrize(
    ("state", "signal", "is_lost"),
    [
        (JobState.FAILED, None, False),
        (JobState.COMPLETED, None, False),
        (JobState.FAILED, 9, True),
        (JobState.NODE_FAIL, None, True),
        (JobState.CANCELLED, None, True),
    ],
)
def test_a_node_that_is_lost_later_did_not_end_the_script_that_it_ran(
    state: JobState, signal: int | None, is_lost: bool
) -> None:
    """The host of an attempt without an end marker died two minutes after it: its mail blamed it."""
    code = None if signal else 1
    over = replace(NEXT_TASK, job_id="1000_7", raw_id=HOST_ATTEMPT.job_id, state=state)
    over = replace(over, exit_code=code, exit_signal=signal)
    seen = snapshot(
        jobs=(over, pending()),
        nodes=nodes_with({"n01": {"down"}}),
        attempts=(HOST_ATTEMPT,),
        heartbeats=(),
        steps=(),
    )
    assert bool(found(seen, "node-lost")) is is_lost


def test_a_lost_node_promises_no_task_that_is_held() -> None:
    nodes = (*nodes_with({"n07": {"allocated", "down"}}), Node("n49", frozenset({"idle"})))
    (one,) = found(snapshot(jobs=(running(), HELD_TASKS), nodes=nodes), "node-lost")
    assert one.by_itself.endswith(
        "on a spare, if the attempt has one; what is queued does not start by itself."
    )
    silent = nodes_with({"n01": {"allocated", "not_responding"}})
    (host,) = found(snapshot(jobs=(running(), HELD_TASKS), nodes=silent), "node-lost")
    assert host.evidence[2].endswith(
        "what is queued behind it does not start by itself: `scontrol release 1000`"
    )


SPARED = running(nodes=FIFTY, node_count=50)


GOES_ON = "job 1000_[8-10%1]"


NO_SPARE: list[tuple[str, dict[str, Any], str]] = [
    ("both are there", {"nodes": spared().nodes}, ""),
    ("one is left", {"nodes": spared("n50").nodes}, ""),
    ("none is", {}, f"behind it is queued: {GOES_ON}"),
    ("and nothing is queued", {"jobs": (SPARED,)}, "nothing is queued behind it: `tr11 launch --array 1-10 --after 1000` queues more"),
    ("and what is queued is held", {"jobs": (SPARED, HELD_TASKS)}, "does not start by itself: `scontrol release 1000`"),
    ("Slurm took them out of the job", {"jobs": (replace(SPARED, nodes=FIFTY[:48]), pending())}, f"behind it is queued: {GOES_ON}"),
    ("it began without one", {"attempts": (replace(BEGAN_WITH_TWO, nodes=FIFTY[:48]),), "jobs": (running(), pending()), "nodes": spared().nodes}, ""),
    ("it leaves", {"jobs": (replace(SPARED, state=JobState.COMPLETING), pending())}, ""),
    ("its nodes are unknown", {"nodes": UNKNOWN}, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queue", "behind"), [row[1:] for row in NO_SPARE], ids=[row[0] for row in NO_SPARE]
)
def test_the_last_spare_that_is_gone_is_told_with_what_the_next_loss_does(
    queue: dict[str, Any], behind: str
) -> None:
    """No word was said: the next loss ended an attempt with which all seemed well."""
    said = found(spared("n07", "n50", **queue), "no-spare")
    assert bool(said) is bool(behind)
    for one in said:
        assert (one.severity, one.subject) == (Severity.INFO, "1000_7")
        assert one.title == "job 1000_7 runs on without a spare node: at the next loss it ends"
        assert one.evidence[-1].endswith(behind)


def test_where_the_workers_have_ended_nothing_runs_on_without_a_spare() -> None:
    over = spared("n07", "n50", heartbeats=beats(60.0, "ended"))
    assert found(over, "no-spare") == [] != found(spared("n07", "n50"), "no-spare")


def test_a_node_excluded_while_it_trains_is_not_lost_and_the_advice_goes_on_to_the_next_step() -> (
    None
):
    """The first line was to exclude it, which was done, and it was told as lost."""
    given = spared("n50", exclusions=(Exclusion("n07", "slow", "ana"),), launch_nodes=FIFTY[:48])
    (one,) = found(given, "no-spare")
    assert "lost: n50; excluded while it trains there: n07" in one.evidence[0]
    assert node_use(
        spared(exclusions=known(given.exclusions, ()), launch_nodes=FIFTY[:48])
    ) == NodeUse(48, 2, 1)
    stop, *_ = start_again(given, "n07")
    assert exclude_command(given, "n07", "slow") == stop and "kill --wait" in stop
    assert "nodes exclude n08" in exclude_command(given, "n08", "slow")


def test_what_the_scheduler_says_now_of_a_blamed_node_is_told_with_the_end() -> None:
    end = replace(wordless("1007"), nodes=FIFTY, cause="node", blamed=("n07",))
    given = idle(attempts=(end,), nodes=spared("n07", "n08").nodes)
    (one,) = found(given, "unfinished-end")
    assert [line for line in one.evidence if "scheduler says" in line] == [
        "the scheduler says now: n07: down"
    ]


def test_a_lost_node_that_was_the_last_spare_is_told_with_it() -> None:
    findings = registry.detect_all(spared("n07", "n50"))
    told = [one for one in by_cause(findings) if one.detector == "node-lost"]
    assert [one.detector for one in told[0].consequences] == ["no-spare"]


@pytest.mark.parametrize(
    ("queued", "words"),
    [((pending(),), "in the next queued task"), ((), "if the attempt has one; nothing is queued")],
)
@pytest.mark.parametrize("state", ["down", "not_responding"])
def test_a_node_that_may_be_lost_promises_no_next_task_where_nothing_is_queued(
    queued: tuple[Job, ...], words: str, state: str
) -> None:
    nodes = (*nodes_with({"n07": {"allocated", state}}), Node("n49", frozenset({"idle"})))
    (one,) = found(snapshot(jobs=(running(), *queued), nodes=nodes), "node-lost")
    assert words in one.by_itself and "may run on" not in one.title
    (last,) = found(snapshot(jobs=(running(), *queued), nodes=nodes[:-1]), "node-lost")
    assert "does not go on by itself: too few nodes are left for it." in last.by_itself


@pytest.mark.parametrize("why", [lost_words(["n06"]), "n06: its agent does not answer"])
@pytest.mark.parametrize("states", [{"allocated", "not_responding"}, {"down", "not_responding"}])
def test_a_node_that_the_run_went_on_without_is_said_to_be_lost(states: set[str], why: str) -> None:
    """Also where the launch ended before the scheduler had noticed anything."""
    nodes = (
        *(node for node in snapshot().nodes if node.name != "n06"),
        Node("n06", frozenset(states)),
    )  # type: ignore[union-attr]
    end = LaunchEnd("1007", 1, NOW - 600, why, "starting again", ("n06",))
    (finding,) = found(snapshot(nodes=nodes, launch_ends=(end,)), "node-lost")
    assert (
        finding.title == "job 1000_7 has lost n06, and went on without it at 2022-05-01 11:50 UTC"
    )
    assert (finding.fix, finding.since) == ("", NOW - 600)
    assert finding.by_itself == "There is nothing to type."
    (before,) = found(snapshot(nodes=nodes, launch_ends=(end,), steps=steps(age=HOUR)), "node-lost")
    assert "went on" not in before.title, "nothing is trained since"


def test_many_excluded_nodes_date_from_the_last_of_them() -> None:
    listed = tuple(
        Exclusion(node=f"n{number:02d}", since=NOW - age, owner="tr11")
        for number, age in ((1, DAY), (2, 60))
    )
    nodes = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 51))
    (finding,) = found(snapshot(nodes=nodes, exclusions=listed), "exclusion-cap")
    assert finding.since == NOW - 60


# ---------------------------------------------------------------------------
# What is said of a queue: what waits, for whom, and what covers the next days.


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


@pytest.mark.parametrize("by_card", [False, True])
def test_what_can_never_start_for_want_of_nodes_is_one_incident_with_the_cure_first(
    tmp_path: Path, by_card: bool
) -> None:
    """Whether the node is on the run's list, or the card excludes it and no queued job does yet."""
    nodes = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 49))
    listed = (Exclusion(node="n03", since=NOW, owner="ann"),)
    seen = idle(jobs=(pending(reason="BadConstraints"),), nodes=nodes, exclusions=listed)
    if by_card:
        card = load_card(write_card(tmp_path), ['slurm.exclude=["n[03-03]"]'], {})
        seen = with_facts(changed(seen, exclusions=()), source=card)
    seen = with_facts(seen, nodes=46, allocated_nodes=48)
    cure = "tr11 launch --replace --set slurm.spare_nodes=1"
    told = [one for one in by_cause(registry.detect_all(seen)) if one.severity is Severity.CRITICAL]
    assert [(one.detector, one.fix) for one in told] == [("nodes-short", cure)]
    (dead,) = found(seen, "dead-chain")
    assert dead.fix == cure
    (other,) = found(idle(jobs=(pending(reason="BadConstraints"),)), "dead-chain")
    assert (other.fix, other.fault) == ("tr11 launch --repair", "")


@pytest.mark.parametrize(
    ("states", "since", "reason", "is_short"),
    [
        ({"down"}, 2.0, "Not responding", False),
        ({"down"}, 120.0, "Not responding", True),
        ({"down", "not_responding"}, 2.0, "Not responding", True),
        ({"down"}, 2.0, "bad GPU", True),
    ],
)
def test_nodes_that_slurm_lost_a_moment_ago_and_that_answer_again_are_not_short(
    states: set[str], since: float, reason: str, is_short: bool
) -> None:
    """A frozen node takes others with it for seconds, on 24.11."""
    lost = tuple(
        Node(f"n{number:02d}", frozenset(states), reason, reason_time=NOW - since)
        for number in range(1, 49)
    )
    told = found(idle(jobs=(pending(),), nodes=lost), "nodes-short")
    assert bool(told) is is_short


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
