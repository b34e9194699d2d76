"""A job that has lost a node, on real Slurm: 22.05 without accounting refuses every change of it
and of its array.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.waiting import until
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(TwinPlan(name="shrunk", nodes=4, gpus=0, cpu_nodes=0), twin_home) as made:
        yield made


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
        with pytest.raises(subprocess.CalledProcessError):  # the sentence that is not believed
            asked(twin, tmp_path, "scontrol", "hold", array)
        slurm.hold(array)
        assert _task(slurm, array, 2).priority == 0
        slurm.exclude(array, (twin.plan.gpu_node_names[0],))
        slurm.release(array)
        until(lambda: _task(slurm, array, 2).state is JobState.RUNNING, "the second task")
        slurm.release(array)  # nothing of it waits any more
        with pytest.raises(SchedulerError):
            slurm.hold(array)
    finally:
        slurm.cancel(array)


def _task(slurm: SlurmScheduler, array: str, number: int) -> Job:
    found = [
        job
        for job in slurm.jobs()
        if job.array_id == array and number in (job.task_id, *job.pending_tasks)
    ]
    return found[0]
