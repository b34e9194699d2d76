"""A job that Slurm has started again under its old number, because it lost a node: what is kept of its
start before, and which nodes it has lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import JobState, Scheduler
from tr11ops.observe.files import read_details
from tr11ops.rundir.attempts import attempts_without_verdict
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record


class EarlierStart(Record):
    """A start of a job that Slurm has ended to start it again, by the number of its attempt."""

    job_id: str
    nodes: tuple[str, ...]


def restarts(environment: Mapping[str, str]) -> int:
    """How often Slurm has started this job again under its number."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def own_start_before(attempt: Path, environment: Mapping[str, str]) -> EarlierStart | None:
    """The start before of the attempt's own job, as its record says; None where there was none."""
    nodes = tuple(read_details(attempt / "attempt.json").get("nodes") or ())
    if not restarts(environment) or not nodes:
        return None
    return EarlierStart(attempt.name, nodes)


def set_launches_aside(attempt: Path, number: int) -> None:
    """Keep the records of the start before, the `number`th, where they are not taken for this one's."""
    with suppress(OSError):
        (attempt / "launches").rename(attempt / f"launches-of-start-{number}")


def waiting_start_before(
    directory: RunDirectory, job_id: str, scheduler: Scheduler | None
) -> EarlierStart | None:
    """The attempt just before `job_id`, where its job waits to be started again: of an array, the next
    task may come between. None where that is not so, or not known.
    """
    folder = next(attempts_without_verdict(directory.paths, job_id), None)
    if folder is None or scheduler is None:
        return None
    try:
        job = scheduler.job(folder.name)
    except SchedulerError:
        return None
    if job is None or job.state is not JobState.PENDING:
        return None
    nodes = tuple(read_details(folder / "attempt.json").get("nodes") or ())
    return EarlierStart(folder.name, nodes)
