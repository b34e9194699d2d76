"""The main job on real Slurm: array, time limit with early signal, resume, kill switch. 4 nodes x 2 workers."""

import os

import pytest

from tests.end_to_end import Playground
from tr11ops.cluster.slurm import SlurmScheduler


@pytest.fixture
def playground(tmp_path, twin):
    place = Playground(tmp_path, {**os.environ, **twin.environment, "COLUMNS": "80"})
    place.prepare()
    return place


@pytest.mark.timeout(900)
def test_array_time_limit_resume_and_kill_switch(playground, twin):
    card = playground.card("tr11.toml", nodes=4, workers=2, dtype="bf16")
    limit = ["--set", "slurm.time_limit=00:02:00", "--set", "slurm.signal_seconds_before_limit=30"]
    playground.tr11("launch", "--array", "1-3", "--scheduler", "slurm", "--run", card, *limit)

    # Task 1 cannot end before its limit: the scheduler's early signal makes it save and leave.
    playground.wait(lambda: len(playground.ends()) == 1, "the first attempt")
    first = playground.ends()[0]
    assert (first.reason, first.restart) == ("signal", True)
    if first.iteration:  # the signal may come a minute early, before the first step on a loaded machine
        assert playground.manifest(first.iteration) is not None

    # Task 2 goes on where task 1 stopped.
    playground.wait(
        lambda: playground.steps()[-1]["iteration"] >= first.iteration + 3 if playground.steps() else False,
        "task 2's steps",
    )
    status = playground.tr11("status", "--run", card, "--json").stdout
    assert '"healthy"' in status or '"starting"' in status
    playground.tr11("kill", "--run", card, "--yes", "--wait", "--reason", "a test")

    # Task 3 is held; one that is let go by mistake finds the switch and does not train.
    slurm = SlurmScheduler(twin.environment)
    [waiting] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    assert waiting.job_id.endswith("_3") and waiting.reason.startswith("JobHeld")
    assert len(playground.ends()) == 2
    slurm.release(waiting.array_id)
    playground.wait(lambda: len(playground.ends()) == 3, "all attempts")
    _, second, third = playground.ends()
    assert second.reason == third.reason == "kill-switch"
    assert second.checkpoint_step == second.iteration > first.iteration
    assert playground.manifest(second.iteration) is not None
    jobs = {
        end.job_id: [step["iteration"] for step in playground.steps() if step["job_id"] == end.job_id]
        for end in playground.ends()
    }
    assert jobs[second.job_id][0] == first.iteration + 1
    assert jobs[third.job_id] == []
    out = [path.name for path in playground.folder.rglob("*.out")]
    assert len(out) == 3, out
    playground.tr11("status", "--run", card)
