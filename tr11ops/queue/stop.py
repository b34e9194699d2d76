"""Stopping a run through files in its directory: what that would stop, who has answered, and
waiting until it has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.base.units import counted, duration, first_few
from tr11ops.cluster.base import Job, JobState, Overview, Scheduler
from tr11ops.observe.derived import finish_time, newest_marker, pace_of
from tr11ops.observe.files import (
    ANY_MODEL,
    read_attempts,
    read_checkpoints,
    read_heartbeats,
    read_steps,
)
from tr11ops.observe.jobs import OwnJobs, read_own_jobs
from tr11ops.observe.lease import foreground_trainings
from tr11ops.observe.liveness import ENDED_PHASE
from tr11ops.observe.training_files import read_events
from tr11ops.queue.held_jobs import JobChanges, can_modify
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.attempts import SUPERSEDED, AttemptVerdict
from tr11ops.rundir.fallback import with_reserve
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EndMarker, Heartbeat
from trainer.contract.files import make_shared, open_shared
from trainer.contract.lease import LIVING_SECONDS, LeaseClaim, clocks_of, living_claim
from trainer.contract.record import Record
from trainer.contract.requests import Request

STOP_SIGNAL = "USR1"
MISSING_NAMED = 3  # ranks that are named; the rest is counted
QUIET_SECONDS = 20.0  # without a change, after which a wait says whom it waits for


class StopView(Record):
    """What a kill switch would stop. `iteration` is the last one that was logged, `checkpoint` the
    newest whole one.
    """

    running: tuple[Job, ...]
    queued_tasks: int
    queued: tuple[Job, ...]
    foreground: tuple[str, ...]
    iteration: int | None
    checkpoint: int | None
    read_error: str  # why the jobs are not known; empty when they are
    seconds_per_iteration: float | None = None
    holder: LeaseClaim | None = None  # whose lease it is, as long as it was not let go
    namesakes: tuple[Job, ...] = ()  # living jobs of the run's name that are not of this run
    unread: str = ""  # why this user may not read the run's records; empty when he may
    finished: float | None = None  # when the training was finished; None while it is not
    # which jobs may be of the run, or may run, and why that is not known; empty for none
    unclear: str = ""
    # why the run directory is not the one that the jobs were queued from; empty where it is
    unmounted: str = ""

    @property
    def is_idle(self) -> bool:
        return not (
            self.running
            or self.queued
            or self.foreground
            or self.read_error
            or self.unread
            or self.unclear
        )

    @property
    def attempts(self) -> tuple[str, ...]:
        """Numbers of the attempts that train now, as far as anyone says so: the lease's holder
        first.
        """
        if self.holder is not None:
            names = [self.holder.job_id]
        else:
            names = []
        return tuple(dict.fromkeys([*names, *(job.raw_id for job in self.running)]))

    @property
    def lost_iterations(self) -> int | None:
        """What an end without saving would lose; None when it cannot be told."""
        if self.iteration is None:
            return None
        return self.iteration - (self.checkpoint or 0)


def look(card: RunCard | None, directory: RunDirectory, scheduler: Overview) -> StopView:
    """Look at the run. A scheduler that does not answer leaves a doubt: the switch works without
    it.

    Without a card any sound checkpoint counts.
    """
    read_error = ""
    found = OwnJobs()
    try:
        found = read_own_jobs(directory, scheduler)
    except SchedulerError as error:
        read_error = cause(error)
    queued = tuple(job for job in found.jobs if job.state is JobState.PENDING)
    stateless = [job.job_id for job in found.jobs if job.state is JobState.UNKNOWN]
    if found.why_unclear:
        unclear = [found.why_unclear]
    else:
        unclear = []
    if stateless:
        unclear.append(f"the state of job {', '.join(stateless)} is not known")
    steps = known(read_steps(directory.paths), ())
    if card is None:
        need = ANY_MODEL
    else:
        need = card.resume_need
    checkpoints = read_checkpoints(directory.paths.checkpoints, need=need)
    newest = None if isinstance(checkpoints, Unknown) else checkpoints.newest_sound
    iteration = steps[-1].record.iteration if steps else None
    return StopView(
        running=tuple(job for job in found.jobs if job.state.is_active),
        queued=queued,
        queued_tasks=sum(max(1, len(job.pending_tasks)) for job in queued),
        foreground=known(observed(foreground_trainings, directory), ()),
        iteration=iteration,
        checkpoint=newest.step if newest else None,
        read_error=read_error,
        seconds_per_iteration=pace_of(steps[-1:]) or pace_of(steps),
        holder=lease_holder(directory),
        namesakes=found.namesakes,
        unread=unread(directory),
        finished=finish_time(
            newest_marker(known(read_attempts(directory.paths), ())),
            iteration,
            known(read_events(directory.paths), ()),
        ),
        unclear="; ".join(unclear),
        unmounted=found.unmounted,
    )


def unread(directory: RunDirectory) -> str:
    """Why this user may not read what a stop looks at in the run directory; "" when he may."""
    paths = directory.paths
    for folder in (
        directory.root,
        paths.state,
        paths.attempts,
        paths.requests,
        directory.submissions,
    ):
        try:
            os.scandir(folder).close()
        except PermissionError as error:
            return cause(error)
        except OSError:
            continue  # not there yet, or silent: that is no matter of rights
    return ""


def lease_holder(directory: RunDirectory) -> LeaseClaim | None:
    """Who holds the run's lease and has renewed it a moment ago; None when no one does, or when it
    cannot be read: it only adds to what is known.

    A trainer that was killed lets its claim stand as it was.
    """
    paths = directory.paths
    claim = known(observed(living_claim, paths, *clocks_of(paths, time.time())), None)
    if claim is not None and claim.token:
        return claim
    return None


def leaving(directory: RunDirectory, running: Iterable[Job]) -> tuple[str, ...]:
    """Numbers of the jobs whose trainer has ended and was not started again: to hold what is queued
    is among the last things that such an attempt does.
    """
    beats = known(read_heartbeats(directory.paths)[0], ())
    found = []
    for job in running:
        path = directory.paths.end_marker(job.raw_id)
        marker = known(observed(EndMarker.read, path), None)
        lives = [
            beat.time for beat in beats if beat.job_id == job.raw_id and beat.phase != ENDED_PHASE
        ]
        if isinstance(marker, EndMarker) and marker.time >= max(lives, default=0.0):
            found.append(job.job_id)
    return tuple(found)


# ----------------------------------------------------------------------------- asking, whatever the
# disk is like
def place_request(directory: RunDirectory, path: Path, request: Request) -> str:
    """Put a request in place: whole, if need be in the reserve's room; else an empty file, which
    asks by being there.

    Returns why it is empty, "" when it is whole. Raises OSError when not even an empty file can be
    made.
    """
    # whose folder is never made: its file system may not be mounted here
    if path != directory.kill_switch:
        make_shared(path.parent)
    try:
        with_reserve(directory, lambda: request.write(path), path)
    except OSError as error:
        os.close(open_shared(path, os.O_WRONLY))
        return cause(error)
    return ""


def stop_by_scheduler(view: StopView, scheduler: Scheduler, user: str, now: bool) -> JobChanges:
    """Stop what runs without a file: USR1 makes it save and leave; `now` cancels it, unsaved."""
    asked = []
    refused = []
    for job in view.running:
        if not can_modify(job, user):
            refused.append((job.job_id, f"{job.user} owns it"))
            continue
        try:
            scheduler.cancel(job.job_id) if now else scheduler.signal(job.job_id, STOP_SIGNAL)
        except SchedulerError as error:
            refused.append((job.job_id, cause(error)))
        else:
            asked.append(job.job_id)
    return JobChanges(tuple(asked), tuple(refused))


# ----------------------------------------------------------------------------- who has answered
class Acknowledgements(Record):
    """Which ranks of an attempt have honoured a request, and which have not yet: (rank, host)."""

    given: tuple[tuple[int, str], ...] = ()
    missing: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        """In words; empty where there is no one to answer. No rank is named while none has
        answered.
        """
        total = len(self.given) + len(self.missing)
        if not total:
            return ""
        if not self.given:
            return f"none of {counted(total, 'rank')} has answered yet"
        text = f"{len(self.given)} of {counted(total, 'rank')} {'has' if total == 1 else 'have'} answered"
        if self.missing:
            names = (f"rank {rank} on {host}" for rank, host in self.missing)
            return f"{text}; missing: {first_few(names, MISSING_NAMED)}"
        return text


def acknowledgements(
    directory: RunDirectory, request: int, attempts: Iterable[str]
) -> Acknowledgements:
    """What the heartbeats of some attempts say of a request. One made by hand (0) has no receipts."""
    beats, _ = read_heartbeats(directory.paths)
    if not request or isinstance(beats, Unknown):
        return Acknowledgements()
    wanted = set(attempts)
    ours = [beat for beat in beats if beat.job_id in wanted]
    return Acknowledgements(
        tuple(_ranks_of(beat for beat in ours if beat.request == request)),
        tuple(_ranks_of(beat for beat in ours if beat.request != request)),
    )


def _ranks_of(beats: Iterable[Heartbeat]) -> Iterator[tuple[int, str]]:
    for beat in beats:
        yield from ((rank, beat.host) for rank in beat.stands_for)


class JobEnding(Record):
    """How one job of the run ended while it was waited for. `marker` is None when the trainer left
    no exit record, `state` when the scheduler has forgotten the job.

    `gave_way`: it has trained nothing, as another job of the run did.
    """

    job_id: str
    marker: EndMarker | None
    state: JobState | None
    gave_way: bool = False

    @property
    def is_over(self) -> bool:
        # A scheduler forgets a job some minutes after its end, and never one that still holds nodes.
        return self.state is None or not self.state.may_run


def wait_for_end(
    directory: RunDirectory,
    jobs: tuple[Job, ...],
    scheduler: Scheduler,
    pause: Callable[[], bool],
    progress: Callable[[str], None],
    request: int,
    unsaved_end: str,
) -> tuple[JobEnding, ...]:
    """Wait until each of `jobs` is over, or `pause` returns False. `progress` gets a line whenever
    something changes.

    `request`: number of the request whose receipts are shown; 0 for none. `unsaved_end`: what to
    type where the workers cannot save; where nothing changes for `QUIET_SECONDS`, that and whom it
    waits for is said, once for each change.

    A scheduler that does not answer is asked again: its silence ends nothing.
    """
    said = ""
    changed = time.monotonic()
    is_explained = False
    while True:
        endings = tuple(_ending(directory, job, scheduler) for job in jobs)
        if all(ending.is_over for ending in endings):
            return endings
        text = _where(directory, [ending for ending in endings if not ending.is_over])
        answered = str(acknowledgements(directory, request, [job.raw_id for job in jobs]))
        if answered:
            text = f"{text}; {answered}"
        if text != said:
            progress(text)
            said = text
            changed = time.monotonic()
            is_explained = False
        elif not is_explained and time.monotonic() - changed >= QUIET_SECONDS:
            left = [(job, end) for job, end in zip(jobs, endings, strict=True) if not end.is_over]
            training = [job.raw_id for job, ending in left if ending.marker is None]
            for line in _waits_for(directory, training, request, unsaved_end):
                progress(line)
            for job, ending in left:
                if ending.marker is not None:
                    progress(
                        f"it waits for the scheduler, to which job {job.job_id} is {ending.state}"
                    )
            is_explained = True
        if not pause():
            return endings


def wait_for_lease(
    directory: RunDirectory,
    attempts: Iterable[str],
    pause: Callable[[], bool],
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.time,
) -> LeaseClaim | None:
    """Wait until the lease of these attempts, whose jobs are over, counts as no living trainer's any more:
    one that was killed has not let go of it, and until then no `latest` is moved and no other trainer begins.

    Returns the claim that still counts where `pause` returns False before, or where it is renewed still, as
    by a process that has outlived its job; None where none does. A lease that cannot be read is not waited for.
    """
    paths = directory.paths
    wanted = set(attempts)
    began = clock()
    is_said = False
    while True:
        claim = known(observed(living_claim, paths, *clocks_of(paths, clock())), None)
        if claim is None or (claim.token and claim.job_id not in wanted):
            return None
        if not is_said:
            is_said = True
            progress(
                f"the trainer of {claim.told(paths)} did not let go of the run's lease: for {LIVING_SECONDS:.0f} s "
                "it counts as alive"
            )
        if clock() - began >= 2 * LIVING_SECONDS or not pause():
            return claim


def _waits_for(
    directory: RunDirectory, attempts: Iterable[str], request: int, unsaved_end: str
) -> Iterator[str]:
    """Which ranks a stop waits for, those that are silent for longest first, and what ends them all
    the same.
    """
    wanted = set(attempts)
    beats = [
        beat for beat in known(read_heartbeats(directory.paths)[0], ()) if beat.job_id in wanted
    ]
    missing = [beat for beat in beats if beat.request != request] or beats
    if not wanted:
        return  # the trainers have ended: nothing is left to save
    for beat in sorted(missing, key=lambda beat: (beat.time, beat.rank))[:MISSING_NAMED]:
        age = duration(time.time() - beat.time)
        yield f"it waits for rank {beat.rank} on {beat.host}: {beat.phase} at iteration {beat.iteration}, {age} ago"
    if not missing:
        yield "it waits for workers that have shown no sign of life"
    if unsaved_end:
        yield f"a rank that hangs cannot save; {unsaved_end}"


def _ending(directory: RunDirectory, job: Job, scheduler: Scheduler) -> JobEnding:
    attempt = directory.paths.attempt(job.raw_id)
    marker = known(observed(EndMarker.read, directory.paths.end_marker(job.raw_id)), None)
    verdict = known(observed(AttemptVerdict.read, attempt), None)
    try:
        found = scheduler.job(job.job_id)
    except SchedulerError:
        return JobEnding(job.job_id, marker, JobState.UNKNOWN)
    state = None
    if found is not None:
        state = found.state
    gave_way = verdict is not None and verdict.reason == SUPERSEDED and not verdict.launches
    return JobEnding(job.job_id, marker, state, gave_way)


def _where(directory: RunDirectory, waiting: list[JobEnding]) -> str:
    names = ", ".join(ending.job_id for ending in waiting)
    marker = next((ending.marker for ending in waiting if ending.marker), None)
    if marker is not None:
        return f"job {names}: the trainer has ended ({marker.reason}); waiting for the scheduler"
    beats, _ = read_heartbeats(directory.paths)
    if isinstance(beats, Unknown) or not beats:
        return f"job {names}: waiting"
    slowest: Heartbeat = min(beats, key=lambda beat: (beat.iteration, beat.rank))
    return f"job {names}: {slowest.phase} at iteration {slowest.iteration}"
