"""A round of copies as a job: queued at most once, no matter who asks for it at the same time.

The job carries tr11-backup@MARK as its comment, MARK being the run directory's. While one with it waits or runs, no
other is queued.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tr11ops.cluster.base import BatchRequest, Job, Scheduler, SchedulerError, SchedulerUnreachable
from tr11ops.cron.scripts import Invocation, script_of
from tr11ops.runcard.slurm_syntax import parse_time_limit
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.sharing import make_shared

TEMPLATE = ("cron", "scheduler", "backup.slurm.j2")
JOB_NAME = "tr11-backup"
CLAIM = "backup-submit"
CLAIM_SECONDS = 300.0
OUTPUT_DAYS = 60
LOOKUPS = 5
LOOKUP_PAUSE_SECONDS = 2.0
EARLY_SECONDS = 120  # before the time limit the round is told to end
_COMMENT = re.compile(r"tr11-backup@([0-9a-f]{12})(?![0-9a-f])")


@dataclass(frozen=True)
class SubmitContext:
    """What submitting needs. `words` follow `tr11`, e.g. ("backup", "run")."""

    typed: Invocation
    directory: RunDirectory
    scheduler: Scheduler
    words: tuple[str, ...]
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep

    @property
    def comment(self) -> str:
        return f"tr11-backup@{self.directory.mark}"


@dataclass(frozen=True)
class Queued:
    """The job that makes the round. `is_new` is False when it was there already; `state` is then its state."""

    job_id: str
    is_new: bool
    state: str = ""


def jobs_of(jobs: Iterable[Job], mark: str) -> tuple[Job, ...]:
    """The jobs of one run's rounds that are not over, the oldest first."""
    found = []
    for job in jobs:
        match = _COMMENT.search(job.comment)
        if match and match[1] == mark and not job.state.is_final:
            found.append(job)
    return tuple(sorted(found, key=lambda job: int(job.raw_id) if job.raw_id.isdigit() else 0))


def request_of(desk: SubmitContext) -> BatchRequest:
    """The job: one node of [backup] partition, else of [cron]'s. Raises ValueError for what no script can hold."""
    backup, cron = desk.typed.card.backup, desk.typed.card.cron
    folder = desk.directory.paths.state / "backup" / "slurm"
    request = BatchRequest(
        script="",
        name=JOB_NAME,
        nodes=1,
        time_limit_seconds=parse_time_limit(backup.time_limit),
        output=str(folder / "%x-%j.out"),
        working_directory=desk.typed.folder,
        partition=backup.partition or cron.partition,
        account=backup.account or cron.account,
        constraint=backup.constraint or cron.constraint,
        quality_of_service=backup.quality_of_service or cron.quality_of_service,
        comment=desk.comment,
        signal_seconds_before_limit=_early(parse_time_limit(backup.time_limit)),
        requeue=True,
    )
    return replace(request, script=script_of(TEMPLATE, desk.typed, request, desk.typed.command(desk.words)))


def submit(desk: SubmitContext) -> Queued:
    """Queue the round unless it is queued. Raises SchedulerUnreachable (type it again: it is safe), SchedulerError.

    Raises OSError, ValueError too.
    """
    claims = ClaimFolder(desk.directory, CLAIM)
    for _ in range(LOOKUPS):
        before = claims.newest()
        found = _find(desk)
        if found is not None:
            return found
        if before is not None and before.is_living(desk.clock()):
            desk.pause(LOOKUP_PAUSE_SECONDS)
            continue
        mine = claims.take(Claim.of_this_process(desk.clock(), CLAIM_SECONDS), before)
        if mine is None:
            continue
        try:
            found = _find(desk)  # anyone who had the claim before may have queued it since the first look
            return found if found is not None else _queue(desk)
        finally:
            claims.release(mine)
    raise SchedulerError("someone else queues a round at this moment: look again in a minute")


def _queue(desk: SubmitContext) -> Queued:
    request = request_of(desk)
    folder = desk.directory.paths.state / "backup" / "slurm"
    make_shared(folder)
    _forget_outputs(folder, desk.clock())
    try:
        return Queued(desk.scheduler.submit(request), is_new=True)
    except SchedulerUnreachable:
        for _ in range(LOOKUPS):  # a submission whose answer was lost may have been taken all the same
            desk.pause(LOOKUP_PAUSE_SECONDS)
            try:
                found = _find(desk)
            except SchedulerUnreachable:
                continue
            if found is not None:
                return replace(found, is_new=True)
        raise


def _forget_outputs(folder: Path, now: float) -> None:
    """Remove outputs of old rounds, so that they do not pile up. What cannot be removed stays."""
    for path in folder.glob(f"{JOB_NAME}-*.out"):
        with suppress(OSError):
            if path.stat().st_mtime < now - OUTPUT_DAYS * 86_400:
                path.unlink()


def _find(desk: SubmitContext) -> Queued | None:
    found: Sequence[Job] = jobs_of(desk.scheduler.jobs(), desk.directory.mark)
    return Queued(found[0].raw_id, is_new=False, state=str(found[0].state)) if found else None


def _early(limit: int) -> int:
    """Seconds before the limit at which the round is told to end: two minutes, or a quarter of a short limit."""
    return max(1, min(EARLY_SECONDS, limit // 4))
