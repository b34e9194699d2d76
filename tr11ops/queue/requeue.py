"""When a plain command's job goes back into the queue, and when it does not: the rules, and the record
of each start of the job by which they count.

A job keeps its number when it is put back, so that its starts lie in one folder: STATE/JOB/start-N.json,
where N is how often Slurm has started it before. The file is made before the command begins, by one
call alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.job_environment import step_of
from tr11ops.base.observed import cause
from tr11ops.base.units import counted, duration, timestamp
from tr11ops.cluster.base import Job, JobState
from trainer.contract.documents import document, record_of
from trainer.contract.errors import Tr11Error
from trainer.contract.files import NumberedFiles, json_text, write_json
from trainer.contract.paths import attempt_label
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

LEAST_SECONDS = 10.0  # from the request to stop until the limit
LONGEST_MARGIN = 30.0  # for putting it back, before the limit
_NEAR_SECONDS = (
    60.0  # a signal that comes so much sooner than the request would is of the limit too
)


class StopCause(StrEnum):
    """Why the command was asked to stop."""

    LIMIT = "limit"  # the job's time is nearly over
    WARNED = "warned"  # by USR1 or USR2: sbatch --signal, or a person
    TERMINATED = "terminated"  # by TERM: a preemption, the limit itself, scancel, or a person
    INTERRUPTED = "interrupted"  # by INT

    @property
    def words(self) -> str:
        """As the beginning of a sentence."""
        if self is StopCause.LIMIT:
            return "the time limit comes"
        return f"{self} by a signal"


class RequeueRequest(Record):
    """What was typed. `signal`: the name of the one by which the command is asked to stop, `before`
    so many seconds before the limit. `most`: how often the job is put back. `progress`: a file or
    folder that changes where it got on; `finished`: a file that is there once nothing is left to do.
    """

    command: tuple[str, ...]
    state: Path
    signal: str = "TERM"
    before: float = 300.0
    most: int = 50
    progress: Path | None = None
    finished: Path | None = None
    to_group: bool = False

    def last_moment(self, limit: float) -> float:
        """Until when the command may take to stop, where its job ends at `limit`."""
        return limit - min(LONGEST_MARGIN, self.before / 4)


class JobStart(Record):
    """One start of a job. `progressed`: None where that is not known. `status`: the command's exit
    code, None where it did not end by itself. `requeued`: whether the job was put back at its end.
    """

    job: str
    number: int
    began: float
    host: str
    asked: StopCause | None = None
    progressed: bool | None = None
    status: int | None = None
    requeued: bool = False
    why: str = ""


# ----------------------------------------------------------------------------- the job around it
def job_around(environment: Mapping[str, str]) -> tuple[str, int]:
    """The name of the job around this process, as scontrol takes it, and how often it was started
    before. Raises WrongUsage where there is none that can be put back.
    """
    number = environment.get("SLURM_JOB_ID")
    if not number:
        raise WrongUsage(
            "there is no job around this command (SLURM_JOB_ID is not set): call it in a script that sbatch runs"
        )
    if environment.get("TR11_SCHEDULER") == "local":
        raise WrongUsage(
            "the embedded scheduler puts no job back into its queue: submit an array, whose next task goes on"
        )
    if step_of(environment) is not None:
        raise WrongUsage(
            "it is called inside a step of srun: call it before srun, as `tr11 requeue -- srun COMMAND`"
        )
    task = environment.get("SLURM_ARRAY_TASK_ID")
    array = {"array_id": environment.get("SLURM_ARRAY_JOB_ID"), "task_id": task}
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return attempt_label(array, number), int(restarts) if restarts.isdecimal() else 0


def require_usable(job: Job, request: RequeueRequest, now: float) -> float:
    """When the job ends, in seconds since the epoch. Raises WrongUsage where it cannot be put back,
    or not in time.
    """
    if not job.may_requeue:
        raise WrongUsage(
            f"job {job.job_id} may not be put back into the queue (Requeue=0, or no batch job): "
            "submit it with `sbatch --requeue`"
        )
    if job.time_limit_seconds is None or job.end_time is None:
        raise WrongUsage(
            f"job {job.job_id} has no time limit, so that there is nothing to wait for: give sbatch --time"
        )
    left = job.end_time - now
    if left < request.before + LEAST_SECONDS:
        raise WrongUsage(
            f"--before {duration(request.before)}: job {job.job_id} ends in {duration(left)}; "
            "give less, or sbatch --time more"
        )
    return job.end_time


# ----------------------------------------------------------------------------- the rule
def why_not(
    job: Job | None,
    start: JobStart,
    past: Sequence[JobStart],
    request: RequeueRequest,
    asked_at: float,
) -> str:
    """Why the job is not put back after this start; "" where it is. Pure.

    `job` is as the scheduler has it now, None where that is not known; `asked_at` when the command
    was asked to stop, in seconds since the epoch.
    """
    if job is None:
        return "the scheduler does not know the job"
    if job.state is not JobState.RUNNING:
        return f"it is {job.state}: it was cancelled, or put back already"
    if not job.may_requeue:
        return "it may not be put back (Requeue=0)"
    if not _is_of_the_scheduler(job, start, request, asked_at):
        return "neither its time limit nor a preemption is near: a person ended it"
    done = sum(one.requeued for one in past)
    if done >= request.most:
        return f"it was put back {counted(done, 'time')} already, which is --max"
    before = [one for one in past if one.requeued]
    if start.progressed is False and before and before[-1].progressed is False:
        return f"{request.progress} has not changed in two starts in a row: it makes no progress"
    return ""


def _is_of_the_scheduler(
    job: Job, start: JobStart, request: RequeueRequest, asked_at: float
) -> bool:
    """Whether the command was asked to stop because its job's time is over, or for another job."""
    if start.asked in {StopCause.LIMIT, StopCause.WARNED} or job.preempt_time is not None:
        return True
    is_near = job.end_time is not None and job.end_time - asked_at <= request.before + _NEAR_SECONDS
    return start.asked is StopCause.TERMINATED and is_near


