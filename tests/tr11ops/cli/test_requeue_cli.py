"""`tr11 requeue`: what is refused, what --dry-run says, and whose options are whose."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState


class Slurm:
    """Knows one job, which ends in an hour and must not be put back."""

    def job(self, job_id: str) -> Job:
        return Job(
            job_id, "12", None, None, "train", "ana", JobState.RUNNING,
            end_time=time.time() + 3600, time_limit_seconds=7200, may_requeue=True,
        )  # fmt: skip


@pytest.fixture
def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TR11_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr("tr11ops.cli.requeue._scheduler", Slurm)
    return tmp_path


def test_what_would_be_done_is_shown_and_nothing_is(
    in_job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TASK_PID", "1")
    words = ["--before", "10m", "--signal", "usr1", "--group", "--max", "7", "--progress", "ckpt"]
    assert execute(["requeue", *words, "--dry-run", "--", "touch", "ran"]) == 0
    said = capsys.readouterr().out
    assert "USR1 goes to all processes of the command" in said and "scontrol requeue 12\n" in said
    assert "put back 0 times so far, of at most 7" in said and "ckpt changes; not there yet" in said
    assert not list(in_job.iterdir())


def test_the_commands_options_are_its_own(in_job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(5)"
    for dashes in ([], ["--"]):
        (in_job / ".tr11-requeue" / "12" / "start-0.json").unlink(missing_ok=True)
        words = ["requeue", *dashes, sys.executable, "-c", code, "--before", "x", "--dry-run"]
        assert execute(words) == 5
        assert "['--before', 'x', '--dry-run']" in capfd.readouterr().out
    assert execute(["requeue", "--", "true"]) == 2, "a second call in this start of the job"
    assert "has a `tr11 requeue` already" in capfd.readouterr().err


def test_what_is_finished_is_not_begun(in_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_job / "done").touch()
    assert execute(["requeue", "--finished", "done", "--", "touch", "ran"]) == 0
    assert "nothing is left to do" in capsys.readouterr().err and not (in_job / "ran").exists()


@pytest.mark.parametrize(
    "variable,value,words,said",
    [
        ("SLURM_JOB_ID", "", ["--", "true"], "SLURM_JOB_ID is not set"),
        ("TR11_SCHEDULER", "local", ["--", "true"], "the embedded scheduler"),
        ("SLURM_STEP_ID", "0", ["--", "true"], "inside a step of srun"),
        ("X", "", [], "COMMAND is missing"),
        ("X", "", ["--signal", "KILL", "--", "true"], "--signal KILL: it must be one of TERM"),
        ("X", "", ["--before", "2h", "--", "true"], "--before 2 h 00 min: job 12 ends in 59 min"),
        ("X", "", ["--before", "soon", "--", "true"], "soon is no length of time"),
        ("X", "", ["--max", "0", "--", "true"], "--max"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    in_job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    variable: str, value: str, words: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    assert execute(["requeue", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
    assert not list(in_job.iterdir())
