"""One answer to "is it held, and by whom?": the screen, `tr11 resume`, the repair and the watchdog
agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import NOW, changed, ended, pending, save_marker, snapshot
from tr11ops.cli.resume import _undoing
from tr11ops.cli.stopping import StopContext
from tr11ops.cluster.arrays import names_of
from tr11ops.cluster.base import Job
from tr11ops.detect.queued_work import held
from tr11ops.observe.jobs import held_jobs, standing_holds
from tr11ops.observe.look import facts_of, observe
from tr11ops.queue.repair import plan_repair
from tr11ops.queue.stop import look
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.action_log import ActionHistory
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.hold_store import HoldRecord, held_by_tr11, record_holds
from tr11ops.rundir.paths import RunDirectory
from tr11ops.watchdog.actions import PolicyContext
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.verdict import judge

SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"


TAG = "20260101-000000-00000000"


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunCard, RunDirectory]:
    card = load_card(SMALL, ["run.directory=run"], {}, directory=tmp_path)
    directory = RunDirectory(card.paths, card.kill_switch)
    directory.submission(TAG).folder.mkdir(parents=True)
    return card, directory


def releasers(run: tuple[RunCard, RunDirectory], job: Job, user: str = "ana") -> dict[str, bool]:
    """Who would release the job, or say that `tr11 resume` does."""
    card, directory = run
    job = replace(job, comment=directory.comment(TAG))
    queue = Queue(job)
    seen = observe(directory, facts_of(card), queue, NOW)
    seen = snapshot(
        jobs=seen.jobs, holds=seen.operation.holds, attempts=seen.attempts, steps=(), heartbeats=()
    )
    names = held_by_tr11(directory)
    scene = PolicyContext(user=user, holder=None, releasable=names)
    found = plan(seen, (), judge(seen, ()), ActionHistory(), scene)
    place = StopContext(card, directory, queue, user)  # type: ignore[arg-type]
    return {
        "status": any(finding.fix == "tr11 resume" for finding in held.detect(seen)),
        "handover": bool(standing_holds(seen)),
        "resume": bool(_undoing(place, look(card, directory, queue)).holds),  # type: ignore[arg-type]
        "repair": any(
            step.action == "release" for step in plan_repair(seen, names, user=user).steps
        ),
        "watchdog": any(action.name == "release" for action in found.actions),
    }


@pytest.mark.parametrize(
    ("reason", "priority", "is_ours"),
    [
        ("JobHeldUser", 0, True),
        (
            "Dependency",
            0,
            True,
        ),  # of a chain: the scheduler tells the dependency, and its priority the hold
        ("launch_failed_requeued_held", 0, False),  # it failed to start since
        ("BurstBufferOperation", None, False),
        ("Resources", 5, False),
    ],
)
def test_what_tr11_held_is_released_by_all_or_none(
    run: tuple[RunCard, RunDirectory], reason: str, priority: int | None, is_ours: bool
) -> None:
    job = pending(reason=reason, priority=priority)
    assert set(releasers(run, job).values()) == {False}, "nothing is on record"
    record_holds(run[1], ("1000",), "ana", "new data")
    assert set(releasers(run, job).values()) == {is_ours}


def test_an_administrators_hold_is_undone_by_people_alone(
    run: tuple[RunCard, RunDirectory],
) -> None:
    """Slurm says so of root's and an operator's holds through tr11 too; of others' it refuses the
    release.
    """
    record_holds(run[1], ("1000",), "root", "maintenance")
    found = releasers(run, pending(reason="JobHeldAdmin"))
    assert found == {
        "status": True,
        "handover": True,
        "resume": True,
        "repair": True,
        "watchdog": False,
    }


def test_another_users_job_is_released_by_no_command(
    run: tuple[RunCard, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    record_holds(run[1], ("1000",), "ana", "new data")
    found = releasers(run, pending(reason="JobHeldUser"), user="ben")
    assert found == {
        "status": True,
        "handover": True,
        "resume": False,
        "repair": False,
        "watchdog": False,
    }


@pytest.mark.parametrize(
    ("submitted", "is_released"), [(None, False), (NOW - 10, False), (NOW + 10, True)]
)
def test_what_is_left_over_of_a_finished_training_stays_held(
    run: tuple[RunCard, RunDirectory], submitted: float | None, is_released: bool
) -> None:
    """What was submitted after the end is for a longer training."""
    directory = run[1]
    record_holds(directory, ("1000",), "ana", "new data")
    save_marker(directory.paths, ended("1006", 0.0, "finished").end)  # type: ignore[arg-type]
    job = pending(reason="JobHeldUser", submit_time=submitted)
    found = releasers(run, job)
    assert (found["resume"], found["repair"]) == (is_released, is_released)
    assert is_released or not found["watchdog"]


def test_a_repair_cancels_what_is_left_over_of_a_finished_training() -> None:
    seen = snapshot(
        jobs=(pending(reason="JobHeldUser"),), attempts=(ended("1006", 0.0, "finished"),), steps=()
    )
    [step] = plan_repair(seen, {"1000"}, user="ana").steps
    assert (step.action, step.why) == ("cancel", "the training is finished, nothing is left for it")
    assert plan_repair(seen, {"1000"}, is_automatic=True).is_empty
    [finding] = held.detect(changed(seen, scheduler="local", holds=(HoldRecord("1000", "ana"),)))
    assert finding.fix == "tr11 launch --repair"


def test_an_old_attempts_hold_is_known_to_all(run: tuple[RunCard, RunDirectory]) -> None:
    directory = run[1]
    for number in range(900, 1000):
        folder = directory.paths.attempt(str(number))
        folder.mkdir(parents=True)
        held_then = ("1000",) if number == 900 else ()
        AttemptVerdict(
            "kill-switch", 7, 5, 0, "", held=held_then, job_id=str(number), time=50.0
        ).write(folder)
    assert set(releasers(run, pending(reason="JobHeldUser")).values()) == {True}


def test_tasks_that_are_held_again_leave_their_array_on_record(
    run: tuple[RunCard, RunDirectory],
) -> None:
    """`tr11 kill` holds the array, and the attempt that leaves holds by name what it still sees
    waiting.
    """
    directory = run[1]
    record_holds(directory, ("1000",), "ana", "a slow node")
    record_holds(directory, ("1000_[5,13]",), "tr11", "the kill switch is set", "kill-switch")
    waiting = tuple(replace(pending((task,)), reason="JobHeldUser") for task in (5, 13, 25))
    found = held_jobs(waiting, held_by_tr11(directory))
    assert [job.job_id for job in found.ours] == [
        job.job_id for job in waiting
    ] and not found.others


def test_a_long_name_of_tasks_is_read_whole(run: tuple[RunCard, RunDirectory]) -> None:
    tasks = tuple(range(1, 400, 2))
    job = pending(tasks, reason="JobHeldUser")
    record_holds(run[1], names_of((job,), (pending((2,)),)), "ben", "")
    assert max(map(len, held_by_tr11(run[1]))) > 300
    assert set(releasers(run, job).values()) == {True}


def test_of_two_records_of_one_name_a_hold_is_told_once() -> None:
    records = (
        HoldRecord("1000", "ben", NOW),
        HoldRecord("1000", "tr11", NOW - 9, is_for_fault=True),
    )
    seen = snapshot(jobs=(pending(reason="JobHeldUser"),), holds=records)
    assert standing_holds(seen) == records[:1]


def test_parts_of_an_array_have_holders_of_their_own() -> None:
    person, rest = pending((8,), reason="JobHeldUser"), pending((9, 10), reason="JobHeldAdmin")
    found = held_jobs((person, rest, pending((11,))), ("1000_[8-10]",), is_automatic=True)
    assert [job.pending_tasks for job in found.ours] == [(8,)]
    assert (
        [job.pending_tasks for job in found.others]
        == [(9, 10)]
        == [job.pending_tasks for job in found.taken_over]
    )
