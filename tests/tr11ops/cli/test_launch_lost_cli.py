"""Clients that die while they submit, jobs that come late, and chains that queue themselves: never
two trainings.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.base.errors import LaunchBusy
from tr11ops.cli.launch import prepare
from tr11ops.cluster.base import BatchRequest, Job
from tr11ops.cluster.local import LocalScheduler
from tr11ops.launch.session import carry_out, check_launch
from tr11ops.launch.successor import BatchJob, begin_attempt, queue_successor
from tr11ops.rundir.paths import (
    BEING_SUBMITTED,
    SUPERSEDED,
    RunDirectory,
    Submission,
    is_superseded,
    new_tag,
    parse_comment,
)
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

DIES = """
import os, signal, sys
from tr11ops.cluster.local import LocalScheduler
real = LocalScheduler.submit
def submit(self, request):
    if sys.argv[1] == "after":
        real(self, request)
    os.kill(os.getpid(), signal.SIGKILL)
LocalScheduler.submit = submit
from tr11ops.cli.main import run
run(["launch", "--run", sys.argv[2], "--array", "1-3", "--scheduler", "local"])
"""


def run_directory(bench: LocalBench) -> RunDirectory:
    root = bench.folder / "run"
    return RunDirectory(RunPaths(root, "small", "main"), root / "kill-switch")


def die(bench: LocalBench, when: str) -> None:
    """Launch from a client that is killed just before, or just after, the scheduler has taken the
    job.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", DIES, when, str(bench.card)],
        env=environment,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done


def own(bench: LocalBench) -> list[Job]:
    return [job for job in bench.living() if job.name == "small"]


def test_a_client_killed_after_the_job_was_taken_is_found_again(bench: LocalBench) -> None:
    bench.block()
    die(bench, "after")
    [record] = run_directory(bench).read_submissions()
    assert (record.job_id, record.note) == (None, BEING_SUBMITTED)
    answer = bench.launch("--array", "1-3")
    assert answer.code == 1 and "already queued" in answer.out and len(own(bench)) == 1
    # Queueing behind it settles it: the record gets the number that the queue shows.
    [job] = own(bench)
    assert bench.launch("--after", job.raw_id).code == 0
    assert run_directory(bench).read_submissions()[0].job_id == job.raw_id


def test_a_client_killed_before_the_job_was_taken_is_superseded(bench: LocalBench) -> None:
    bench.block()
    die(bench, "before")
    answer = bench.launch("--array", "1-3")
    assert answer.code == 0 and "its job should come after all, it leaves at once" in answer.out
    first, second = run_directory(bench).read_submissions()
    assert (
        is_superseded(first)
        and first.note.endswith(second.tag)
        and second.job_id == own(bench)[0].raw_id
    )
    assert len(own(bench)) == 1


class ComesLate(LocalScheduler):
    """A controller that takes an earlier client's job between two looks at its queue."""

    def __init__(self, request: BatchRequest) -> None:
        super().__init__()
        self.looks = 0
        self._request = request

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        self.looks += 1
        if self.looks == 3:  # the two checks have looked; the settling looks
            super().submit(self._request)
        return super().jobs(name)


