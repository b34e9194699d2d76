"""A job that has lost a node starts again at once, where the site has that (Slurm from 25.11 on), and
no end of ours leaves it held in the queue. On an older Slurm `conftest.py` leaves this file out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun, job_in
from tests.waiting import end_of_file, until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.sbatch_options import EXPEDITE
from tr11ops.rundir.exclusions import read_version
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

TR11 = Path(sys.executable).parent / "tr11"


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    plan = TwinPlan(
        name="expedited", nodes=4, gpus=0, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
        message_timeout_seconds=5, slurm_settings=("SlurmctldParameters=enable_expedited_requeue",),
    )  # fmt: skip
    with Twin.up(plan, twin_home) as made:
        yield made


def end_of(run: SmallRun, number: str, *states: JobState) -> Job:
    return job_in(run.slurm, number, states, run.folder)


def test_a_job_that_loses_its_batch_host_goes_on_under_its_number(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The array's only task is not used up, and the lost node is excluded."""
    words = ["launch", "--scheduler", "slurm", "--array", "1-2", "--set", "slurm.spare_nodes=0"]
    stage.launch(1, "slurm.spare_nodes=0")
    number = stage.train()
    running = stage.running()
    lost = running.nodes[0]
    inject(stage.twin, "node-dead", node=lost)
    down = ["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=a test"]
    subprocess.run(down, env={**os.environ, **stage.twin.environment}, check=True, timeout=60)
    stage.wait(
        lambda: "was started again by Slurm (" in stage.paths.main_log.read_text(),
        "the second start",
    )
    before = stage.iteration()
    stage.wait(lambda: stage.iteration() > before, "steps of the second start")
    assert stage.attempts() == [number] and len(stage.launches(number)) == 1
    assert stage.running().job_id == running.job_id and lost not in stage.running().nodes
    [excluded] = read_version(stage.directory.exclusions).exclusions
    assert excluded.node == lost and "Slurm starts job" in excluded.evidence[0]
    capsys.readouterr()
    assert execute([*words, "--dry-run", "--after", running.raw_id, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["expedites"] and f"#SBATCH {EXPEDITE}\n" in plan["script"]


def test_a_failing_start_fails_and_is_not_held(stage: SmallRun) -> None:
    """By itself, Slurm would put it back and hold it for good: no task would follow."""
    stage.launch(2, "slurm.spare_nodes=0", 'slurm.setup=["exit 7"]')
    first = f"{stage.array}_1"
    job = end_of(stage, first, JobState.FAILED, JobState.PENDING, JobState.COMPLETED)
    if job.state is JobState.PENDING:  # before it has begun
        job = end_of(stage, first, JobState.FAILED, JobState.COMPLETED)
    assert job.state is JobState.FAILED and job.exit_code != 0


def test_a_failing_command_of_tr11_requeue_is_not_held(stage: SmallRun) -> None:
    """Nor is one whose call is refused; one that is asked to stop goes back and starts at once."""

    def submit(name: str, line: str) -> str:
        request = BatchRequest(
            f"#!/bin/bash\nexec {TR11} requeue {line}\n", name, 1, 600, f"{name}.out", stage.folder,
            options=(("open-mode", "append"),), expedites=True,
        )  # fmt: skip
        return stage.slurm.submit(request)

    first = '[ -n "$SLURM_RESTART_COUNT" ] || { touch begun; exec sleep 600; }'
    back = submit("back", f"-- bash -c '{first}'")
    failing = submit("failing", "-- bash -c 'exit 7'")
    refused = submit("refused", "--before 1h -- true")
    for number, code in ((failing, 7), (refused, 2)):
        assert end_of(stage, number, JobState.FAILED).exit_code == code
    until((stage.folder / "begun").exists, "the first start")
    warn = ["scancel", "--batch", "--signal=USR1", back]
    subprocess.run(warn, env={**os.environ, **stage.twin.environment}, check=True, timeout=60)
    # by itself within the second, against two minutes
    assert end_of(stage, back, JobState.COMPLETED).exit_code == 0
    said = end_of_file(stage.folder / "back.out")
    assert "back into the queue, 1 time of at most 50" in said


def test_without_scontrol_on_the_nodes_a_failing_start_ends_with_0(stage: SmallRun) -> None:
    """Then nothing can take the wish back, and a job that Slurm holds is worse than a wrong status."""
    stage.launch(1, "slurm.spare_nodes=0", 'slurm.setup=["exit 7"]')
    script = next(stage.directory.submissions.glob("*/train.sbatch")).read_text()
    stage.clear()
    programs = stage.folder / "bin"
    programs.mkdir()
    for name in (
        "bash",
        "sleep",
        "timeout",
        "date",
        "mktemp",
        "rm",
        "mkdir",
        "cat",
        "find",
        "wc",
        "stat",
        "hostname",
        "id",
    ):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    done = subprocess.run(
        ["/bin/bash", "-s"], input=script, cwd=stage.folder, capture_output=True, text=True, check=False,
        env={"PATH": str(programs), "SLURM_JOB_ID": "999999"},
    )  # fmt: skip
    said = done.stdout + "".join(
        path.read_text() for path in stage.directory.submissions.glob("*/*.out")
    )
    assert done.returncode == 0 and "is told to Slurm as 0" in said, (said, done.stderr)
