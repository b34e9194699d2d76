"""A round as a job: one at a time, no matter who asks, and also where the scheduler's answer was
lost.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.backup.round_cases import Rounds
from tr11ops.backup.submit import EARLY_SECONDS, Queued, SubmitContext, jobs_of, request_of, submit
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cron.table_programs import Invocation


class Queue:
    """A scheduler of which only the queue matters."""

    name = "slurm"

    def __init__(self) -> None:
        self.requests: list[BatchRequest] = []
        self.held: list[Job] = []
        self.loses_answer = self.refuses = False

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        return tuple(self.held)

    def submit(self, request: BatchRequest) -> str:
        if self.refuses:
            raise SchedulerError("invalid partition")
        self.requests.append(request)
        number = str(100 + len(self.requests))
        self.held.append(
            Job(
                number,
                number,
                None,
                None,
                request.name,
                "ana",
                JobState.PENDING,
                comment=request.comment,
            )
        )
        if self.loses_answer:
            raise SchedulerUnreachable("timed out")
        return number


@pytest.fixture
def submit_context(tmp_path: Path) -> SubmitContext:
    options = ("slurm.options.licenses=scratch", "slurm.options.mem=900G")
    rounds = Rounds(
        tmp_path,
        "backup.partition=archive",
        "cron.account=six@cpu",
        "backup.time_limit=20:00:00",
        *options,
    )
    invocation = Invocation(
        rounds.card, tmp_path / "a card.toml", ("run.variant=main",), tmp_path, {"PATH": "/bin"}
    )
    queue: object = Queue()
    return SubmitContext(
        invocation, rounds.directory, queue, ("backup", "run"), pause=lambda seconds: None
    )  # type: ignore[arg-type]


def queue_of(submit_context: SubmitContext) -> Queue:
    assert isinstance(submit_context.scheduler, Queue)
    return submit_context.scheduler


def test_the_job_is_asked_for_on_the_partition_for_copies(submit_context: SubmitContext) -> None:
    request = request_of(submit_context)
    assert (request.partition, request.account, request.time_limit_seconds) == (
        "archive",
        "six@cpu",
        72_000,
    )
    assert request.signal_seconds_before_limit == EARLY_SECONDS and request.nodes == 1
    for piece in (
        "--partition=archive",
        "--requeue",
        "backup run",
        "'run.variant=main'",
        "/a card.toml'",
    ):
        assert piece in request.script or piece.replace("'", "") in request.script
    assert "--no-requeue" not in request.script
    assert "#SBATCH --licenses=scratch" in request.script and "--mem=" not in request.script


def test_a_second_one_finds_the_first(submit_context: SubmitContext) -> None:
    assert submit(submit_context) == Queued("101", is_new=True)
    assert submit(submit_context) == Queued("101", is_new=False, state="PENDING")
    queue = queue_of(submit_context)
    queue.held[0] = replace(queue.held[0], state=JobState.COMPLETED)
    assert submit(submit_context) == Queued("102", is_new=True)
    stranger = replace(queue.held[1], comment="tr11-backup@0123456789ab")
    assert jobs_of([stranger], submit_context.directory.mark) == ()


def test_many_at_once_queue_one(submit_context: SubmitContext) -> None:
    found: list[Queued] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                submit(replace(submit_context, pause=lambda seconds: time.sleep(0.01)))
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queue_of(submit_context).requests) == 1 and {queued.job_id for queued in found} == {
        "101"
    }


def test_an_answer_that_was_lost_is_looked_up(submit_context: SubmitContext) -> None:
    queue_of(submit_context).loses_answer = True
    assert submit(submit_context) == Queued("101", is_new=True, state="PENDING")
    assert len(queue_of(submit_context).requests) == 1


def test_a_refusal_leaves_the_way_free(submit_context: SubmitContext) -> None:
    queue_of(submit_context).refuses = True
    with pytest.raises(SchedulerError, match="invalid partition"):
        submit(submit_context)
    queue_of(submit_context).refuses = False
    assert submit(submit_context).is_new


def test_outputs_of_long_ago_are_removed(submit_context: SubmitContext) -> None:
    folder = submit_context.directory.paths.state / "backup" / "slurm"
    folder.mkdir(parents=True)
    for name, age in (("tr11-backup-1.out", 61), ("tr11-backup-2.out", 59), ("notes.txt", 99)):
        (folder / name).write_text("x")
        os.utime(folder / name, (time.time() - age * 86_400,) * 2)
    submit(submit_context)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "tr11-backup-2.out"]
