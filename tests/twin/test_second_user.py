"""Two people: one launched the run, the other is on call. Neither is root's equal for the other's
jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.operation import Operation
from tr11ops.cli.common import directory_of
from tr11ops.rundir.hold_store import held_by_tr11
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.verdict import TRAINING

PLAN = TwinPlan(
    name="two", nodes=3, gpus=8, cpu_nodes=0, kill_wait_seconds=2, minimum_job_age_seconds=3
)
ON_CALL = "nobody"
# Another user, who may read this interpreter wherever it lies, and write where his rights let him.
AS_ON_CALL = (
    "setpriv", f"--reuid={ON_CALL}", "--regid=nogroup", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder whose group is that of the person on call, as a project's folder is; every new file
    keeps the group.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can act as a second user, with setpriv")
    folder = Path(tempfile.mkdtemp(prefix="tr11-shared-", dir="/tmp"))
    shutil.chown(folder, group="nogroup")
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def twin(shared: Path) -> Iterator[Twin]:
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="tr11-") as home:
        Path(home).chmod(0o755)
        with Twin.up(PLAN, Path(home)) as running:
            yield running


def on_call(run: Operation, *words: str) -> subprocess.CompletedProcess[str]:
    """Type a command as the other person."""
    program = [sys.executable, "-c", "from tr11ops.cli.main import run; run()"]
    command = [*AS_ON_CALL, *program, *words, "--run", str(run.card_path)]
    for change in run.overrides:
        command += ["--set", change]
    environment = {
        **os.environ,
        **run.twin.environment,
        "PYTHONPATH": str(Path.cwd()),
        "HOME": "/nonexistent",
    }
    environment |= {"USER": ON_CALL, "LOGNAME": ON_CALL, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("SUDO_USER", None)
    done = subprocess.run(
        command,
        cwd=run.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def test_the_person_on_call_stops_and_resumes_anothers_run(twin: Twin, shared: Path) -> None:
    """The scheduler refuses to hold a stranger's tasks: the run's own controller, which owns them,
    does it instead.

    And the job is asked for again when the scheduler has forgotten it: what is not found has not
    failed.
    """
    run = Operation(twin, shared, nodes=2, spares=1)
    first = run.launch("--array", "1-6")
    run.until_step(3)
    shown = on_call(run, "status", "--json")
    assert json.loads(shown.stdout)["verdict"] in TRAINING, shown.stdout
    refused = subprocess.run(
        [*AS_ON_CALL, "scontrol", "hold", first], env={**os.environ, **twin.environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert refused.returncode != 0, (
        "the scheduler lets a stranger hold the job: this proves nothing"
    )
    stopped = on_call(run, "kill", "--yes", "--wait", "--reason", "on call")
    assert stopped.returncode == 0, stopped.stderr
    [end] = run.ends()
    assert (end.reason, end.checkpoint_step) == ("kill-switch", end.iteration)
    switch = json.loads(run.card.kill_switch.read_text())
    assert (switch["who"], switch["why"]) == (ON_CALL, "on call")
    run.until(
        lambda: (
            run.tasks_left() == 5 and all(job.reason.startswith("JobHeld") for job in run.jobs())
        ),
        "held",
    )
    assert len(run.attempts()) == 1

    [attempt] = run.attempts()
    run.until(lambda: run.slurm.job(attempt) is None, "the scheduler has forgotten the first task")
    forgotten = json.loads(on_call(run, "status", "--json").stdout)
    assert forgotten["verdict"] == "stopped"
    run.tr11("resume", "--yes")
    run.until_step(end.iteration + 3)
    assert len(run.attempts()) == 2

    directory = directory_of(run.card)
    # a pause: the controller's hold is on record at once, resume does not disown it, and the
    # watchdog releases it
    assert on_call(run, "pause", "--yes", "--reason", "new data").returncode == 0
    run.until(lambda: held_by_tr11(directory) == {first}, "the record of the controller's hold")
    shown = on_call(run, "resume", "--dry-run")
    assert (
        "by tr11: the running attempt releases it" in shown.stderr
        and "not by tr11" not in shown.stderr
    )
    (run.paths.stop_request(run.attempts()[-1])).touch()
    run.until(
        lambda: all(not job.state.is_active for job in run.jobs()), "the end of the second task"
    )
    resumed = on_call(run, "resume", "--yes")
    assert resumed.returncode == 1 and "must release it" in resumed.stderr, resumed.stderr
    told = on_call(run, "pulse", "--act", "--no-email")
    # root launched it
    assert "not done: the scheduler says that an administrator holds it" in told.stdout, told.stdout
    run.tr11("resume", "--yes")
    run.until(lambda: len(run.attempts()) == 3, "the third task")
    run.check_nothing_is_lost()
