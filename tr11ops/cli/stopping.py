"""What the stop commands share: finding the run, keeping word of what was done, and waiting with a fallback."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import Refusal, age, directory_of, in_time, looking, open_scheduler, read_card, say

if TYPE_CHECKING:
    from tr11ops.cluster.base import Job, Scheduler
    from tr11ops.runcard import RunCard
    from tr11ops.rundir import RunDirectory
    from tr11ops.stop import StopView
    from trainer.requests import Answer, Request

POLL_SECONDS = 1.0
ANSWER_POLL_SECONDS = 0.5
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Kept with the request, and in the journal.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]


@dataclass(frozen=True)
class Scene:
    """A run, the scheduler that it was launched on, and who looks; `typed` is the card as the person named it."""

    card: RunCard
    directory: RunDirectory
    edge: Scheduler
    user: str
    typed: str = ""

    def command(self, words: str) -> str:
        """A command of tr11 for this run, as it is typed here."""
        from tr11ops.invocation import command_for

        return command_for(self.typed, words)

    def look(self) -> StopView:
        """What of the run is running and waiting now."""
        from tr11ops.deadline import SCHEDULER_SECONDS, STOP_SECONDS
        from tr11ops.stop import look

        seconds = SCHEDULER_SECONDS + STOP_SECONDS
        hint = without_files(self.card, self.edge.name)
        return in_time(lambda: look(self.card, self.directory, self.edge), seconds, hint)


def without_files(card: RunCard, scheduler: str) -> str:
    """How a run is stopped whose files do not answer."""
    hint = "; without its files a run is stopped through the scheduler"
    if scheduler != "local":
        hint += f": `squeue --name {card.run.name}`, then `scancel --signal=USR1 --batch JOB`, which saves"
    return hint


def scene(run: str | None, overrides: list[str] | None, scheduler: str, is_releasing: bool = False) -> Scene:
    """The run that is meant. Raises CardError, or Refusal where nothing was launched or the switch is another run's.

    What was launched on one scheduler is stopped there, whatever else this machine has.
    """
    from tr11ops.journal import user_name

    card = in_time(lambda: read_card(run, overrides))
    directory = directory_of(card)
    hint = without_files(card, scheduler)
    in_time(lambda: guard(directory, is_releasing), hint=hint)
    kind = in_time(lambda: directory.recorded_scheduler() if scheduler == "auto" else None, hint=hint) or scheduler
    edge = looking(open_scheduler(kind))
    return Scene(card, directory, edge, user_name(), run or "")


def guard(directory: RunDirectory, is_releasing: bool = False) -> None:
    """Refuse to stop something else than what was meant. Raises Refusal.

    A switch that was set before the first launch is released (`is_releasing`) without a run directory.
    """
    from tr11ops.evidence import observed
    from tr11ops.snapshot import known
    from tr11ops.switch_place import SwitchPlace, look_at_switch

    if not directory.exists and not (is_releasing and directory.kill_switch_is_set()):
        raise Refusal(
            f"{directory.root} does not exist: nothing was launched from this card here; check --run and the folder"
        )
    other = known(observed(lambda: look_at_switch(directory)), SwitchPlace()).other_run
    if other:
        raise Refusal(
            f"{directory.kill_switch} belongs to another run, {other}: leave run.kill_switch out of the card",
            exit_code=2,
        )


def require_switch(place: Scene, view: StopView, is_releasing: bool = False) -> None:
    """Refuse to use a switch that is not proven to be the run's, and say how else it is stopped. Raises Refusal."""
    from tr11ops.switch_place import NEVER_MARKED, look_at_switch, other_ways, place_fault

    fault = place_fault(place.directory)
    if not fault:
        if look_at_switch(place.directory).note:
            say(f"kill switch: {NEVER_MARKED}")
        return
    if is_releasing:
        raise Refusal(f"whether the kill switch is set cannot be seen from here ({fault}): type this where it is", 3)
    for line in [*running_lines(view, "trains on"), *queued_lines(view, place.user)]:
        say(line)
    say("to stop the run without its kill switch, type:")
    for line in other_ways(place.directory, view.attempts, place.command("pause"), place.edge.name == "slurm"):
        say(f"  {line}")
    raise Refusal(f"the kill switch cannot be set from here ({fault}); nothing was changed, and no folder was made", 3)


def record(directory: RunDirectory, kind: str, why: str, data: dict[str, Any], who: str) -> None:
    """Write to the journal. The request is what counts: a journal that cannot be written is said, and stops nothing."""
    from tr11ops.fallback import write_or_fall_back
    from tr11ops.journal import Journal

    try:
        _, elsewhere = write_or_fall_back(directory, lambda place: Journal(place.journal).write(kind, why, data, who))
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")
        return
    if elsewhere:
        say(f"tr11: the journal could not be written: recorded in {elsewhere} until it can")


def running_lines(view: StopView, what: str) -> list[str]:
    """One line for each job and foreground training that runs, and `what` will happen to it."""
    lines = []
    for job in view.running:
        since = f", {age(time.time() - job.start_time)}" if job.start_time else ""
        count = job.node_count or len(job.nodes)
        place = f"{count} node" if count == 1 else f"{count} nodes"
        lines.append(f"running:    job {job.job_id} of {job.user} on {place}{since}: {what}")
    lines += [f"running:    {text}: {what}" for text in view.foreground]
    return [*lines, *map(_namesake_line, view.namesakes)]


def _namesake_line(job: Job) -> str:
    where = f" (in {job.working_directory})" if job.working_directory else ""
    return f"left alone: job {job.job_id} of {job.user}{where}: it has the run's name, but is not of this run"