def test_a_job_that_comes_while_a_launch_settles_stays_alone(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    die(bench, "before")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    job = prepare(str(bench.card), [], "local", array="1-3")
    lost = run_directory(bench).read_submissions()[0]
    plan = check_launch(job).plan
    assert plan is not None
    job = replace(
        job, scheduler=ComesLate(replace(plan.request, comment=job.directory.comment(lost.tag)))
    )
    with pytest.raises(LaunchBusy, match="of an earlier launch has just come"):
        carry_out(job, check_launch(job), "")
    assert (
        len(own(bench)) == 1
        and run_directory(bench).read_submissions()[0].job_id == own(bench)[0].raw_id
    )


def test_the_attempts_tell_of_a_job_that_slurm_has_forgotten(bench: LocalBench) -> None:
    bench.block()
    die(bench, "before")
    directory = run_directory(bench)
    [lost] = directory.read_submissions()
    write_json(
        directory.paths.attempt("812") / "attempt.json", {"submission": lost.tag, "array_id": "810"}
    )
    assert bench.launch("--array", "1-3").code == 0
    assert directory.read_submissions()[0].job_id == "810" and not is_superseded(
        directory.read_submissions()[0]
    )


# ------------------------------------------------------------------- what a job does when it starts
def started(bench: LocalBench, record: Submission, number: str, said: list[str]) -> BatchJob:
    directory = run_directory(bench)
    directory.write_submission(record)
    card = prepare(str(bench.card), [], "local").card
    return BatchJob(card, directory, number, record.tag, LocalScheduler(), said.append)


def record_of(**changes: object) -> Submission:
    values = Submission(
        new_tag(), "1", "local", 1.0, "me", "here", "small", "main", None, 2, "hash"
    )
    return replace(values, **changes)  # type: ignore[arg-type]


def test_a_job_that_was_given_up_leaves_and_withdraws_its_tasks(bench: LocalBench) -> None:
    bench.block()
    late = bench.submit("exec sleep 600", name="small")
    other = record_of(job_id="77")
    run_directory(bench).write_submission(other)
    said: list[str] = []
    job = started(bench, record_of(job_id=None, note=f"{SUPERSEDED}{other.tag}"), late, said)
    why = f"submission {job.submission} was given up for {other.tag} while no one knew whether this job exists"
    assert begin_attempt(job) == why
    assert own(bench) == [] and said == []
    run_directory(bench).submission(
        other.tag
    ).record.unlink()  # the scheduler had refused the other one
    assert begin_attempt(job) == ""


def test_a_batch_job_that_was_given_up_trains_nothing(bench: LocalBench) -> None:
    blocker = bench.block()
    number = bench.launch("--array", "1-3", "--json").json["job_id"]
    directory = run_directory(bench)
    [record] = directory.read_submissions()
    other = record_of(job_id="77")
    directory.write_submission(other)
    directory.write_submission(replace(record, note=f"{SUPERSEDED}{other.tag}"))
    bench.scheduler.cancel(blocker)
    bench.wait(
        lambda jobs: all(job.state.is_final for job in jobs if job.array_id == number), seconds=240
    )
    assert (
        f"leaves without training: submission {record.tag} was given up"
        in directory.paths.main_log.read_text()
    )
    assert directory.attempt_ids() == [] and not directory.paths.metrics.exists()


def test_a_second_job_of_a_submission_leaves_to_a_live_one(bench: LocalBench) -> None:
    bench.block()
    first, second = (bench.submit("exec sleep 600", name="small") for _ in range(2))
    job = started(bench, record_of(job_id=first), second, [])
    assert begin_attempt(job) == f"job {first} of the same submission is pending"
    assert [entry.raw_id for entry in own(bench)] == [first]
    assert begin_attempt(replace(job, number=first)) == ""
    bench.scheduler.cancel(first)
    assert begin_attempt(job) == ""


def test_a_started_job_records_itself_if_its_client_could_not(bench: LocalBench) -> None:
    job = started(bench, record_of(job_id=None, note=BEING_SUBMITTED), "12", [])
    assert begin_attempt(job) == ""
    record = Submission.read(job.directory.submission(job.submission).record)
    assert record is not None and (record.job_id, record.note) == ("12", "")
    assert (
        begin_attempt(replace(job, submission="")) == ""
        and begin_attempt(replace(job, submission=new_tag())) == ""
    )


def test_each_job_of_a_chain_queues_the_next_one_once(bench: LocalBench) -> None:
    bench.block()
    done = bench.launch("--array", "1-3", "--set", "slurm.chain=self", "--json").json
    directory = run_directory(bench)
    [first] = directory.read_submissions()
    assert (done["chain"], first.chain, first.left, first.array) == ("self", "self", 2, None)
    said: list[str] = []
    card = prepare(str(bench.card), ["slurm.chain=self"], "local").card
    job = BatchJob(card, directory, str(first.job_id), first.tag, LocalScheduler(), said.append)
    # a job that starts twice queues one
    assert begin_attempt(job) == "" and begin_attempt(job) == ""
    _, second = directory.read_submissions()
    assert (second.chain, second.left, second.dependency) == ("self", 1, f"afterany:{first.job_id}")
    assert said == [f"tr11: job {second.job_id} is queued behind this one; 1 more is to follow it"]
    queued = next(entry for entry in own(bench) if entry.raw_id == second.job_id)
    assert parse_comment(queued.comment) == (second.tag, directory.mark)
    # A client that died between sending and recording is looked up, and not sent again.
    directory.write_submission(replace(second, job_id=None, note=BEING_SUBMITTED))
    assert queue_successor(job, first).job_id == second.job_id and len(own(bench)) == 2
    third = replace(job, number=str(second.job_id), submission=second.tag)
    assert begin_attempt(third) == "" and directory.read_submissions()[-1].left == 0
    last = directory.read_submissions()[-1]
    assert begin_attempt(replace(job, number=str(last.job_id), submission=last.tag)) == ""
    assert len(directory.tags()) == 3


def test_dependent_jobs_are_queued_one_behind_the_other(bench: LocalBench) -> None:
    bench.block()
    done = bench.launch("--array", "1-3", "--set", "slurm.chain=afterany", "--json").json
    records = run_directory(bench).read_submissions()
    assert done["jobs"] == [record.job_id for record in records] and len(records) == 3
    assert [record.dependency for record in records] == [
        None,
        *(f"afterany:{number}" for number in done["jobs"][:2]),
    ]
    again = bench.launch("--array", "1-2")
    assert again.code == 1 and f"--after {done['jobs'][-1]}" in again.out
    assert bench.launch("--array", "1-2", "--after", done["jobs"][-1]).code == 0


# ----------------------------------------------------------------------------- repairing
def test_repair_releases_what_tr11_held_after_showing_it(bench: LocalBench) -> None:
    bench.block()
    number = bench.launch("--array", "1-3", "--json").json["job_id"]
    assert bench.launch("--repair").code == 0
    bench.scheduler.hold(number)
    directory = run_directory(bench)
    alone = bench.launch("--repair", "--yes")
    assert alone.code == 0 and f"left alone: job {number} was not held by tr11" in alone.out
    write_json(directory.paths.attempt("5") / "verdict.json", {
        "reason": "error", "iteration": None, "checkpoint_step": None, "exit_status": 3, "message": "x", "held": [number]
    })  # fmt: skip
    shown = bench.launch("--repair", "--dry-run", "--json").json
    assert (
        shown["steps"][0] | {"why": ""} == {"action": "release", "job": number, "why": ""}
        and not shown["done"]
    )
    assert bench.launch("--repair").code == 2  # no one can be asked
    assert "JobHeldUser" in own(bench)[0].reason
    assert bench.launch("--repair", "--yes", "--reason", "disk is back").code == 0
    assert "JobHeldUser" not in own(bench)[0].reason


def test_rehearse_runs_the_card_small_and_says_what_differs(bench: LocalBench) -> None:
    bench.block()
    shown = bench.launch("--rehearse", "--dry-run")
    assert shown.code == 0 and "  run.exit_interval: none -> 10\n" in shown.out
    assert not (bench.folder / "run-rehearsal").exists()
    done = bench.launch("--rehearse", "--json")
    assert done.code == 0 and done.json["plan"]["run"] == "small-rehearsal"
    assert {"key": "run.exit_interval", "main": None, "rehearsal": 10} in done.json["differences"]
    card = bench.folder / "run-rehearsal" / "rehearsal.toml"
    status = bench.tr11("status", "--run", str(card), "--scheduler", "local", "--json")
    assert status.json["run"]["name"] == "small-rehearsal" and not (bench.folder / "run").exists()