# ----------------------------------------------------------------------------- the record
class StartStore(Record):
    """The starts of one job, in the folder `STATE/JOB`."""

    folder: Path

    def claim(self, start: JobStart) -> None:
        """Begin this start of the job, as the only one who does. Raises Refusal."""
        try:
            is_first = self._files.make(start.number, json_text(document(start)).encode())
        except OSError as error:
            raise Refusal(f"--state: {cause(error)}; name another folder") from None
        if not is_first:
            raise WrongUsage(
                f"job {start.job} has a `tr11 requeue` already{self._since(start.number)}: one in a job; "
                f"put all of its work into one command (its record: {self._files.file(start.number)})"
            )

    def write(self, start: JobStart) -> None:
        """Replace the record of a start. Raises OSError."""
        write_json(self._files.file(start.number), document(start))

    def past(self, number: int) -> tuple[JobStart, ...]:
        """The starts before this one, in their order; what cannot be read tells nothing."""
        found = []
        with suppress(OSError):
            for earlier in self._files.numbers():
                start = self._read(earlier) if earlier < number else None
                if start is not None:
                    found.append(start)
        return tuple(found)

    @property
    def _files(self) -> NumberedFiles:
        return NumberedFiles(self.folder, "start-")

    def _since(self, number: int) -> str:
        start = self._read(number)
        if start is None:
            return ""
        return f" (since {timestamp(start.began, None)} on {start.host})"

    def _read(self, number: int) -> JobStart | None:
        with suppress(OSError, ValueError, Tr11Error):
            return record_of(JobStart, read_json(self._files.file(number)) or {})
        return None


def newest_change(place: Path | None) -> float | None:
    """When something in a folder, or a file, was last changed, by the clock of its file system; 0
    where nothing is there, None where that cannot be seen, or there is no place.
    """
    if place is None:
        return None
    newest = 0.0
    try:
        newest = place.stat().st_mtime
        for folder, _, names in os.walk(place):
            for name in ("", *names):
                with suppress(FileNotFoundError):  # a file that is replaced right now
                    newest = max(newest, (Path(folder) / name).lstat().st_mtime)
    except FileNotFoundError:
        return newest
    except OSError:
        return None
    return newest
