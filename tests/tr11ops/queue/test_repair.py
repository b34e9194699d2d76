"""What repairs a queue: dead jobs go and come again, what tr11 held is released, zombies end, all
else is left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import HOUR, NOW, beats, ended, idle, pending, running, snapshot
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Node
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.queue.repair import Repair, plan_repair, plan_replacement
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit
from tr11ops.rundir.paths import Submission

DEAD = "DependencyNeverSatisfied"
ZOMBIE = snapshot(
    jobs=(running(), pending()),
    attempts=(Attempt("1007", NOW - HOUR, None, nodes=("n01", "n02")),),
    nodes=(Node("n01", frozenset({"down"})),),
    heartbeats=beats(age=HOUR),
    steps=(),
)


SELF = Submission(
    tag="20260101-000000-00000000", job_id=None, scheduler="slurm", time=NOW, user="ana", host="login", run="x",
    variant="main", array=None, nodes=48, card_hash="", chain="self",
)  # fmt: skip


def chain_of_three(reason: str) -> tuple[Snapshot, list[str]]:
    numbers = ["2001", "2002", "2003"]
    jobs = [
        pending((), job_id=number, raw_id=number, array_id=None, reason=reason)
        for number in numbers
    ]
    return snapshot(jobs=(running(), *jobs)), numbers


def steps(repair: Repair) -> list[tuple[str, str]]:
    return [(step.action, step.node or step.job) for step in repair.steps]


def test_a_healthy_queue_needs_nothing() -> None:
    repair = plan_repair(snapshot(), {"1000"})
    assert repair.is_empty and not repair.left_alone and not repair.read_errors


def test_a_dead_chain_is_replaced_behind_the_live_job() -> None:
    given, numbers = chain_of_three(DEAD)
    repair = plan_repair(given, ())
    assert steps(repair) == [("cancel", number) for number in numbers]
    assert (repair.resubmit, repair.after) == (3, "1000")


def test_a_dead_rest_of_an_array_keeps_its_number_of_tasks() -> None:
    repair = plan_repair(snapshot(jobs=(pending((4, 5, 6, 7), reason=DEAD),)), ())
    assert steps(repair) == [("cancel", "1000")] and (repair.resubmit, repair.after) == (4, None)


def test_rows_of_one_dead_array_are_one_step() -> None:
    repair = plan_repair(
        snapshot(jobs=(pending((4, 5), reason=DEAD), pending((8,), reason=DEAD))), ()
    )
    assert steps(repair) == [("cancel", "1000")] and repair.resubmit == 3
    change = plan_replacement(snapshot(jobs=(pending((4, 5)), pending((8,)))), "ana")
    assert steps(change) == [("cancel", "1000")] and change.resubmit == 3


def test_new_attempts_wait_for_what_can_end_not_for_the_dead() -> None:
    given, _ = chain_of_three(DEAD)
    alone = replace(given, jobs=tuple(job for job in known(given.jobs, ()) if job.raw_id != "1007"))
    assert plan_repair(alone, ()).after is None
    dead = pending((), job_id="2001", raw_id="2001", array_id=None, reason=DEAD)
    lost = plan_repair(replace(ZOMBIE, jobs=(running(), dead)), ())
    assert steps(lost) == [("exclude", "n01"), ("cancel", "1000_7"), ("cancel", "2001")]
    assert (lost.resubmit, lost.after) == (1, "1007"), (
        "they start when the allocation that is cancelled has ended"
    )


def test_the_task_that_runs_survives_the_dead_rest_of_its_array() -> None:
    repair = plan_repair(snapshot(jobs=(running(), pending((8, 9), reason=DEAD))), ())
    assert steps(repair) == [("cancel", "1000_[8-9%1]")] and (repair.resubmit, repair.after) == (
        2,
        "1000",
    )


def test_a_task_that_can_start_survives_a_dead_one_of_its_array() -> None:
    repair = plan_repair(
        snapshot(
            jobs=(pending((8,), job_id="1000_8", reason=DEAD), pending((9,), job_id="1000_9"))
        ),
        (),
    )
    assert steps(repair) == [("cancel", "1000_8")]


@pytest.mark.parametrize(
    ("held", "reason", "switch", "expected", "words"),
    [
        ({"1000"}, "JobHeldUser", "", [("release", "1000")], ""),
        (set(), "JobHeldUser", "", [], "was not held by tr11"),
        ({"1000"}, "JobHeldAdmin", "", [("release", "1000")], ""),
        (
            {"1000"},
            "launch_failed_requeued_held",
            "",
            [],
            "is held by the scheduler (launch_failed_requeued_held), not",
        ),
        ({"1000"}, "JobHeldUser", "pause", [], "stays held: pause is set"),
    ],
)
def test_only_what_tr11_held_is_released_never_against_a_switch(
    held: set[str], reason: str, switch: str, expected: list[tuple[str, str]], words: str
) -> None:
    repair = plan_repair(snapshot(jobs=(pending(reason=reason),)), held, switch)
    assert steps(repair) == expected and repair.resubmit == 0
    assert "--force" not in "".join(repair.left_alone)
    assert words in "".join(repair.left_alone) and bool(words) == bool(repair.left_alone)


def test_a_persons_part_of_an_array_is_not_released() -> None:
    person, rest = pending((8,), reason="JobHeldUser"), pending((9, 10), reason="JobHeldUser")
    repair = plan_repair(snapshot(jobs=(person, rest)), {"1000_[9-10]"})
    assert steps(repair) == [("release", "1000_[9-10]")]
    assert repair.left_alone == (
        "job 1000_8 was not held by tr11 (JobHeldUser): `scontrol release 1000_8` by its owner",
    )
    merged = plan_repair(
        snapshot(jobs=(pending((8, 9, 10), reason="JobHeldUser"),)), {"1000_[9-10]"}
    )
    assert (steps(merged), merged.left_alone) == (steps(repair), repair.left_alone)


def test_a_zombie_is_cancelled_alone_its_host_is_excluded_and_its_array_goes_on() -> None:
    repair = plan_repair(ZOMBIE, ())
    assert steps(repair) == [("exclude", "n01"), ("cancel", "1000_7")]
    assert repair.resubmit == 0 and "n01" in repair.steps[1].why
    assert str(repair.steps[0]) == "exclude n01: lost as the batch host of job 1000_7"


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        # it answers again, in a job that has lost it: one fact is not enough
        ({"nodes": (Node("n01", frozenset({"idle"})),)}, None, ""),
        ({"exclusions": (Exclusion("n01", "Xid 79", "tr11"),)}, None, ""),
        ({"exclusions": Unknown("cut")}, None, ""),
        (
            {},
            ExclusionLimit(0, frozenset({"n01"}), 48),
            "n01 is not excluded, though it is lost: of",
        ),
    ],
)
def test_a_lost_host_is_excluded_where_two_facts_and_the_limit_allow_it(
    changes: dict[str, Any], limit: ExclusionLimit | None, words: str
) -> None:
    job = running(nodes=("n02", "n03"))
    repair = plan_repair(replace(ZOMBIE, jobs=(job, pending()), **changes), (), limit=limit)
    assert steps(repair) == [("cancel", "1000_7")]
    assert "--force" not in "".join(repair.left_alone)
    assert words in "".join(repair.left_alone) and bool(words) == bool(repair.left_alone)


def test_the_host_of_a_job_that_only_another_can_end_is_excluded_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    repair = plan_repair(ZOMBIE, (), user="ben")
    assert steps(repair) == [] and "1000_7" in "".join(repair.left_alone)


def test_trainers_that_were_alive_a_moment_ago_are_left_alone() -> None:
    repair = plan_repair(replace(ZOMBIE, heartbeats=beats(age=20)), ())
    assert repair.is_empty
    assert repair.left_alone == (
        "job 1000_7 has lost its batch host n01, but was alive: look again in 1 min 40 s",
    )


def test_unknown_is_never_repaired() -> None:
    repair = plan_repair(snapshot(jobs=Unknown("timed out")), {"1000"})
    assert repair.is_empty and repair.read_errors == ("jobs: timed out",)


# -------------------------------------------------------------------- a new card for what is queued
def test_the_rest_of_an_array_is_replaced_behind_the_live_task() -> None:
    change = plan_replacement(snapshot(jobs=(running(), pending((8, 9, 10)))), "ana")
    assert steps(change) == [("cancel", "1000_[8-10%1]")] and not change.refusals
    assert (change.resubmit, change.after, change.cancelled) == (3, "1000", ("1000_[8-10%1]",))


def test_a_chain_is_replaced_whole_with_what_is_yet_to_queue() -> None:
    given, numbers = chain_of_three("Dependency")
    chain = replace(SELF, job_id="2003", left=2)
    change = plan_replacement(replace(given, submissions=(chain,)), "ana")
    assert [job for _, job in steps(change)] == numbers
    assert (change.resubmit, change.after) == (5, "1000")


def test_what_has_not_begun_is_replaced_by_what_starts_at_once() -> None:
    change = plan_replacement(snapshot(jobs=(pending((1, 2)),)), "ana")
    assert steps(change) == [("cancel", "1000")] and (change.resubmit, change.after) == (2, None)


def test_nothing_absent_foreign_or_unknown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    nothing = plan_replacement(snapshot(jobs=(running(),)), "ana")
    assert nothing.refusals == (
        "no attempt of this run is queued: `tr11 launch --after 1000` queues the card as it is now",
    )
    foreign = plan_replacement(snapshot(jobs=(running(), pending(user="bob"))), "ana")
    assert foreign.refusals == ("job 1000_[8-10%1] is bob's, who alone can cancel it",)
    assert plan_replacement(snapshot(jobs=Unknown("timed out")), "ana").read_errors == (
        "jobs: timed out",
    )


def test_a_queue_is_the_same_whatever_its_jobs_wait_for() -> None:
    """Slurm looks at them anew every few seconds: what was agreed to is done all the same."""
    shown = plan_replacement(snapshot(jobs=(pending((1, 2), reason=""),)), "ana")
    later = pending(
        (1, 2),
        reason="PartitionDown",
        priority=4294901758,
        start_time=NOW + HOUR,
        eligible_time=NOW,
    )
    assert plan_replacement(snapshot(jobs=(later,)), "ana").is_as(shown)
    for others in (
        (pending((2,)),),
        (pending((1, 2)), pending((9,), array_id="2000", raw_id="2000", job_id="2000_9")),
        (),
    ):
        assert not plan_replacement(snapshot(jobs=others), "ana").is_as(shown)


def test_where_nothing_is_queued_it_says_what_starts_the_run_and_whether_it_is_finished() -> None:
    assert plan_repair(snapshot(), ()).starts == ()
    assert plan_repair(idle(), ()).starts == ("tr11 launch --array 1-10",)
    typed = replace(SELF, scheduler="local", array="1-3%1")
    pause = KillSwitch(snapshot().run.kill_switch, "ana", NOW)
    found = plan_repair(idle(submissions=(typed,), pause=pause), ())
    assert found.starts == ("tr11 resume", "tr11 launch --array 1-3 --scheduler local")
    over = plan_repair(idle(attempts=(ended("1007", 60.0, "finished", iteration=115311),)), ())
    assert over.finished_at is not None and plan_repair(idle(), ()).finished_at is None
