"""`tr11 requeue`: a plain command whose job goes back into the queue at its time limit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.deadline import SCHEDULER_SECONDS, keep_waiting
from tr11ops.base.errors import Refusal, SchedulerError, Unobserved, WrongUsage
from tr11ops.base.units import counted, duration, timestamp
from tr11ops.cli.common import say, span_option
from tr11ops.cli.runner import DRY_RUN, NO_RUN, Change, Outcome, RunContext, unasked
from tr11ops.cluster.base import Job, JobState
from tr11ops.queue.requeue import (
    JobStart,
    RequeueRequest,
    StartStore,
    job_around,
    newest_change,
    require_usable,
)
from tr11ops.queue.requeue_run import AGAIN_SECONDS, GuardedCommand
from trainer.contract.files import host_name

if TYPE_CHECKING:
    from tr11ops.cluster.slurm import SlurmScheduler

PATIENCE_SECONDS = 120.0  # with a scheduler that is silent at the start
STATE = Path(".tr11-requeue")
SIGNALS = ("TERM", "INT", "USR1", "USR2", "HUP")
# of them, the ones that mean the job's end to us, and end a shell that does not catch them
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


def requeue(
    context: Annotated[RunContext, NO_RUN, DRY_RUN],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="What to run, with its own options."),
    ] = None,
    before: Annotated[
        float,
        typer.Option(
            "--before",
            parser=span_option,
            metavar="TIME",
            help="So long before the limit it is asked to stop: 90s, 10m; bare: seconds.",
        ),
    ] = 300,
    signal_name: Annotated[
        str, typer.Option("--signal", metavar="NAME", help="The signal that asks it to stop.")
    ] = "TERM",
    to_group: Annotated[
        bool, typer.Option("--group", help="The signal goes to all processes of the command.")
    ] = False,
    most: Annotated[
        int, typer.Option("--max", metavar="N", min=1, help="Put the job back so often at most.")
    ] = 50,
    progress: Annotated[
        Path | None,
        typer.Option(
            "--progress",
            metavar="PATH",
            help="A folder (its checkpoints) or file that changes while it gets on.",
        ),
    ] = None,
    finished: Annotated[
        Path | None,
        typer.Option(
            "--finished",
            metavar="FILE",
            help="A file that the command makes once nothing is left to do.",
        ),
    ] = None,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Where the starts are counted.")
    ] = STATE,
) -> Change | Outcome:
    """Run a command in a batch script; at the job's time limit it is asked to stop, and the job is
    put back into the queue.

    For any command, without a run card. The job is put back once, where it may be, and not when the
    command ended by itself (its exit code is passed on), when it was cancelled, or when --progress
    shows none in two starts in a row. A preemption counts as the limit.

    Returns 1 where the job is, or could not be, put back: nothing behind && runs then. 2: wrong
    usage, such as outside a job, without a time limit, or a job that may not be put back.

    Examples:
      tr11 requeue -- srun python train.py --resume
      tr11 requeue --before 10m --signal USR1 --progress ckpt -- srun ./train.sh
      tr11 requeue --dry-run -- srun ./train.sh
    """
    if not command:
        raise WrongUsage(
            "COMMAND is missing: tr11 requeue -- srun python train.py; "
            "what is queued of a run: `tr11 launch --replace`"
        )
    name = signal_name.upper().removeprefix("SIG")
    if name not in SIGNALS:
        raise WrongUsage(f"--signal {signal_name}: it must be one of {', '.join(SIGNALS)}")
    request = RequeueRequest(
        command=tuple(command),
        state=state.absolute(),
        signal=name,
        before=before,
        most=most,
        progress=progress,
        finished=finished,
        to_group=to_group,
    )
    label, number = job_around(os.environ)
    scheduler = _scheduler()
    job = _job(scheduler, label)
    try:
        limit = require_usable(job, request, time.time())
    except WrongUsage:
        _settle(scheduler, job)
        raise
    if finished is not None and finished.exists():
        line = f"{finished} is there: nothing is left to do"
        return Outcome(notes=[f"tr11 requeue: {line}"])
    start = JobStart(job=label, number=number, began=time.time(), host=host_name())
    store = StartStore(request.state / label)

    def run() -> Outcome:
        keep_waiting()
        guarded = GuardedCommand(
            request, start=start, limit=limit, store=store, scheduler=scheduler, tell=_tell
        )
        _tell(_plan(request, job, limit)[0])
        try:
            code = guarded.run()
        except Refusal:
            _settle(scheduler, job)
            raise
        if code:
            _settle(scheduler, job)
        return Outcome(exit_code=code)

    def preview() -> Outcome:
        lines = [*_plan(request, job, limit), *_counted(request, store, number), *_hearing()]
        return Outcome(lines=lines)

    return unasked(run, preview)


def _settle(scheduler: SlurmScheduler, job: Job) -> None:
    """Before an end with another status than 0, let Slurm not hold an expedited job for it."""
    if not job.is_expedited:
        return
    try:
        now = scheduler.job(job.job_id)
        if now is not None and now.state is JobState.RUNNING:
            scheduler.withdraw_requeue(job.job_id)
    except SchedulerError as error:
        held = f"Slurm may hold job {job.job_id} (REQUEUE_HOLD): cancel or release it"
        _tell(f"{held}; it could not be asked not to: {error.sentence}")


def _tell(line: str) -> None:
    say(f"tr11 requeue: {line}")


def _scheduler() -> SlurmScheduler:
    from tr11ops.cluster.slurm import SlurmScheduler

    return SlurmScheduler(timeout_seconds=SCHEDULER_SECONDS)


def _job(scheduler: SlurmScheduler, label: str) -> Job:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            job = scheduler.job(label)
            break
        except SchedulerError as error:  # one that is busy shall not cost the job its start
            if time.monotonic() > deadline:
                raise Unobserved(f"job {label}: {error.sentence}") from None
            time.sleep(AGAIN_SECONDS)
    if job is None:
        raise Unobserved(f"job {label}: Slurm does not know it")
    return job


def _plan(request: RequeueRequest, job: Job, limit: float) -> list[str]:
    """What would be done and when, a line each."""
    start = ", and starts again at once" if job.is_expedited else ""
    whom = "all processes of the command" if request.to_group else "the command"
    asked, last = _clock(limit - request.before), _clock(request.last_moment(limit))
    return [
        f"job {job.job_id} ends at {_clock(limit)}; at {asked} {request.signal} goes to {whom}",
        f"once it has stopped, at {last} at the latest: scontrol requeue {job.job_id}{start}",
    ]


def _clock(moment: float) -> str:
    return timestamp(moment, None, "%Y-%m-%d %H:%M:%S")


def _counted(request: RequeueRequest, store: StartStore, number: int) -> list[str]:
    """What is on record of the job, and what its progress is told by."""
    done = sum(one.requeued for one in store.past(number))
    lines = [f"put back {counted(done, 'time')} so far, of at most {request.most}"]
    if request.progress is None:
        return [*lines, "whether it gets on is not known: give --progress"]
    changed = newest_change(request.progress)
    if changed is None:
        return [*lines, f"{request.progress} cannot be looked at: whether it gets on is not known"]
    since = "not there yet"
    if changed:
        since = f"last changed {duration(time.time() - changed)} ago"
    return [*lines, f"it gets on where {request.progress} changes; {since}"]


def _hearing() -> list[str]:
    """Who hears the warning of `sbatch --signal=B:...`: this process, or a shell before it."""
    shell = int(os.environ.get("SLURM_TASK_PID") or 0)
    if shell in {0, os.getpid()}:
        return []
    try:
        status = Path(f"/proc/{shell}/status").read_text(encoding="utf-8")
    except OSError:
        return []
    caught = next((line.split()[1] for line in status.splitlines() if line[:7] == "SigCgt:"), "0")
    if any(int(caught, 16) >> (number - 1) & 1 for number in _WARNINGS):
        return ["the batch script catches a warning signal; whether it passes it on is its own"]
    would = "with `sbatch --signal=B:USR1@...` it, and the job, would end at that"
    cure = "leave --signal out, or begin this line with `exec`"
    return [f"the batch script catches no warning: {would}; {cure}"]
