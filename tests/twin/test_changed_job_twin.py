"""A job that is not as the card made it, on real Slurm: another time limit, whoever set it, which the
training follows; and a lost node, after which Slurm refuses every change.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun
from tests.waiting import until
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.fault_effects import ask_client
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

# it leaves by the plan that follows from the limit alone
NO_SIGNAL = "slurm.signal_seconds_before_limit=none"


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(TwinPlan(name="limit", nodes=4, gpus=0, cpu_nodes=0), twin_home) as made:
        yield made


def limit(stage: SmallRun, job: str, minutes: int) -> None:
    """As an administrator or the job's owner does it, past tr11."""
    ask_client(stage.twin, "scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def job_of(stage: SmallRun, attempt: str) -> Job:
    return next(job for job in stage.jobs() if job.raw_id == attempt)


def test_a_running_job_whose_limit_is_shortened_saves_before_it(stage: SmallRun) -> None:
    stage.launch(3, NO_SIGNAL, "checkpoint.interval=100000")
    attempt = stage.train()
    limit(stage, attempt, 1)
    stage.wait_for_verdict(attempt)
    verdict = stage.verdict(attempt)
    assert (verdict["reason"], verdict["restart"]) == ("exit-duration", True)
    assert verdict["checkpoint_step"] == verdict["iteration"] > 5
    stage.wait(lambda: job_of(stage, attempt).state.is_final, "the job's end")
    assert job_of(stage, attempt).state is JobState.COMPLETED
    second = stage.train(attempt=1)
    assert stage.launches(second)[0]["checkpoint_before"] == verdict["checkpoint_step"]


def test_a_running_job_whose_limit_is_lengthened_uses_it(stage: SmallRun) -> None:
    stage.launch(2, NO_SIGNAL, "slurm.time_limit=00:01:00")
    attempt = stage.train()
    began = job_of(stage, attempt).start_time
    assert began is not None
    limit(stage, attempt, 30)
    stage.wait(lambda: time.time() > began + 62, "the first limit")
    reached = stage.iteration(attempt)
    stage.wait(lambda: stage.iteration(attempt) > reached + 20, "more steps")
    assert len(stage.launches(attempt)) == 1


def test_tasks_whose_limit_is_too_short_for_a_save_are_held_before_they_train(
    stage: SmallRun,
) -> None:
    stage.paths.main_log.parent.mkdir(parents=True)
    stage.paths.main_log.write_text("time (ms) | save-checkpoint: 90000.00\n")
    inject(stage.twin, "partition-down")
    stage.launch(5, NO_SIGNAL)
    limit(stage, stage.array, 1)
    heal(stage.twin, kind="partition-down")
    stage.wait_for_hold()
    [attempt] = stage.attempts()
    stage.wait_for_verdict(attempt)
    verdict = stage.verdict(attempt)
    assert (verdict["held"], verdict["restart"], stage.launches(attempt)) == (
        [stage.array],
        False,
        [],
    )
    assert "time limit" in verdict["held_because"] and "1 min" in verdict["held_because"]
    assert stage.queued().pending_tasks == (2, 3, 4, 5)


def test_tasks_that_end_without_a_word_after_they_began_burn_two(stage: SmallRun) -> None:
    """Slurm kills a job whose batch script has died before it can save: all that it trained is
    lost, each time.
    """
    stage.launch(5, "checkpoint.interval=100000", "rehearsal.save_seconds=6000")
    for number in (0, 1):
        stage.train(attempt=number)
        inject(stage.twin, "batch-killed")
    stage.wait_for_hold()
    # the third may start before the second has gone
    assert stage.queued().pending_tasks in ((3, 4, 5), (4, 5))
    for attempt in stage.attempts():
        assert len(stage.launches(attempt)) <= 1  # in a job that is over nothing is started again
    assert all(stage.launches(attempt) == [] for attempt in stage.attempts()[2:])

    def says_why() -> bool:
        """Of the task that held it; whose script was killed gives no verdict."""
        files = [stage.paths.attempt(one) / "verdict.json" for one in stage.attempts()[1:]]
        held = [stage.verdict(path.parent.name) for path in files if path.exists()]
        return any(
            verdict["held"] == [stage.array] and "without a word" in verdict["held_because"]
            for verdict in held
        )

    stage.wait(says_why, "the verdict that holds the array")


# ---------------------------------------------------------------------------
# A job that has lost a node, on real Slurm: 22.05 without accounting refuses every change of it
# and of its array.


def asked(twin: Twin, folder: Path, *words: str) -> str:
    done = subprocess.run(
        words, env=twin.client_environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_is_released_is_released_whatever_slurm_says_of_the_job_that_lost_a_node(
    small_twin: Twin, tmp_path: Path
) -> None:
    """The order of `tr11 resume`: the held task starts at once, while scontrol says that nothing
    could be changed.
    """
    twin = small_twin
    slurm = SlurmScheduler(twin.environment)
    array = asked(
        twin,
        tmp_path,
        "sbatch",
        "--parsable",
        "--no-kill",
        "-N2",
        "--array=1-2%1",
        "--wrap=sleep 300",
    )
    try:
        until(lambda: _task(slurm, array, 1).state is JobState.RUNNING, "the first task")
        slurm.hold(array)
        # as after a node's death
        asked(twin, tmp_path, "scontrol", "update", f"JobId={array}_1", "NumNodes=1")
        # Slurm 22.05 says here that it could not, and did; 24.11 says that it did
        with suppress(subprocess.CalledProcessError):
            asked(twin, tmp_path, "scontrol", "hold", array)
        slurm.hold(array)
        assert _task(slurm, array, 2).priority == 0
        slurm.exclude(array, (twin.plan.gpu_node_names[0],))
        slurm.release(array)
        until(lambda: _task(slurm, array, 2).state is JobState.RUNNING, "the second task")
        slurm.release(array)  # nothing of it waits any more
        with suppress(SchedulerError):  # 24.11 takes the word
            slurm.hold(array)
        assert _task(slurm, array, 2).state is JobState.RUNNING
    finally:
        slurm.cancel(array)


def _task(slurm: SlurmScheduler, array: str, number: int) -> Job:
    found = [
        job
        for job in slurm.jobs()
        if job.array_id == array and number in (job.task_id, *job.pending_tasks)
    ]
    return found[0]
