"""What a batch job does for the chain before it trains: leaves if it was given up, and queues the
job after it.

`begin_attempt` is called once, at the start of each attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from tr11ops.base.errors import LaunchBusy, SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import cause, known
from tr11ops.base.units import counted
from tr11ops.cluster.base import Scheduler
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.margins import read_history
from tr11ops.launch.plan import plan_launch
from tr11ops.launch.submit import LOOKUP_PAUSE_SECONDS, launch_lock, submit
from tr11ops.observe.files import read_exclusions
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.exit_duration import card_as_written
from tr11ops.rundir.exclusions import INCLUDED
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import (
    SUPERSEDED,
    RunDirectory,
    Submission,
    is_superseded,
    is_tag,
    job_of_tag,
    new_tag,
)
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

AGAIN_SECONDS = 30.0  # between two tries to queue the next job, while this one trains


class BatchJob(Record):
    """A job that has just started. `number` is what it was submitted as (an array's id),
    `submission` its tag.
    """

    card: RunCard
    directory: RunDirectory
    number: str
    submission: str
    scheduler: Scheduler
    say: Callable[[str], None]


def begin_attempt(job: BatchJob) -> str:
    """Why this job must leave at once without training, "" when it may go on.

    A job that goes on is recorded with its submission, if the client that sent it could not do
    that, and queues its successor where its chain is of that kind. Nothing here keeps a job from
    training that may train: what cannot be read or written is said.
    """
    if not is_tag(job.submission):
        return ""
    try:
        record = Submission.read(job.directory.submission(job.submission).record)
    except (OSError, ValueError) as error:
        job.say(f"tr11: the record of submission {job.submission} cannot be read: {cause(error)}")
        return ""
    if record is None:
        return ""
    why = _why_leave(job, record)
    if why:
        _withdraw(job)
        return why
    if record.job_id is None:
        record = replace(record, job_id=job.number, note="")
        try:
            job.directory.write_submission(record)
        except OSError as error:
            job.say(f"tr11: submission {record.tag} could not be recorded: {cause(error)}")
    if record.chain == "self" and record.left > 0 and not _is_queued(job, record):
        threading.Thread(
            target=_queue_until_done, args=(job, record), name="successor", daemon=True
        ).start()
    return ""


def _why_leave(job: BatchJob, record: Submission) -> str:
    if is_superseded(record):
        tag = record.note.removeprefix(SUPERSEDED)
        if is_tag(tag) and not job.directory.submission(tag).record.exists():
            return ""  # the other one was refused by the scheduler: this job is all there is
        return f"submission {record.tag} was given up for {tag} while no one knew whether this job exists"
    if record.job_id in {None, job.number}:
        return ""
    try:
        other = job.scheduler.job(str(record.job_id))
    except SchedulerError:
        return ""  # the lease on the checkpoints keeps the two apart
    # a task by its two names
    if other is None or other.state.is_final or other.raw_id == job.number:
        return ""
    return f"job {record.job_id} of the same submission is {other.state.lower()}"


def _withdraw(job: BatchJob) -> None:
    """Cancel this job with all its waiting tasks: each of them would start only to leave."""
    try:
        job.scheduler.cancel(job.number)
    except SchedulerError as error:
        job.say(f"tr11: job {job.number} could not be withdrawn: {cause(error)}")


# ----------------------------------------------------------------------------- the next job of the
# chain
def _is_queued(job: BatchJob, record: Submission) -> bool:
    """Try once, before the training starts; False when it must be tried again beside it."""
    try:
        queue_successor(job, record)
    except (SchedulerUnreachable, LaunchBusy) as error:
        job.say(f"tr11: the next job is not queued yet, trying again: {cause(error)}")
        return False
    except (SchedulerError, OSError, ValueError) as error:
        job.say(
            f"tr11: WARNING: the next job cannot be queued, the chain ends with this one: {cause(error)}"
        )
    return True


def _queue_until_done(job: BatchJob, record: Submission) -> None:
    while True:
        time.sleep(AGAIN_SECONDS)
        if _is_queued(job, record):
            return


def queue_successor(job: BatchJob, record: Submission) -> Submission:
    """Submit the job that follows this one, unless it is there; returns its record.

    Raises SchedulerError as `submit` does, LaunchBusy while another launch is under way, OSError.
    """
    directory = job.directory
    scheduler = job.scheduler
    with launch_lock(directory.launch_lock):
        for earlier in directory.read_submissions():
            awaited = (earlier.dependency or "").split(":")[1:]
            if job.number not in awaited or earlier.chain != "self" or is_superseded(earlier):
                continue
            number = earlier.job_id or job_of_tag(earlier.tag, scheduler.jobs(), {})
            if number is not None:
                done = replace(earlier, job_id=number, note="")
                directory.write_submission(done)
                return done
            time.sleep(LOOKUP_PAUSE_SECONDS)
            number = job_of_tag(earlier.tag, scheduler.jobs(), {})
            if number is None:
                directory.write_submission(
                    replace(earlier, note=f"{SUPERSEDED}a later try of job {job.number}")
                )
            else:
                raise LaunchBusy(f"job {number} of an earlier try has just come")
        request = LaunchRequest(exclude=_excluded(job, record), after=job.number)
        kept = directory.submission(record.tag).card
        card = card_as_written(read_json(kept) or {}, str(kept))
        plan = plan_launch(
            card,
            directory,
            request=request,
            excluded=request.exclude,
            tag=new_tag(),
            history=read_history(directory.paths),
            expedites=_is_expedited(job),
        )
        card_toml = directory.submission(record.tag).card_toml.read_text(encoding="utf-8")
        done = submit(
            plan,
            scheduler,
            card_toml=card_toml,
            user=record.user,
            why=f"chain: {record.left} more after job {job.number}",
            chain="self",
            left=record.left - 1,
        )
    job.say(
        f"tr11: job {done.job_id} is queued behind this one; {counted(done.left, 'more is', 'more are')} to follow it"
    )
    return done


def _is_expedited(job: BatchJob) -> bool:
    """Whether this job starts again at once when it loses a node; so does the next one then."""
    own = job.scheduler.job(job.number)
    return own is not None and own.is_expedited


def _excluded(job: BatchJob, record: Submission) -> tuple[str, ...]:
    """What this job excludes, less the nodes taken off the run's list since, with those that are on
    it now.
    """
    listed = [entry.node for entry in known(read_exclusions(job.directory.exclusions), ())]
    back = {
        entry.data.get("node")
        for entry in read_journal(job.directory.journal).entries
        if entry.kind == INCLUDED and entry.time >= record.time
    }
    of_card = job.card.slurm.excluded_nodes
    kept = (node for node in record.excluded if node not in back or node in of_card)
    return tuple(dict.fromkeys((*kept, *listed)))
