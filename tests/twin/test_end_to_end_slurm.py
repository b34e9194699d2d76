"""The main job on real Slurm: array, time limit with early signal, resume, kill switch. 2 nodes x 2
workers.
"""

import math
import os
import subprocess
import time

import pytest

from tests.end_to_end import Playground
from tr11ops.cluster.slurm import SlurmScheduler

# before the limit: for a save on a machine with other work, twenty times what it takes, and more
SIGNAL_SECONDS = 170
LOOK_SECONDS = (
    30  # Slurm looks so often whose signal is due, and sends one that is due before its next look
)


@pytest.fixture
def playground(tmp_path, twin):
    place = Playground(tmp_path, {**os.environ, **twin.environment, "COLUMNS": "80"})
    place.prepare()
    return place


def test_array_time_limit_resume_and_kill_switch(playground, twin):
    card = playground.card("tr11.toml", nodes=2, workers=2, dtype="bf16")
    signal = ["--set", f"slurm.signal_seconds_before_limit={SIGNAL_SECONDS}"]
    playground.tr11("launch", "--array", "1-3", "--scheduler", "slurm", "--run", card, *signal)
    slurm = SlurmScheduler(twin.environment)

    # Task 1 does not end before its limit, which comes when it has trained: Slurm's early signal
    # makes it save and leave.
    playground.wait(lambda: len(playground.steps()) >= 3, "task 1's steps")
    [running] = [job for job in slurm.jobs() if job.name == "small" and job.state.is_active]
    # due at its next look
    minutes = math.ceil((time.time() - running.start_time + SIGNAL_SECONDS - LOOK_SECONDS) / 60)
    sooner = ["scontrol", "update", f"JobId={running.job_id}", f"TimeLimit={minutes}"]
    subprocess.run(sooner, env=dict(playground.environment), check=True)
    playground.wait(lambda: len(playground.ends()) == 1, "the first attempt")
    first = playground.ends()[0]
    assert (first.reason, first.restart) == ("signal", True)
    assert first.checkpoint_step == first.iteration >= 3
    assert playground.manifest(first.iteration) is not None

    # Task 2 goes on where task 1 stopped.
    playground.wait(
        lambda: playground.steps()[-1]["iteration"] >= first.iteration + 3, "task 2's steps"
    )

    # Any one look on a loaded machine may see too little, so it is looked until one has seen the
    # training.
    def is_seen_training() -> bool:
        status = playground.tr11("status", "--run", card, "--json", expect=None).stdout
        return '"healthy"' in status or '"starting"' in status

    playground.wait(is_seen_training, "a status that sees task 2 train")
    playground.tr11("kill", "--run", card, "--yes", "--wait", "--reason", "a test")

    # Task 3 is held; one that is let go by mistake finds the switch and does not train.
    [waiting] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    assert waiting.job_id.endswith("_3")
    playground.wait(lambda: reason(slurm, waiting.job_id).startswith("JobHeld"), "the hold")
    assert len(playground.ends()) == 2
    slurm.release(waiting.array_id)
    playground.wait(lambda: len(playground.ends()) == 3, "all attempts")
    _, second, third = playground.ends()
    assert second.reason == third.reason == "kill-switch"
    assert second.checkpoint_step == second.iteration > first.iteration
    assert playground.manifest(second.iteration) is not None
    jobs = {
        end.job_id: [
            step["iteration"] for step in playground.steps() if step["job_id"] == end.job_id
        ]
        for end in playground.ends()
    }
    assert jobs[second.job_id][0] == first.iteration + 1
    assert jobs[third.job_id] == []
    out = [path.name for path in playground.folder.rglob("*.out")]
    assert len(out) == 3, out
    playground.tr11("status", "--run", card)


def reason(slurm: SlurmScheduler, job_id: str) -> str:
    """Why this job waits, as Slurm says now."""
    return next(job.reason for job in slurm.jobs() if job.job_id == job_id)
