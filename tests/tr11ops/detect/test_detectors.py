"""Each detector: when it speaks, how loudly, and when it must keep silent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    BEGAN_WITH_TWO,
    FIFTY,
    HIDDEN,
    SWITCH,
    TABLE,
    UNKNOWN,
    nodes_with,
    spared,
)
from tests.tr11ops.detect.operation_cases import OPERATION
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
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState, Node, lost_words
from tr11ops.detect import registry
from tr11ops.detect.causes import by_cause
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.forecast import queue_coverage_seconds
from tr11ops.observe.snapshot import Attempt, Snapshot, Step
from tr11ops.observe.training import LaunchEnd, Phase, TrainingEvent
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.hold_store import HoldRecord, with_mark
from tr11ops.rundir.paths import Submission
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.end_marker import EndMarker
from trainer.contract.record import IterationRange


def found(given: Snapshot, detector: str) -> list[Finding]:
    return [finding for finding in registry.detect_all(given) if finding.detector == detector]


def severities(given: Snapshot, detector: str) -> list[str]:
    return [finding.severity.name for finding in found(given, detector)]


def test_a_healthy_run_has_no_findings() -> None:
    assert registry.detect_all(with_facts(snapshot(), total_iterations=32_000)) == ()


@pytest.mark.parametrize(
    ("given_snapshot", "detector", "expected"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(given_snapshot: Snapshot, detector: str, expected: list[str]) -> None:
    assert severities(given_snapshot, detector) == expected


# those of test_training_numbers.py, which need a course of steps, and of
# test_operation_detectors.py
ELSEWHERE = {
    "slow", "slow-node", "loss-spike", "gradient-norm", "counters-jump", "log-not-growing",
    *(detector.name for detector in OPERATION),
}  # fmt: skip


def test_every_detector_speaks_somewhere_in_the_table() -> None:
    spoken = {finding.detector for row in TABLE for finding in registry.detect_all(row[1])}
    assert spoken >= {detector.name for detector in registry.DETECTORS} - ELSEWHERE


def test_the_slowest_ranks_are_named() -> None:
    ranks = (*beats(age=3 * HOUR, ranks=4), *beats(age=4 * HOUR, iteration=31200, ranks=1))
    (finding,) = found(snapshot(heartbeats=ranks, steps=steps(age=3 * HOUR)), "hung")
    assert finding.evidence[1] == "rank 0 on n01: training, iteration 31200, 4 h 00 min ago"


def test_the_first_cause_is_quoted() -> None:
    dead = running(state=JobState.FAILED, exit_code=143, derived_exit_code=134, end_time=NOW - 60)
    (finding,) = found(
        idle(
            jobs=(dead,), attempts=(wordless("1007", failure="rank 12 on n02: RuntimeError: NCCL"),)
        ),
        "unfinished-end",
    )
    assert finding.evidence == (
        "1000_7: no end marker: the scheduler says FAILED, a step of it ended with exit code 134"
        " (SIGABRT); rank 12 on n02: RuntimeError: NCCL",
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
        snapshot(
            scheduler=scheduler,
            jobs=(running(job_id="1000_6", start_time=NOW - DAY), running(), pending()),
            kill_switch=SWITCH,
        ),
        card=card,
    )
    assert [
        found(given, name)[0].fix for name in ("two-attempts", "kill-switch-left-on")
    ] == expected


def test_a_command_of_two_words_takes_the_card_after_both() -> None:
    given_snapshot = with_facts(snapshot(), card="my.toml")
    assert (
        derived.command(given_snapshot, "nodes check n07") == "tr11 nodes check --run my.toml n07"
    )
    assert derived.command(given_snapshot, "logs --rank 3") == "tr11 logs --run my.toml --rank 3"


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
    seen = changed(base, time=base.time + later, **changes)
    findings = registry.detect_all(seen)
    assert [finding.severity for finding in findings] == sorted(
        (f.severity for f in findings), reverse=True
    )
    if hidden & {"jobs", "kill_switch", "attempts"}:
        assert not [finding for finding in findings if finding.detector == "down"]
    if len(hidden) == len(FIELDS):
        assert {finding.detector for finding in findings} <= {"namesake"}


@given(st.integers(1, 200), st.floats(0.01, 1e4))
def test_the_pace_is_a_median(count: int, pace: float) -> None:
    given = list(steps(count, pace=pace))
    given[0] = Step(
        replace(given[0].record, seconds_per_iteration=pace * 1000 if count > 2 else pace)
    )
    assert derived.seconds_per_iteration(snapshot(steps=tuple(given))) == pytest.approx(pace)


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


def test_a_lost_node_that_was_the_last_spare_is_told_with_it() -> None:
    findings = registry.detect_all(spared("n07", "n50"))
    told = [one for one in by_cause(findings) if one.detector == "node-lost"]
    assert [one.detector for one in told[0].consequences] == ["no-spare"]


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


def test_severities_are_ordered() -> None:
    assert Severity.INFO < Severity.WARNING < Severity.CRITICAL


def test_a_check_that_fails_everywhere_is_shown_by_its_own_failures() -> None:
    """Not by what else ended that launch, or a later one."""
    shown = {"script:fans.sh": "health check script:fans.sh failed on n[01-48]"}
    ends = (
        LaunchEnd("1007", 1, NOW - 60, "n02: health check disk: full", failing_checks=shown),
        LaunchEnd("1007", 2, NOW, "rank 3 died", failing_checks=shown),
    )
    [finding] = found(snapshot(launch_ends=ends), "check-failing")
    assert finding.evidence == tuple(shown.values())


def test_a_fault_begins_where_its_evidence_has_it_begin() -> None:
    first, second = wordless("1006", age=20 * 60), wordless("1007", age=9 * 60)
    (finding,) = found(idle(attempts=(first, second)), "unfinished-end")
    assert finding.since == NOW - 20 * 60, (
        "the end of the first of them: each has its own in the evidence"
    )
    assert [line.partition(":")[0] for line in finding.evidence] == [
        "1000_7, 9 min ago",
        "1000_6, 20 min ago",
    ]
    gone = running(state=JobState.CANCELLED, end_time=NOW - 60)
    (down,) = found(idle(jobs=(gone,), attempts=(first, second)), "down")
    assert down.since == NOW - 60, "the last of the queue was cancelled then"
    stopped = EndMarker("kill-switch", 5, 5, True, "", NOW - 9 * 60, "n01", "1007", 1)
    (after_stop,) = found(idle(attempts=(replace(second, end=stopped),)), "down")
    assert after_stop.since is None, "it was stopped until someone removed the switch"


def failed(job_id: str, age: float, cause: str, why: str) -> Attempt:
    return replace(wordless(job_id, age=age), cause=cause, held_because=why)


def test_ends_of_different_causes_are_different_incidents() -> None:
    """Each is told with its own cause, and none of them is counted with another."""
    lost = failed("1005", 3 * HOUR, "node", "n07 does not answer")
    away = failed("1006", 2 * HOUR, "storage", "/scratch is not mounted")
    bad = failed("1007", HOUR, "software", "the same fault came back after iteration 8")
    three = found(idle(attempts=(lost, away, bad), steps=()), "unfinished-end")
    assert [(one.title, one.identity) for one in three] == [
        ("attempt 1000_7 failed: the same fault came back after iteration 8", ("software",)),
        ("attempt 1000_6 failed: /scratch is not mounted", ("storage",)),
        ("attempt 1000_5 failed: n07 does not answer", ("node",)),
    ]
    assert three[0].severity is Severity.CRITICAL, (
        "three in a row, and nothing was trained in between"
    )


SIGSEGV = "died: the worker was ended by sigsegv"


def suspicion(job_id: str, age: float, node: str, rank: int = 3) -> tuple[Attempt, LaunchEnd]:
    """An attempt whose worker died on a node, which alone is no proof."""
    why = f"the second time on {node}: rank {rank} on {node}: the worker was ended by SIGSEGV"
    end = LaunchEnd(
        job_id, 2, NOW - age, why, reached=31_220, suspects=(node,), fault=f"{SIGSEGV} at {rank}"
    )
    bad = replace(wordless(job_id, age=age, failure=why), cause="node", fault=end.fault)
    return bad, end


def test_no_node_is_named_as_guilty_while_the_next_attempt_will_tell() -> None:
    bad, end = suspicion("1007", HOUR, "iam02")
    (finding,) = found(
        idle(attempts=(bad,), launch_ends=(end,), jobs=(pending(),), steps=()), "unfinished-end"
    )
    assert finding.title == (
        "attempt 1000_7 failed: the second time: rank 3: the worker was ended by SIGSEGV; whether it is a node's fault,"
        " the next attempt tells"
    )
    assert "seen on iam02, which alone proves nothing against it" in finding.evidence
    held = pending(reason="JobHeldAdmin")
    (alone,) = found(
        idle(attempts=(bad,), launch_ends=(end,), jobs=(held,), steps=()), "unfinished-end"
    )
    assert "on iam02" in alone.title, (
        "no attempt follows by itself: a person has to look, and hears where"
    )
    proof = replace(end, blamed=("iam02",), suspects=())
    blamed = replace(bad, blamed=("iam02",))
    (sure,) = found(
        idle(attempts=(blamed,), launch_ends=(proof,), jobs=(pending(),), steps=()),
        "unfinished-end",
    )
    assert "on iam02" in sure.title and sure.identity == ("node", f"{SIGSEGV} at 3")


def test_a_suspicion_that_proves_to_be_the_programs_is_one_incident_with_it() -> None:
    """Whichever rank had it, and whatever it was taken for at first: the later end says who is
    cleared.
    """
    first, end = suspicion("1006", 2 * HOUR, "iam02", rank=5)
    verdict = "software or data, not the nodes: the same fault came back on iam02 and iam04"
    last = replace(failed("1007", HOUR, "software", verdict), fault=f"{SIGSEGV} at 3")
    ends = (
        end,
        LaunchEnd("1007", 1, NOW - HOUR, verdict, suspects=("iam04",), fault=last.fault),
    )
    seen = idle(attempts=(first, last), launch_ends=ends, steps=())
    (before,) = found(idle(attempts=(first,), launch_ends=(end,), steps=()), "unfinished-end")
    (finding,) = found(seen, "unfinished-end")
    assert finding.identity == before.identity == (SIGSEGV,)
    assert finding.title == f"the last 2 attempts failed: {verdict}"
    assert "suspected before, and cleared by it: iam02" in finding.evidence
    (older,) = found(changed(seen, launch_ends=ends[1:]), "unfinished-end")
    assert older.title == finding.title, "also when its launches are not looked into any more"
    (unsure,) = found(replace(seen, exclusions=UNKNOWN), "unfinished-end")
    assert not any("cleared" in line for line in unsure.evidence)


def test_two_faults_of_one_class_are_two_incidents() -> None:
    first, last = (
        replace(failed(name, HOUR, "unknown", ""), fault=fault)
        for name, fault in (("1006", "a at 1"), ("1007", "b at 1"))
    )
    two = found(idle(attempts=(first, last), steps=()), "unfinished-end")
    assert {one.identity for one in two} == {("a",), ("b",)}


def test_ends_of_unknown_cause_are_one_fault_only_where_the_same_is_known_of_them() -> None:
    """The batch host of one was lost, and of the other nothing is known: neither failed by both."""
    lost = "n07, which ran the batch script, was lost with it"
    last = wordless("1007", HOUR, failure=lost)
    two = found(idle(attempts=(wordless("1006", 2 * HOUR), last), steps=()), "unfinished-end")
    assert [one.title for one in two] == [
        f"attempt 1000_7 failed: {lost}",
        "attempt 1000_6 ended without the trainer's end marker",
    ]
    other = wordless("1006", 2 * HOUR, failure=lost.replace("n07", "n12"))
    (one,) = found(idle(attempts=(other, last), steps=()), "unfinished-end")
    assert one.title == f"the last 2 attempts failed, 1000_7 because {lost}"


def test_a_queue_that_a_leaving_attempt_holds_is_not_told_as_its_end() -> None:
    """The mail said to launch more tasks, into the same fault."""
    job, held = running(start_time=NOW - HOUR), pending(reason="JobHeldAdmin")
    hold = HoldRecord("1000", "tr11", NOW - 20, "the same fault came back", is_for_fault=True)
    seen = snapshot(jobs=(job, held), holds=(hold,))
    assert found(seen, "chain-end") == []
    by_person = replace(hold, is_for_fault=False)
    assert found(snapshot(jobs=(job, held), holds=(by_person,)), "chain-end") != []


def test_a_fault_that_a_later_attempt_trained_past_is_over_whatever_ended_that_one() -> None:
    lost = failed("1006", 2 * HOUR, "node", "n07 does not answer")
    bad = failed("1007", HOUR, "software", "the same fault came back after iteration 8")
    trained = idle(attempts=(lost, bad), steps=steps(job_id="1007", age=HOUR))
    severities = {one.identity: one.severity for one in found(trained, "unfinished-end")}
    assert severities == {("software",): Severity.WARNING}


@pytest.mark.parametrize(
    ("reached", "severity"),
    [(31_215, Severity.WARNING), (31_220, Severity.WARNING), (31_221, None)],
)
def test_several_ends_are_over_once_a_later_attempt_has_come_past_the_last_of_them(
    reached: int, severity: Severity | None
) -> None:
    """And then no word is left of them: the run is well."""
    first = failed("1005", 3 * HOUR, "software", "SIGSEGV")
    second = failed("1006", 2 * HOUR, "software", "SIGSEGV")
    ends = (
        LaunchEnd("1005", 1, NOW - 3 * HOUR, "SIGSEGV", reached=31_220, began_at=31_200),
        LaunchEnd("1006", 1, NOW - 2 * HOUR, "SIGSEGV", reached=31_210, began_at=31_200),
        LaunchEnd("1007", 1, NOW - HOUR, reached=reached, began_at=31_200),
    )
    living = Attempt("1007", NOW - HOUR, None)
    standing = found(
        snapshot(attempts=(first, second, living), launch_ends=ends, steps=()), "unfinished-end"
    )
    assert [(one.severity, one.is_to_be_passed) for one in standing] == (
        [] if severity is None else [(severity, True)]
    )


def test_a_cause_that_the_scheduler_alone_knows_tells_incidents_apart() -> None:
    job = running(
        raw_id="1006", job_id="1000_6", task_id=6, state=JobState.NODE_FAIL, end_time=NOW - 2 * HOUR
    )
    two = found(
        idle(jobs=(job,), attempts=(wordless("1006", 2 * HOUR), wordless("1007"))), "unfinished-end"
    )
    assert [one.identity for one in two] == [("unknown",)]


@pytest.mark.parametrize(
    ("cause", "reached", "says"),
    [
        ("software", 31_350, True),
        ("unknown", 31_350, True),
        ("node", 31_350, False),
        ("software", None, False),
    ],
)
def test_a_fault_that_came_back_at_one_step_names_the_command_that_passes_over_it(
    cause: str, reached: int | None, says: bool
) -> None:
    bad = failed("1007", HOUR, cause, "the same fault came back after iteration 31350")
    ends = (LaunchEnd("1007", 1, NOW - HOUR, reached=reached, began_at=31_200),)
    (finding,) = found(idle(attempts=(bad,), launch_ends=ends), "unfinished-end")
    command = "to pass over the data of iteration 31351, if they are at fault: `tr11 rollback 31200 --skip 31351-31351`"
    assert (command in finding.evidence) is says
    free = replace(bad, held_because="", failure="SIGSEGV")  # the next task tries it by itself
    (finding,) = found(idle(attempts=(free,), launch_ends=ends), "unfinished-end")
    assert command not in finding.evidence


def test_a_fault_that_followed_the_data_over_the_nodes_has_the_cure_as_its_command() -> None:
    """What its mail says to type is what lets the run go on, and not only where to look."""
    bad = failed(
        "1007", HOUR, "software", "the same fault came back after iteration 31350 on n1 and n2"
    )
    ends = tuple(LaunchEnd("1007", launch, NOW - HOUR, reached=31_350) for launch in (1, 2))
    held = pending(reason="JobHeldAdmin")
    seen = idle(attempts=(bad,), launch_ends=ends, jobs=(held,))
    (finding,) = found(seen, "unfinished-end")
    assert (finding.fix, finding.then) == (
        "tr11 rollback 31200 --skip 31351-31351",
        ("tr11 resume",),
    )
    assert any("`tr11 diagnose --job 1000_7` says where" in line for line in finding.evidence)
    unsaved = replace(seen, checkpoints=checkpoints(steps=(), latest=None, examined=()))
    (finding,) = found(unsaved, "unfinished-end")
    assert finding.fix == "tr11 launch --replace --set 'data.skip_ranges=[\"31351-31351\"]'"
    (once,) = found(changed(seen, launch_ends=ends[:1]), "unfinished-end")
    assert once.fix == "tr11 diagnose --job 1000_7", "one end alone is no sign of the data"


@pytest.mark.parametrize(
    ("phases", "cured"),
    [(("starting", "loading"), False), (("starting", "loading", "training", "ended"), True)],
)
def test_what_dies_in_its_first_iteration_met_the_data_and_what_dies_before_did_not(
    phases: tuple[str, ...], cured: bool
) -> None:
    """A save came just before the bad sample: no launch finishes an iteration after it."""
    why = "the same fault came back before its first iteration on n1 and n2 and n3"
    bad = replace(failed("1007", HOUR, "software", why), fault=SIGSEGV)
    ends = tuple(
        LaunchEnd("1007", launch, NOW - HOUR, began_at=31_200, fault=SIGSEGV) for launch in (1, 2)
    )
    seen = idle(
        attempts=(bad,),
        launch_ends=ends,
        jobs=(pending(reason="JobHeldAdmin"),),
        phases=tuple(
            Phase("1007", end.launch, name, 31_200, NOW) for end in ends for name in phases
        ),
    )
    (finding,) = found(seen, "unfinished-end")
    expected = "tr11 rollback 31200 --skip 31201-31201" if cured else "tr11 diagnose --job 1000_7"
    assert finding.fix == expected
    stopped = (replace(ends[0], fault="operator"), ends[1])
    (once,) = found(changed(seen, launch_ends=stopped), "unfinished-end")
    assert once.fix == "tr11 diagnose --job 1000_7", "a stop at that place is no sign of the data"


def test_what_a_leaving_attempt_holds_for_its_fault_is_told_with_its_end() -> None:
    job, queued = running(start_time=NOW - HOUR), pending(reason="JobHeldAdmin")
    hold = HoldRecord("1000", "tr11", NOW - 20, "the same fault came back", is_for_fault=True)
    (leaving,) = found(snapshot(jobs=(job, queued), holds=(hold,)), "held")
    assert leaving.severity is Severity.INFO
    (stays,) = found(
        snapshot(jobs=(job, queued), holds=(replace(hold, time=NOW - HOUR / 2),)), "held"
    )
    assert stays.severity is Severity.WARNING


def test_a_checkpoint_is_doubted_by_mail_once_the_older_one_came_past_the_iteration() -> None:
    tried = LaunchEnd(
        "1007",
        2,
        NOW - 600,
        "SIGSEGV",
        "again",
        reached=31_215,
        began_at=31_200,
        older_checkpoint=31_100,
    )
    (proven,) = found(snapshot(launch_ends=(tried,)), "checkpoint-unsound")
    assert proven.severity is Severity.WARNING
    again = LaunchEnd("1007", 3, NOW - 300, "SIGSEGV", reached=31_215, began_at=31_100)
    assert found(snapshot(launch_ends=(tried, again)), "checkpoint-unsound") == [], (
        "it was not the checkpoint"
    )


def no_number(step: Step) -> Step:
    return replace(step, record=replace(step.record, lm_loss=float("nan")))


def noted(kind: str, age: float) -> TrainingEvent:
    return TrainingEvent(kind, NOW - age, "", {"to": 31_200})


BACK, UNDONE = noted("roll-back", 60), noted("roll-back-undone", 30)
BAD_STEPS = (*steps(age=HOUR)[:-3], *map(no_number, steps(age=HOUR)[-3:]))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ((), 1),
        ((noted("roll-back", 2 * HOUR),), 1),
        ((BACK,), 0),
        ((BACK, UNDONE), 1),
        ((UNDONE, BACK), 1),
    ],
)
def test_what_was_rolled_back_past_is_over(events: tuple[TrainingEvent, ...], told: int) -> None:
    for seen in (idle(steps=BAD_STEPS, events=events), snapshot(steps=BAD_STEPS, events=events)):
        findings = found(seen, "loss-not-finite")
        assert [finding.severity.name for finding in findings] == ["CRITICAL" if told else "INFO"]


def test_a_loss_that_was_no_number_is_over_when_an_iteration_after_it_is_one() -> None:
    """A launch that went back trains at first what was never bad."""
    back = noted("roll-back", HOUR / 2)
    bad = tuple(replace(step, time=NOW - HOUR) for step in BAD_STEPS)
    at = bad[-1].record.iteration
    again = tuple(replace(step, time=NOW - 60, job_id="1008") for step in steps(3, last=at - 3))
    (finding,) = found(snapshot(steps=(*bad, *again), events=(back,)), "loss-not-finite")
    assert (finding.severity, finding.is_to_be_passed) == (Severity.INFO, True)
    assert finding.title == f"the loss was not a number in iterations {at - 2} to {at}"
    beyond = replace(again[-1], record=replace(again[-1].record, iteration=at + 1))
    assert found(snapshot(steps=(*bad, *again, beyond), events=(back,)), "loss-not-finite") == []
    (finding,) = found(
        snapshot(steps=(*bad, *again, no_number(beyond)), events=(back,)), "loss-not-finite"
    )
    assert finding.severity is Severity.CRITICAL


def test_what_was_dropped_is_said_where_the_loss_is_no_number() -> None:
    dropped = tuple(
        replace(step, record=replace(step.record, grad_norm=None, skipped_iterations=1))
        for step in BAD_STEPS[-3:]
    )
    (finding,) = found(snapshot(steps=(*BAD_STEPS[:-3], *dropped)), "loss-not-finite")
    assert finding.evidence[0].endswith("lm loss nan, grad norm not finite")
    assert finding.evidence[1].startswith("3 updates were dropped since then (skipped iterations)")


def spike_that_was_rolled_back(last: int, **values: object) -> Snapshot:
    """A spike at the last iteration of an attempt, a roll-back to twenty before, and what is
    trained since.
    """
    lines = steps(60, age=HOUR)
    spike = replace(lines[-1], record=replace(lines[-1].record, lm_loss=40.0))
    at = spike.record.iteration
    again = tuple(replace(step, time=NOW - 60, job_id="1008") for step in steps(3, last=at + last))
    event = TrainingEvent(
        "roll-back", NOW - HOUR / 2, "", {"to": at - 20, "skip": f"{at - 5}-{at}", **values}
    )
    return snapshot(steps=(*lines[:-1], spike, *again), events=(event,))


def test_a_spike_that_a_person_rolled_back_is_no_warning() -> None:
    (finding,) = found(spike_that_was_rolled_back(-10, by="ann"), "loss-spike")
    assert (finding.severity, finding.is_to_be_passed) == (Severity.INFO, True)
    assert found(spike_that_was_rolled_back(2, by="ann"), "loss-spike") == []
    (finding,) = found(spike_that_was_rolled_back(2), "loss-spike")
    assert finding.severity is Severity.WARNING, "the trainer's own: no one may know of it"


def test_iterations_that_are_passed_over_are_not_unsaved() -> None:
    saved, event = (
        checkpoints(31_000),
        TrainingEvent("roll-back", NOW - 10 * HOUR, "", {"to": 31_000, "skip": "31011-31100"}),
    )
    assert found(snapshot(checkpoints=saved), "checkpoint-overdue") != []
    assert found(snapshot(checkpoints=saved, events=(event,)), "checkpoint-overdue") == []
    undone = TrainingEvent("roll-back-undone", NOW - 9 * HOUR, "", {"to": 31_000})
    assert found(snapshot(checkpoints=saved, events=(event, undone)), "checkpoint-overdue") != []
    skips = snapshot(checkpoints=saved)
    passed = with_facts(skips, skip_ranges=(IterationRange(31_011, 31_100),))
    assert found(passed, "checkpoint-overdue") == []


def test_a_save_that_fails_on_one_node_alone_is_told_by_the_node() -> None:
    """And what the attempt does about it, which needs no one."""
    told = "n03 alone could not write the save of step 31000, to which 47 other nodes wrote"
    values = {"step": 31_000, "why": "rank 5: [Errno 5]", "node": "n03", "said": told}
    event = TrainingEvent("save-failed", NOW, "1007", values)
    for saved in (31_000, 31_100):  # a save is overdue, or it is not
        given = snapshot(checkpoints=checkpoints(saved), events=(event,))
        (finding,) = found(given, "checkpoint-overdue")
        assert (finding.title, finding.severity) == (told, Severity.WARNING)
        assert finding.evidence[1:] == ("rank 5: [Errno 5]",)
        assert "the attempt leaves that node by itself" in finding.by_itself
    assert not found(snapshot(checkpoints=checkpoints(31_000)), "checkpoint-overdue")[0].by_itself


def test_where_nothing_trains_the_roll_back_is_what_helps_and_no_kill() -> None:
    (finding,) = found(snapshot(steps=BAD_STEPS), "loss-not-finite")
    back = "tr11 rollback 31200 --skip 31217-"
    assert (finding.fix, finding.then) == ("tr11 kill --now --wait", (back, "tr11 resume"))
    assert (
        f"`{back}` passes over the data of iterations 31217 to 31219, and of those that follow until it stops"
        in (finding.evidence)
    )
    (finding,) = found(idle(steps=BAD_STEPS), "loss-not-finite")
    assert (finding.fix, finding.then) == (back, ("tr11 launch --array 1-10",))
    assert finding.evidence[-1] == f"`{back}` passes over the data of iterations 31217 to 31219"
    (finding,) = found(idle(steps=BAD_STEPS[-2:]), "loss-not-finite")
    assert finding.fix == "tr11 checkpoints list", "where it began is not known"


def test_a_row_of_losses_that_are_no_numbers_begins_where_it_began() -> None:
    """Three numbers in twenty lines are no recovery; a launch that went back begins another row."""
    lines = steps(60)
    few = tuple(step if n < 10 or n % 20 > 16 else no_number(step) for n, step in enumerate(lines))
    for upto, again in ((11, ""), (30, "again and again "), (56, "again and again ")):
        (finding,) = found(snapshot(steps=few[:upto]), "loss-not-finite")
        assert (
            finding.title
            == f"the loss is {again}not a number since iteration {lines[10].record.iteration}"
        )
        assert finding.since == lines[10].time
    many = tuple(
        step if n < 10 or 20 <= n < 40 else no_number(step) for n, step in enumerate(lines)
    )
    (finding,) = found(snapshot(steps=many), "loss-not-finite")
    assert finding.title.endswith(f" {lines[40].record.iteration}"), "it had recovered"
    again = tuple(
        replace(step, job_id="1008") for step in (*lines[12:14], *map(no_number, lines[14:20]))
    )
    (finding,) = found(snapshot(steps=(*few[:56], *again)), "loss-not-finite")
    assert finding.title.endswith(f" {lines[14].record.iteration}")


def test_one_number_after_several_that_are_none_is_no_recovery() -> None:
    """The run is not called healthy for one iteration, and at risk again at the next."""
    lines = steps(30)
    for bad, good, is_told in ((4, 1, True), (4, 3, True), (4, 4, False), (1, 1, False)):
        first = len(lines) - bad - good
        last = len(lines) - good
        row = (*lines[:first], *map(no_number, lines[first:last]), *lines[last:])
        seen = snapshot(steps=row)
        findings = found(seen, "loss-not-finite")
        assert bool(findings) is is_told, (bad, good)
        at_risk = judge(seen, tuple(findings)).word is VerdictWord.AT_RISK
        assert at_risk is is_told
    (finding,) = found(snapshot(steps=(*BAD_STEPS, *steps(1, last=31_220))), "loss-not-finite")
    assert "too few numbers in a row to have recovered" in finding.evidence[1]


def test_what_is_not_saved_is_counted_of_the_present_attempt() -> None:
    """The attempt before it had trained 219 iterations past the checkpoint; this one has begun
    there again.
    """
    saved = checkpoints(31_000)
    (before,) = found(snapshot(checkpoints=saved), "checkpoint-overdue")
    assert before.title.startswith("no checkpoint for 219 iterations")
    after = running(job_id="1000_8", raw_id="1008", task_id=8)
    assert found(snapshot(jobs=(after,), checkpoints=saved), "checkpoint-overdue") == []
    own = steps(5, last=31_005, job_id="1008")
    seen = snapshot(jobs=(after,), checkpoints=saved, steps=(*steps(), *own))
    assert found(seen, "checkpoint-overdue") == []
    own = steps(5, last=31_160, job_id="1008")
    (late,) = found(snapshot(jobs=(after,), checkpoints=saved, steps=own), "checkpoint-overdue")
    assert late.title.startswith("no checkpoint for 160 iterations")
    assert (
        found(snapshot(checkpoints=saved, events=(noted("roll-back", 1),)), "checkpoint-overdue")
        == []
    )
    launched = (Phase("1007", 2, "starting", 31_000, NOW - 10),)
    assert found(snapshot(checkpoints=saved, phases=launched), "checkpoint-overdue") == [], (
        "its workers began again"
    )


def test_a_loss_that_is_no_number_names_the_command_that_passes_over_its_data() -> None:
    *good, bad = steps()[-11:]
    bad = replace(bad, record=replace(bad.record, lm_loss=float("nan")))
    at = bad.record.iteration
    (finding,) = found(snapshot(steps=(*good, bad)), "loss-not-finite")
    command = f"tr11 rollback 31200 --skip {at}-"
    assert finding.then[0] == command, "without an end: more iterations follow until it is typed"
    (finding,) = found(snapshot(steps=(bad,)), "loss-not-finite")
    assert not any("--skip" in line for line in finding.evidence), "where it began is not known"
    (finding,) = found(snapshot(steps=(*good, bad), checkpoints=checkpoints(at)), "loss-not-finite")
    assert finding.then[0] == f"tr11 rollback {at - 100} --skip {at}-"
    (finding,) = found(
        snapshot(steps=(*good, bad), checkpoints=checkpoints(at, steps=(at,))), "loss-not-finite"
    )
    assert finding.then[0] == f"tr11 rollback STEP --skip {at}-"
    unsaved = checkpoints(steps=(), latest=None, examined=())
    (finding,) = found(snapshot(steps=(*good, bad), checkpoints=unsaved), "loss-not-finite")
    anew = f"tr11 launch --replace --set 'data.skip_ranges=[\"{at}-{at}\"]'"
    assert finding.then == ("tr11 kill --release", anew), "a kill switch would refuse the launch"


def test_a_row_whose_beginning_is_not_seen_names_no_checkpoint() -> None:
    """The look's lines begin within the row, a number first: checkpoint 31200 is of bad weights."""
    cut = tuple(step if n % 4 == 0 else no_number(step) for n, step in enumerate(steps(16)))
    assert cut[0].record.iteration > 31_200, "a checkpoint lies before all that is seen"
    (finding,) = found(snapshot(steps=cut), "loss-not-finite")
    assert "since at least iteration" in finding.title
    assert finding.then == ("tr11 checkpoints list",)
    before = steps(10, last=cut[0].record.iteration - 1)
    (finding,) = found(snapshot(steps=(*before, *cut)), "loss-not-finite")
    assert finding.then[0].startswith(f"tr11 rollback 31200 --skip {cut[1].record.iteration}-")
    first = tuple(no_number(step) for step in steps(3, last=4))
    unsaved = checkpoints(steps=(), latest=None, examined=())
    (finding,) = found(
        snapshot(steps=(*steps(1, last=1), *first), checkpoints=unsaved), "loss-not-finite"
    )
    assert finding.title.endswith("since iteration 2"), "all of the training is seen"


