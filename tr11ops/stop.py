"""Stopping a run through its kill switch: what that would stop, and waiting until it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tr11ops.cluster.base import Job, Scheduler, SchedulerError
from tr11ops.evidence import cause, observed, read_checkpoints, read_heartbeats, read_steps
from tr11ops.launch.facts import foreground_trainings
from tr11ops.launch.queue import own_jobs
from tr11ops.runcard import RunCard
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Unknown, known
from trainer.contract import EndMarker, Heartbeat


@dataclass(frozen=True)
class StopView:
    """What a kill switch would stop. `iteration` is the last one that was logged, `checkpoint` the newest whole one."""

    running: tuple[Job, ...]
    queued_tasks: int
    queued: tuple[Job, ...]
    foreground: tuple[str, ...]
    iteration: int | None
    checkpoint: int | None
    doubt: str  # why the jobs are not known; empty when they are

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.queued or self.foreground or self.doubt)


def look(card: RunCard, directory: RunDirectory, scheduler: Scheduler, user: str) -> StopView:
    """Look at the run. A scheduler that does not answer leaves a doubt: the switch works without it."""
    doubt, jobs = "", tuple[Job, ...]()
    try:
        jobs = scheduler.jobs()
    except SchedulerError as error:
        doubt = cause(error)
    ours, _ = own_jobs(card.run.name, directory, jobs, user)
    queued = tuple(job for job in ours if not job.state.is_active)
    steps = known(read_steps(directory.paths), ())
    checkpoints = read_checkpoints(directory.paths.checkpoints)
    newest = None if isinstance(checkpoints, Unknown) else checkpoints.newest_sound
    return StopView(
        running=tuple(job for job in ours if job.state.is_active),
        queued=queued,
        queued_tasks=sum(max(1, len(job.pending_tasks)) for job in queued),
        foreground=known(observed(lambda: foreground_trainings(directory)), ()),
        iteration=steps[-1].record.iteration if steps else None,
        checkpoint=newest.step if newest else None,
        doubt=doubt,
    )


@dataclass(frozen=True)
class Ending:
    """How one job of the run ended while it was waited for. `marker` is None when the trainer left no word."""

    job_id: str
    marker: EndMarker | None
    is_over: bool


def wait_for_end(
    directory: RunDirectory,
    jobs: tuple[Job, ...],
    scheduler: Scheduler,
    pause: Callable[[], bool],
    progress: Callable[[str], None],
) -> tuple[Ending, ...]:
    """Wait until each of `jobs` is over, or `pause` returns False. `progress` gets a line whenever something changes.

    A scheduler that does not answer is asked again: its silence ends nothing.
    """
    said = ""
    while True:
        endings = tuple(_ending(directory, job, scheduler) for job in jobs)
        if all(ending.is_over for ending in endings):
            return endings
        text = _where(directory, [ending for ending in endings if not ending.is_over])
        if text != said:
            progress(text)
            said = text
        if not pause():
            return endings


def _ending(directory: RunDirectory, job: Job, scheduler: Scheduler) -> Ending:
    try:
        marker = EndMarker.read(directory.paths.end_marker(job.raw_id))
    except (OSError, ValueError):
        marker = None
    try:
        found = scheduler.job(job.job_id)
    except SchedulerError:
        return Ending(job.job_id, marker, is_over=False)
    # A scheduler forgets a job some minutes after its end, and never one that still holds nodes.
    return Ending(job.job_id, marker, is_over=found is None or found.state.is_final)


def _where(directory: RunDirectory, waiting: list[Ending]) -> str:
    names = ", ".join(ending.job_id for ending in waiting)
    marker = next((ending.marker for ending in waiting if ending.marker), None)
    if marker is not None:
        return f"job {names}: the trainer has ended ({marker.reason}); waiting for the scheduler"
    beats, _ = read_heartbeats(directory.paths)
    if isinstance(beats, Unknown) or not beats:
        return f"job {names}: waiting"
    slowest: Heartbeat = min(beats, key=lambda beat: (beat.iteration, beat.rank))
    return f"job {names}: {slowest.phase} at iteration {slowest.iteration}"
