"""What the stop commands share: finding the run, keeping word of what was done, and waiting with a
fallback.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tr11ops.base import deadline
from tr11ops.base.errors import SchedulerError, Unobserved, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.observed import cause, known, observed
from tr11ops.base.units import counted
from tr11ops.cli.common import directory_of, in_time, not_mounted, nothing_there, say
from tr11ops.cluster.arrays import covers
from tr11ops.cluster.base import Job, Overview, Scheduler
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.observe.files import read_submissions
from tr11ops.observe.jobs import look_for_directory
from tr11ops.observe.readers import looking, open_scheduler
from tr11ops.queue.held_jobs import can_modify, hold, hold_unrecorded, to_hold
from tr11ops.queue.queued_jobs import mark_held
from tr11ops.queue.stop import (
    STOP_SIGNAL,
    StopView,
    acknowledgements,
    look,
    place_request,
    stop_by_scheduler,
)
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.kinds import refuse_watched
from tr11ops.rundir.fallback import write_or_fall_back
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.kill_switch import (
    NEVER_MARKED,
    SwitchLocation,
    is_inside,
    look_at_switch,
    other_ways,
    place_fault,
)
from tr11ops.rundir.paths import FIRST_LAUNCH, RunDirectory
from trainer.contract.record import JsonObject, Record
from trainer.contract.requests import Request

if TYPE_CHECKING:
    from tr11ops.cli.runner import RunContext

T = TypeVar("T")
POLL_SECONDS = 1.0


class StopContext(Record):
    """A run, the scheduler that it was launched on, and who looks; `typed` is the card as the
    person named it. `user`: whose jobs can be held and cancelled from here; `acting_for`: the person
    for whom that is done, "" for the same.
    """

    card: RunCard
    directory: RunDirectory
    edge: Scheduler
    user: str
    typed: str = ""
    acting_for: str = ""

    @property
    def who(self) -> str:
        """Whom the journal names."""
        return self.acting_for or self.user

    def command(self, words: str) -> str:
        """A command of tr11 for this run, as it is typed here."""
        return command_for(self.typed, words)

    def launch(self) -> str:
        """The launch that queues as many tasks as the last one, as it is typed here."""
        found = known(read_submissions(self.directory)[0], ())
        return self.command(found[0].launch_words if found else FIRST_LAUNCH)

    def look(self, needs_directory: bool = True) -> StopView:
        """What of the run is running and waiting now. Raises Refusal where its directory is needed
        and not mounted.
        """
        view = self.read(
            lambda: look(self.card, self.directory, self.edge),
            deadline.SCHEDULER_SECONDS + deadline.STOP_SECONDS,
        )
        if view.unmounted and needs_directory:
            raise not_mounted(self.directory, view.unmounted)
        return view

    def read(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """What a step of a stop reads of the run's files. Raises Refusal, with the way through the
        scheduler.
        """
        return in_time(
            work,
            deadline.STOP_SECONDS if seconds is None else seconds,
            without_files(self.card, self.edge.name),
        )


def without_files(card: RunCard, scheduler: str) -> str:
    """How a run is stopped whose files do not answer."""
    hint = "; without its files a run is stopped through the scheduler"
    if scheduler != "local":
        hint += f": `squeue --name {card.run.name}`, then `scancel --signal=USR1 --batch JOB`, which saves"
    return hint


def run_to_stop(context: RunContext, is_releasing: bool = False) -> StopContext:
    """The run that is meant. Raises CardError, or Refusal where nothing was launched or the switch
    is another run's.

    What was launched on one scheduler is stopped there, whatever else this machine has.
    """
    card = in_time(lambda: context.card)
    refuse_watched(card)
    directory = directory_of(card)
    scheduler = context.scheduler
    hint = without_files(card, scheduler)
    kind = (
        in_time(lambda: directory.recorded_scheduler() if scheduler == "auto" else None, hint=hint)
        or scheduler
    )
    edge = looking(open_scheduler(kind))
    in_time(lambda: guard(directory, edge, is_releasing), hint=hint)
    return stop_context(context, directory, edge)


def stop_context(context: RunContext, directory: RunDirectory, edge: Scheduler) -> StopContext:
    """The run of a command line, which is stopped by its user, for the person who asks."""
    return StopContext(
        context.card,
        directory,
        edge=edge,
        user=user_name(),
        typed=context.run or "",
        acting_for=context.who,
    )


def guard(directory: RunDirectory, scheduler: Overview, is_releasing: bool = False) -> None:
    """Refuse to stop something else than what was meant. Raises Refusal.

    A switch that was set before the first launch is released (`is_releasing`) without a run
    directory. And one that is not there is a run's all the same where the scheduler shows what was
    queued from it.
    """
    is_set_before = is_releasing and directory.kill_switch_is_set()
    if (
        not directory.exists
        and not is_set_before
        and not look_for_directory(directory, scheduler, time.time())
    ):
        raise nothing_there(directory)
    other = known(observed(look_at_switch, directory), SwitchLocation()).other_run
    if other:
        raise WrongUsage(
            f"{directory.kill_switch} belongs to another run, {other}: leave run.kill_switch out of the card",
        )


def require_switch(run: StopContext, view: StopView, is_releasing: bool = False) -> bool:
    """Refuse to use a switch that is not proven to be the run's, and say how else it is stopped.
    Raises Refusal.

    False where it would lie in a run directory that is not mounted here: the scheduler is asked in
    its place.
    """
    if view.unmounted and is_inside(run.directory):
        return False
    fault = run.read(lambda: place_fault(run.directory))
    if not fault:
        if run.read(lambda: look_at_switch(run.directory)).note:
            say(f"kill switch: {NEVER_MARKED}")
        return True
    if view.unmounted:
        return False
    if is_releasing:
        raise Unobserved(
            f"whether the kill switch is set cannot be seen from here ({fault}): type this where it is",
        )
    for line in [*running_lines(view, "trains on"), *queued_lines(view, run.user)]:
        say(line)
    say("to stop the run without its kill switch, type:")
    for line in other_ways(
        run.directory, view.attempts, run.command("pause"), run.edge.name == "slurm"
    ):
        say(f"  {line}")
    raise Unobserved(
        f"the kill switch cannot be set from here ({fault}); nothing was changed, and no folder was made",
    )


def record(
    directory: RunDirectory,
    kind: str,
    why: str,
    data: JsonObject,
    who: str,
    unmounted: str = "",
) -> None:
    """Write to the journal. The request is what counts: a journal that cannot be written is said,
    and stops nothing.

    `unmounted`: why the directory is not the run's own; the entry then waits on this machine.
    """

    def write() -> str:
        return write_or_fall_back(
            directory, lambda folder: Journal(folder.journal).write(kind, why, data, who), unmounted
        )[1]

    try:
        elsewhere = deadline.within(deadline.STOP_SECONDS, write)
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")
        return
    if elsewhere:
        say(f"tr11: the journal could not be written: recorded in {elsewhere} until it can")


def running_lines(view: StopView, what: str) -> list[str]:
    """One line for each job and foreground training that runs, and `what` will happen to it."""
    lines = []
    for job in view.running:
        nodes = counted(job.node_count or len(job.nodes), "node")
        lines.append(f"running:    job {job.job_id} of {job.user} on {nodes}: {what}")
    lines += [f"running:    {text}: {what}" for text in view.foreground]
    lines += [f"not known:  {view.unclear}"] if view.unclear else []
    return [*lines, *map(_namesake_line, view.namesakes)]


def _namesake_line(job: Job) -> str:
    where = ""
    if job.working_directory:
        where = f" (in {job.working_directory})"
    return f"left alone: job {job.job_id} of {job.user}{where}: it has the run's name, but is not of this run"


def queued_lines(view: StopView, user: str) -> list[str]:
    """The queued jobs, and who will hold them."""
    lines = []
    for job in view.queued:
        count = max(1, len(job.pending_tasks))
        tasks = counted(count, "task")
        if is_held(job):
            fate = f"held already ({job.reason})"
        elif can_modify(job, user):
            fate = "held at once"
        elif view.unmounted:
            fate = f"{job.user} owns it, and must hold it: no file keeps it from training"
        else:
            fate = f"{job.user} owns it: the run's own controller holds it, else each task leaves untrained"
        lines.append(f"queued:     {tasks} of {job.job_id}: {fate}")
    if not view.queued and view.running and not view.read_error:
        lines.append("queued:     nothing: what is to follow has to be launched")
    return lines


def standing_lines(run: StopContext, view: StopView, saves: str = "") -> list[str]:
    """Where the training stands; not where its records may not be read, or are not the run's. `saves`: whether
    it saves before it leaves, and where: said where the checkpoint that is on disk now is not the last one.
    """
    if view.unmounted:
        return [
            f"directory:  {view.unmounted}",
            "not known:  iteration, checkpoint, what trains in the foreground, and who has stopped it already",
        ]
    if view.unread:
        return [f"records:    not known, you may not read them ({view.unread})"]
    finished = "" if view.finished is None else ": the training is finished"
    checkpoint = "none yet"
    if view.checkpoint is not None:
        checkpoint = run.card.checkpoint_label(view.checkpoint)
    if saves:
        checkpoint = f"{saves}; on disk now: {checkpoint}"
    lines = []
    if "iteration" not in saves:  # else it is said there
        lines.append(
            f"iteration:  {'none yet' if view.iteration is None else view.iteration}{finished}"
        )
    return [*lines, f"checkpoint: {checkpoint}"]


def way_on(run: StopContext, view: StopView) -> str:
    """What to type when the stop is no longer wanted."""
    if view.finished is not None and not view.running:
        return (
            f"nothing is left to train; `{run.command('launch --repair')}` cancels what is queued"
        )
    if view.unmounted:
        return f"to let it go on: mount {run.directory.root}, then type `{run.command('resume')}`"
    more = ""
    if not (view.queued or view.unread or view.read_error):
        more = f", then `{run.launch()}`, for nothing is queued"
    return f"to let it go on: `{run.command('resume')}`{more}"


def hold_queued(run: StopContext, view: StopView, why: str, has_file: bool) -> tuple[str, ...]:
    """Hold the queued jobs, as far as this user may; says what was done. Returns the numbers that
    are held now.

    `has_file`: a switch or a pause is set, which keeps what could not be held from training.
    """
    mine, others = to_hold(view.queued, run.user)
    if view.unmounted:
        result = hold_unrecorded(mine, run.edge, view.unmounted)
    else:
        result = hold(
            run.directory, mine, scheduler=run.edge, who=run.who, why=why, must_record=False
        )
    unmarked = ""
    if result.unrecorded:
        unmarked = _mark_held(run, view, result.done, why)
    for number in result.done:
        release = ""  # by what lets all go on, which is said at the end
        if unmarked:
            free = "only its scheduler"
            if run.edge.name == "slurm":
                free = f"`scontrol release {number}`"
            release = f"; that cannot be recorded ({result.unrecorded}; {unmarked}), so {free} releases it"
        elif result.unrecorded:
            release = (
                f"; that cannot be recorded ({result.unrecorded}), but its comment says so, and "
                f"`{run.command('resume')}` releases it"
            )
        say(f"held: job {number}{release}")
    other_hold = "the run's own controller holds it, else each task leaves untrained"
    if not has_file:
        other_hold = "no file keeps it from training: it must be held where it is queued"
    for number, text in result.refused:
        say(f"not held: job {number} ({text}); {other_hold}")
    if result.done:
        record(
            run.directory,
            "held",
            why=why,
            data={"jobs": list(result.done)},
            who=run.who,
            unmounted=view.unmounted,
        )
    for job in others:
        say(f"not held here: job {job.job_id} belongs to {job.user}; {other_hold}")
    return result.done


def is_all_held(run: StopContext, view: StopView, held: tuple[str, ...]) -> bool:
    """Whether all is held that was queued and not held before: `held` is what this user has held of
    it now.
    """
    mine, others = to_hold(view.queued, run.user)
    return not others and set(mine) <= set(held)


def _mark_held(run: StopContext, view: StopView, names: tuple[str, ...], why: str) -> str:
    """Have held jobs say themselves that tr11 holds them. Returns why that could not be done, or
    "".
    """
    try:
        for job in view.queued:
            if any(covers(name, job) for name in names):
                mark_held(run.edge, job, why, is_for_fault=False)
    except SchedulerError as error:
        return cause(error)
    return ""


def put_request(run: StopContext, path: Path, request: Request) -> bool:
    """Put a stop request in place, as far as the disk lets it; says what it lacks. False when
    nothing could be put.
    """
    try:
        short = deadline.within(
            deadline.STOP_SECONDS, lambda: place_request(run.directory, path, request)
        )
    except OSError as error:
        say(f"tr11: {path} cannot be made: {error.strerror or error}")
        return False
    if short:
        say(f"tr11: {path} could only be made empty ({short}): who asks, and why, is not in it")
    return True


def stop_without_files(run: StopContext, view: StopView, now: bool) -> bool:
    """Stop what runs through the scheduler; says what was done, and what to type for the rest. True
    when all of it is.

    Its next tasks are held by `hold_queued`: no file keeps them from training.
    """
    done = stop_by_scheduler(view, run.edge, run.user, now)
    for number in done.done:
        say(
            f"cancelled: job {number}"
            if now
            else f"job {number} was sent {STOP_SIGNAL}: it saves and leaves"
        )
    for number, why in done.refused:
        if now:
            words = f"scancel {number}"
        else:
            words = f"scancel --signal={STOP_SIGNAL} --batch {number}"
        say(f"tr11: job {number} was not stopped ({why}): its owner types `{words}`")
    for text in view.foreground:
        say(
            f"tr11: {text}: stop it where it runs, with `kill -{'TERM' if now else STOP_SIGNAL} PROCESS`"
        )
    return not (done.refused or view.foreground or view.read_error or view.unread or view.unclear)


@dataclass
class StopWait:
    """Waits between two looks; calls `late` once when `late_after` seconds have passed, ends at
    `timeout`.
    """

    timeout: float
    late_after: float
    late: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._was_late = False

    def __call__(self) -> bool:
        if self.clock() - self._began >= self.timeout:
            return False
        self.sleep(POLL_SECONDS)
        if not self._was_late and self.clock() - self._began >= self.late_after:
            self._was_late = True
            self.late()
        return self.clock() - self._began < self.timeout


def all_may_be_cancelled(run: StopContext, view: StopView) -> bool:
    """Whether this user may cancel what runs."""
    return all(can_modify(job, run.user) for job in view.running)


def fall_back(run: StopContext, view: StopView, request: int, minutes: float) -> None:
    """Cancel what did not stop, where this user may; else say whom to call. Names the ranks that
    never answered.
    """
    late = f"has not stopped within {minutes:g} min"
    for job in view.running:
        try:
            now = run.edge.job(job.job_id)
        except SchedulerError as error:
            say(
                f"tr11: job {job.job_id} {late}, and the scheduler does not answer ({error}): ask the site's support"
            )
            continue
        if now is None or not now.state.may_run:
            continue
        answered = str(acknowledgements(run.directory, request, [job.raw_id]))
        if answered:
            say(f"tr11: job {job.job_id}: {answered}")
        if not can_modify(job, run.user):
            command = "a cancellation of job"
            if run.edge.name == "slurm":
                command = "scancel"
            say(
                f"tr11: job {job.job_id} {late}: call {job.user}, who owns it, for `{command} {job.job_id}`"
            )
            continue
        say(f"tr11: job {job.job_id} {late}: cancelling it")
        data = {"job": job.job_id, "answered": answered}
        record(
            run.directory,
            "stop-fallback",
            why=late,
            data=data,
            who=run.who,
            unmounted=view.unmounted,
        )
        try:
            run.edge.cancel(job.job_id)
        except SchedulerError as error:
            say(f"tr11: job {job.job_id} could not be cancelled ({error}): ask the site's support")