def test_a_number_among_many_that_are_none_is_no_recovery() -> None:
    """What a look says does not depend on which line happens to be the last one."""
    lines = steps(40)
    mixed = tuple(step if n < 20 or n % 4 == 0 else no_number(step) for n, step in enumerate(lines))
    for upto in range(26, 41):
        (finding,) = found(snapshot(steps=mixed[:upto]), "loss-not-finite")
        assert finding.severity is Severity.CRITICAL, upto
        assert finding.title.endswith(f" since iteration {lines[21].record.iteration}"), upto
        assert finding.evidence[0].split(": ")[1].startswith("lm loss nan"), upto
    once = (*lines[:-2], no_number(lines[-2]), lines[-1])
    assert found(snapshot(steps=once), "loss-not-finite") == [], "that batch was skipped"
    back = (*lines[:20], *map(no_number, lines[20:30]), *lines[30:])
    for upto in (31, 34):
        assert names_of(snapshot(steps=back[:upto])) == ["CRITICAL"], upto
    assert names_of(snapshot(steps=back[:35])) == [], "five of ten"
    again = replace(lines[30], job_id="1008")
    assert names_of(snapshot(steps=(*back[:30], again))) == [], "the next job's are numbers"


def names_of(seen: Snapshot) -> list[str]:
    return [finding.severity.name for finding in found(seen, "loss-not-finite")]


