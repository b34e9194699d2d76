"""A trainer that knows nothing of tr11, on a real Slurm: what the embedded scheduler cannot prove of it.
All ten faults are given there by `make trainer-faults`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.trainers.faults.given import Fault, Given
from tests.tr11ops.trainers.faults.outcome import play
from tests.tr11ops.trainers.faults.run import FaultRun
from tests.tr11ops.trainers.faults.sites import TWIN, SlurmSite
from tests.tr11ops.trainers.faults.trainers import PLAIN, STEPS
from tests.tr11ops.trainers.kept import LIGHT
from tr11ops.cluster.base import JobState
from tr11ops.twin.twin import Twin

PATIENCE = 5.0  # a guard against waiting for ever
# a process for each worker, without a launcher or torch, which saves and leaves when it is asked
POLITE = replace(
    PLAIN,
    words=(*PLAIN.words, "polite"),
    tables=f'start = "srun"\n{PLAIN.tables}[trainer.stop]\nhow = "signal TERM"\nneeds = "polite"\n',
    environment=LIGHT,
)


@pytest.fixture(scope="module")
def site(twin_home: Path) -> Iterator[SlurmSite]:
    require_slurm()
    plan = replace(TWIN, name="foreign", slurmd_timeout_seconds=5, kill_wait_seconds=2)
    with Twin.up(plan, twin_home) as twin:
        yield SlurmSite(twin)


def batch_host_dead(run: FaultRun) -> Given:
    """The node of rank 0 and of the batch script: the job is lost without a word."""
    run.write_card(0.5)
    run.begin("--array", "1-3")
    run.until_saved(run.trainer.interval)
    run.until_step(run.trainer.interval + 1)
    node = run.node_of(0)
    run.site.lose(run.folder, node)
    run.until_idle()
    return Given(node=node)


def time_limit(run: FaultRun) -> Given:
    """The first task's limit is shortened once it has trained, to the second minute from then, of which
    Slurm warns at its next look: how many steps a time is worth, a busy machine alone knows.
    """
    run.write_card(2.5, "00:30:00", "signal_seconds_before_limit = 110")
    run.begin("--array", "1-2")
    run.until_step(2)
    jobs = run.site.scheduler(run.folder).jobs("toy")
    job = next(job for job in jobs if job.state is JobState.RUNNING)
    assert job.start_time is not None
    minutes = int(time.time() - job.start_time) // 60 + 2
    environment = {**os.environ, **run.site.environment(run.folder)}
    change = ["scontrol", "update", f"JobId={job.raw_id}", f"TimeLimit={minutes}"]
    subprocess.run(change, env=environment, check=True)
    run.until_idle()
    return Given()


def test_the_next_task_goes_on_where_the_batch_host_was_lost(
    site: SlurmSite, tmp_path: Path
) -> None:
    fault = Fault("batch-host-dead", "the batch host dies", batch_host_dead)
    outcome = play(FaultRun(PLAIN, site, tmp_path, PATIENCE), fault)
    assert outcome.wrong == (), outcome
    (restart,) = outcome.restarts
    assert restart.first == restart.whole + 1


def test_a_warned_task_saves_and_the_next_one_loses_no_step(
    site: SlurmSite, tmp_path: Path
) -> None:
    run = FaultRun(POLITE, site, tmp_path, PATIENCE)
    outcome = play(run, Fault("time-limit", "the time limit", time_limit))
    assert outcome.wrong == (), outcome
    warned, finished = run.ends()
    # Slurm's warning, or the agent's own clock where that warning comes late
    assert warned.reason in {"signal", "exit-duration"} and warned.restart
    assert warned.checkpoint_step == warned.iteration >= 2 and finished.reason == "finished"
    assert [one.iteration for one in run.records()] == [*range(1, STEPS + 1)]
