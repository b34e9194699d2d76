"""A round of copies as a job: queued at most once, no matter who asks for it at the same time.

The job carries tr11-backup@MARK as its comment, MARK being the run directory's. While one with it
waits or runs, no other is queued.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job, Scheduler
from tr11ops.cluster.sbatch_options import of_any_job, options_of
from tr11ops.cron.chain import LOOKUP_PAUSE_SECONDS, LOOKUPS, find_lost
from tr11ops.cron.table_programs import Invocation, script_of
from tr11ops.runcard.sections import parse_time_limit, requested
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared
from trainer.contract.record import Record

TEMPLATE = ("cron", "scheduler", "backup.slurm.j2")
JOB_NAME = "tr11-backup"
CLAIM = "backup-submit"
CLAIM_SECONDS = 300.0
OUTPUT_DAYS = 60
EARLY_SECONDS = 120  # before the time limit the round is told to end
_COMMENT = re.compile(r"tr11-backup@([0-9a-f]{12})(?![0-9a-f])")


class SubmitContext(Record):
    """What submitting needs. `words` follow `tr11`, e.g. ("backup", "run")."""

    invocation: Invocation
    directory: RunDirectory
    scheduler: Scheduler
    words: tuple[str, ...]
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep

    @property
    def comment(self) -> str:
        return f"tr11-backup@{self.directory.mark}"


class Queued(Record):
    """The job that makes the round. `is_new` is False when it was there already; `state` is then
    its state.
    """

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


def request_of(submit_context: SubmitContext) -> BatchRequest:
    """The job: one node of [backup] partition, else of [cron]'s. Raises ValueError for what no
    script can hold.
    """
    backup, cron = submit_context.invocation.card.backup, submit_context.invocation.card.cron
    folder = submit_context.directory.paths.state / "backup" / "slurm"
    request = BatchRequest(
        **{**requested(cron), **requested(backup)},
        script="",
        name=JOB_NAME,
        nodes=1,
        time_limit_seconds=parse_time_limit(backup.time_limit),
        # the script opens its own: Slurm ends a job whose output cannot be opened
        output="/dev/null",
        working_directory=submit_context.invocation.folder,
        comment=submit_context.comment,
        signal_seconds_before_limit=_early(parse_time_limit(backup.time_limit)),
        requeue=True,
        options=of_any_job(options_of(submit_context.invocation.card.slurm.options)),
    )
    command = submit_context.invocation.command(submit_context.words)
    return replace(
        request,
        script=script_of(TEMPLATE, submit_context.invocation, request, command, folder=folder),
    )


def submit(submit_context: SubmitContext) -> Queued:
    """Queue the round unless it is queued. Raises SchedulerUnreachable (type it again: it is safe),
    SchedulerError.

    Raises OSError, ValueError too.
    """
    claims = ClaimFolder(submit_context.directory, CLAIM)
    for _ in range(LOOKUPS):
        before = claims.newest()
        found = _find(submit_context)
        if found is not None:
            return found
        if before is not None and before.is_living(submit_context.clock()):
            submit_context.pause(LOOKUP_PAUSE_SECONDS)
            continue
        mine = claims.take(Claim.of_this_process(submit_context.clock(), CLAIM_SECONDS), before)
        if mine is None:
            continue
        try:
            # anyone who had the claim before may have queued it since the first look
            found = _find(submit_context)
            if found is not None:
                return found
            return _queue(submit_context)
        finally:
            claims.release(mine)
    raise SchedulerError("someone else queues a round at this moment: look again in a minute")


def _queue(submit_context: SubmitContext) -> Queued:
    request = request_of(submit_context)
    folder = submit_context.directory.paths.state / "backup" / "slurm"
    make_shared(folder)
    _forget_outputs(folder, submit_context.clock())
    try:
        return Queued(submit_context.scheduler.submit(request), is_new=True)
    except SchedulerUnreachable:
        found = find_lost(lambda: _find(submit_context), submit_context.pause)
        if found is None:
            raise
        return replace(found, is_new=True)


def _forget_outputs(folder: Path, now: float) -> None:
    """Remove outputs of old rounds, so that they do not pile up. What cannot be removed stays."""
    for path in folder.glob(f"{JOB_NAME}-*.out"):
        with suppress(OSError):
            if path.stat().st_mtime < now - OUTPUT_DAYS * 86_400:
                path.unlink()


def _find(submit_context: SubmitContext) -> Queued | None:
    found: Sequence[Job] = jobs_of(submit_context.scheduler.jobs(), submit_context.directory.mark)
    if found:
        return Queued(found[0].raw_id, is_new=False, state=str(found[0].state))
    return None


def _early(limit: int) -> int:
    """Seconds before the limit at which the round is told to end: two minutes, or a quarter of a
    short limit.
    """
    return max(1, min(EARLY_SECONDS, limit // 4))