def test_what_can_never_start_for_want_of_nodes_is_one_incident_with_the_cure_first() -> None:
    nodes = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 49))
    listed = (Exclusion(node="n03", since=NOW, owner="ann"),)
    seen = idle(jobs=(pending(reason="BadConstraints"),), nodes=nodes, exclusions=listed)
    seen = with_facts(seen, nodes=46, operation=replace(seen.run.operation, allocated_nodes=48))
    cure = "tr11 launch --replace --set slurm.spare_nodes=1"
    told = [one for one in by_cause(registry.detect_all(seen)) if one.severity is Severity.CRITICAL]
    assert [(one.detector, one.fix) for one in told] == [("nodes-short", cure)]
    (dead,) = found(seen, "dead-chain")
    assert dead.fix == cure
    (other,) = found(idle(jobs=(pending(reason="BadConstraints"),)), "dead-chain")
    assert (other.fix, other.fault) == ("tr11 launch --repair", "")


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


def test_many_excluded_nodes_date_from_the_last_of_them() -> None:
    listed = tuple(
        Exclusion(node=f"n{number:02d}", since=NOW - age, owner="tr11")
        for number, age in ((1, DAY), (2, 60))
    )
    nodes = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 51))
    (finding,) = found(snapshot(nodes=nodes, exclusions=listed), "exclusion-cap")
    assert finding.since == NOW - 60


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


# what a mail says that the run does by itself about what a detector finds, in the table's own cases
BY_ITSELF = {
    "waits-for-site": "What is queued starts by itself when the site is done.",
    "limit-changed": "The attempt saves and leaves in time by itself, unless the limit is too short for a save.",
    "checkpoint-unsound": "A resume takes the newest checkpoint that is whole.",
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_the_run_does_by_itself_is_said_by_its_finding_alone(name: str) -> None:
    """A second table of the mails' own said it by the detector's name."""
    told = [one for row in TABLE for one in found(row[1], name) if one.severity > Severity.INFO]
    assert told and {one.by_itself for one in told} == {BY_ITSELF[name]}
