"""The log of ended jobs, recorded on a real Slurm 22.05 without accounting."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tr11ops.cluster import slurm_text
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.site import keep_site, read_site
from tr11ops.cluster.slurm_command import CommandResult

DATA = Path(__file__).parents[2] / "data" / "slurm" / "22.05"
LINES = (DATA / "jobcomp.txt").read_text().splitlines()


def by_name() -> dict[str, Job]:
    found = [job for line in LINES if (job := slurm_text.ended_job(line)) is not None]
    return {job.name: job for job in found}


def test_every_line_but_that_of_a_shrinking_job_is_an_end() -> None:
    others = [line for line in LINES if slurm_text.ended_job(line) is None]
    assert len(others) == 1
    assert "JobState=RESIZING" in others[0]


def test_what_is_told_of_an_end() -> None:
    job = by_name()["stepfail"]
    assert (job.state, job.exit_code, job.exit_signal) == (JobState.FAILED, 143, None)
    assert job.derived_exit_code == 134  # the step ended by SIGABRT; the batch script hid it
    assert (job.user, job.partition, job.nodes) == ("root", "gpu_p5", ("jean-zay-iam01",))
    assert (job.time_limit_seconds, job.node_count, job.working_directory) == (
        3600,
        1,
        "/scratch/tr11",
    )
    assert job.submit_time == datetime.datetime.fromisoformat("2026-11-21T19:22:59").timestamp()
    assert by_name()["timeout"].state is JobState.TIMEOUT


def test_tasks_of_an_array_carry_both_numbers() -> None:
    first, second = slurm_text.ended_jobs(LINES, "arr")
    assert (first.job_id, first.raw_id, first.array_id, first.task_id) == ("1_1", "4", "1", 1)
    assert (second.job_id, second.raw_id, second.array_id, second.task_id) == ("1_2", "1", "1", 2)


def test_a_name_with_blanks_and_a_job_that_lost_a_node_end_once() -> None:
    (job,) = slurm_text.ended_jobs(LINES, "odd name=x")
    assert (job.state, job.raw_id, job.array_id) == (JobState.CANCELLED, "2", None)


def test_a_number_that_ends_again_after_a_requeue_counts_once() -> None:
    again = [
        line.replace("JobState=FAILED", "JobState=COMPLETED")
        for line in LINES
        if "Name=stepfail" in line
    ]
    (job,) = slurm_text.ended_jobs([*LINES, *again], "stepfail")
    assert job.state is JobState.COMPLETED


@pytest.mark.parametrize("limit", ["UNLIMITED", "Partition_Limit", "1-00:00:00"])
def test_limits_in_words(limit: str) -> None:
    line = next(line for line in LINES if "Name=stepfail" in line).replace(
        "TimeLimit=60", f"TimeLimit={limit}"
    )
    job = slurm_text.ended_job(line)
    assert job is not None
    assert job.time_limit_seconds == (86400 if limit.startswith("1") else None)


@given(cut=st.integers(0, 600), line=st.sampled_from(LINES), noise=st.text(max_size=20))
def test_no_line_breaks_the_reader(cut: int, line: str, noise: str) -> None:
    job = slurm_text.ended_job(line[:cut] + noise)
    assert job is None or job.state.is_final


def test_the_site_tells_where_the_log_is(tmp_path: Path) -> None:
    shown = (DATA / "show-config.txt").read_text()

    def runner(arguments: list[str], **_: object) -> CommandResult:
        return (
            CommandResult(0, shown, "") if arguments[0] == "scontrol" else CommandResult(1, "", "")
        )

    site = read_site("ana", runner)  # type: ignore[arg-type]
    assert site.job_completions == "/twin/logs/jobcomp.txt"
    assert site.version == "22.05.8"
    keep_site(tmp_path / "site.json", site)
    assert '"job_completions": "/twin/logs/jobcomp.txt"' in (tmp_path / "site.json").read_text()
    shown = shown.replace("jobcomp/filetxt", "jobcomp/none")
    assert read_site("ana", runner).job_completions == ""  # type: ignore[arg-type]