def queued_lines(view: StopView, user: str) -> list[str]:
    """What waits, and who will hold it."""
    from tr11ops.detect.signs import is_held
    from tr11ops.holds import may_steer

    lines = []
    for job in view.queued:
        count = max(1, len(job.pending_tasks))
        tasks = "1 task" if count == 1 else f"{count} tasks"
        if is_held(job):
            fate = f"held already ({job.reason})"
        elif may_steer(job, user):
            fate = "held at once"
        else:
            fate = f"{job.user} owns it: the run's own controller holds it, else each task leaves untrained"
        lines.append(f"queued:     {tasks} of {job.job_id}: {fate}")
    return lines


def standing_lines(view: StopView) -> list[str]:
    """Where the training stands."""
    return [
        f"iteration:  {'none yet' if view.iteration is None else view.iteration}",
        f"checkpoint: {'none yet' if view.checkpoint is None else f'global_step{view.checkpoint}'}",
    ]


def hold_queued(place: Scene, view: StopView, why: str) -> tuple[str, ...]:
    """Hold what waits, as far as this user may; says what was done. Returns the numbers that are held now."""
    from tr11ops.holds import hold, to_hold

    mine, others = to_hold(view.queued, place.user)
    result = hold(place.directory, mine, place.edge, place.user, why, must_record=False)
    for number in result.done:
        release = f"`{place.command('resume')}` releases it"
        if result.unrecorded:
            free = f"`scontrol release {number}`" if place.edge.name == "slurm" else "only its scheduler"
            release = f"that cannot be recorded ({result.unrecorded}), so {free} releases it"
        say(f"held: job {number}; {release}")
    for number, text in result.refused:
        say(f"not held: job {number} ({text}); the run's own controller holds it, else each task leaves untrained")
    if result.done:
        record(place.directory, "held", why, {"jobs": list(result.done)}, place.user)
    for job in others:
        say(f"not held here: job {job.job_id} belongs to {job.user}; the run's own controller holds it")
    return result.done


def put_request(place: Scene, path: Path, request: Request) -> bool:
    """Put a stop request in place, as far as the disk lets it; says what it lacks. False when nothing could be put."""
    from tr11ops.deadline import STOP_SECONDS, within
    from tr11ops.stop import place_request

    try:
        short = within(STOP_SECONDS, lambda: place_request(place.directory, path, request))
    except OSError as error:
        say(f"tr11: {path} cannot be made: {error.strerror or error}")
        return False
    if short:
        say(f"tr11: {path} could only be made empty ({short}): who asks, and why, is not in it")
    return True


def await_answer(place: Scene, view: StopView, request: Request, seconds: float) -> Answer | None:
    """The trainer's answer; None when it does not come in time, and then it is said which ranks were silent."""
    from tr11ops.stop import receipts
    from trainer.requests import Answer

    if not request.id:
        raise Refusal(f"that request was made by hand, so it has no receipt; look with `{place.command('status')}`")
    until, said = time.monotonic() + seconds, ""
    while True:
        try:
            answer = Answer.read(place.directory.paths.answer(request.id))
        except (OSError, ValueError):
            answer = None  # being written by another node
        if answer is not None:
            return answer
        text = str(receipts(place.directory, request.id, view.attempts))
        if text and text != said:
            say(f"  {text}")
            said = text
        if time.monotonic() >= until:
            return None
        time.sleep(ANSWER_POLL_SECONDS)


def stop_without_files(place: Scene, view: StopView, now: bool) -> bool:
    """Stop what runs through the scheduler; says what was done, and what to type for the rest. True when all of it is.

    Its next tasks are held by `hold_queued`: no file keeps them from training.
    """
    from tr11ops.stop import STOP_SIGNAL, stop_by_scheduler

    done = stop_by_scheduler(view, place.edge, place.user, now)
    for number in done.asked:
        say(f"cancelled: job {number}" if now else f"job {number} was sent {STOP_SIGNAL}: it saves and leaves")
    for number, why in done.refused:
        words = f"scancel {number}" if now else f"scancel --signal={STOP_SIGNAL} --batch {number}"
        say(f"tr11: job {number} was not stopped ({why}): its owner types `{words}`")
    for text in view.foreground:
        say(f"tr11: {text}: stop it where it runs, with `kill -{'TERM' if now else STOP_SIGNAL} PROCESS`")
    return not (done.refused or view.foreground or view.doubt)


@dataclass
class Patience:
    """Waits between two looks; calls `late` once when `late_after` seconds have passed, ends at `timeout`."""

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


def fall_back(place: Scene, jobs: tuple[Job, ...], request: int, minutes: float) -> None:
    """Cancel what did not stop, where this user may; else say whom to call. Names the ranks that never answered."""
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.holds import may_steer
    from tr11ops.stop import receipts

    late = f"has not stopped within {minutes:g} min"
    for job in jobs:
        try:
            now = place.edge.job(job.job_id)
        except SchedulerError as error:
            say(f"tr11: job {job.job_id} {late}, and the scheduler does not answer ({error}): ask the site's support")
            continue
        if now is None or now.state.is_final:
            continue
        answered = str(receipts(place.directory, request, [job.raw_id]))
        if answered:
            say(f"tr11: job {job.job_id}: {answered}")
        if not may_steer(job, place.user):
            command = "scancel" if place.edge.name == "slurm" else "a cancellation of job"
            say(f"tr11: job {job.job_id} {late}: call {job.user}, who owns it, for `{command} {job.job_id}`")
            continue
        say(f"tr11: job {job.job_id} {late}: cancelling it")
        record(place.directory, "stop-fallback", late, {"job": job.job_id, "answered": answered}, place.user)
        try:
            place.edge.cancel(job.job_id)
        except SchedulerError as error:
            say(f"tr11: job {job.job_id} could not be cancelled ({error}): ask the site's support")
