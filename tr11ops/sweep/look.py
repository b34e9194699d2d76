"""Where each cell of a study stands (by queue, signs of life, end markers and checkpoints, read
again at each look), what its card is now, and stopping it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import median

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.redact import one_line
from tr11ops.base.robust import RECENT_STEPS
from tr11ops.cluster.base import Job, Node, Overview, Scheduler
from tr11ops.launch.rehearse import as_options
from tr11ops.observe.derived import identifiers
from tr11ops.observe.files import read_attempts, read_steps, read_submissions
from tr11ops.observe.jobs import Ownership
from tr11ops.observe.lease import LeaseHolder, read_holder
from tr11ops.observe.liveness import SILENCE_SECONDS
from tr11ops.observe.snapshot import Attempt
from tr11ops.queue.held_jobs import JobChanges, can_modify
from tr11ops.queue.stop import StopView, look as look_at_run, stop_by_scheduler
from tr11ops.runcard.card import OwnCard, differences
from tr11ops.rundir.paths import RunDirectory
from tr11ops.sweep.manifest import CARD, ManifestCell
from trainer.config.card import CardError
from trainer.contract.attempt import BAD_REASONS
from trainer.contract.files import host_name, now
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import Record

# The cards of a study's cells as they are now: each is read for itself, and compared with the
# plan.

KILL_SWITCH = "kill-switch"  # no cell has one elsewhere (see `plan.REMOVED`)
Load = Callable[[Path, Sequence[str]], OwnCard]


class CellCard(Record):
    """One cell's card, None where it cannot be used; then `directory` is the one that the plan gave
    the cell.

    `fault`: why the cell is not to be taken up with it, in one line; "" for none.
    """

    card: OwnCard | None
    directory: RunDirectory
    fault: str = ""


def read_cell_card(folder: Path, study: str, cell: ManifestCell, load: Load) -> CellCard:
    """Read the card of one cell of the study in `folder`. `load` reads a card with overrides, and
    raises CardError.
    """
    root = folder / cell.name
    path = root / CARD
    try:
        card = load(path, ())
    except (CardError, OSError) as error:
        planned = RunDirectory(RunPaths(root, study, cell.name), root / KILL_SWITCH)
        gone = (
            f"{path}: there is no card; if planning was cut short, remove {folder} and plan again"
        )
        return CellCard(
            None, planned, " ".join(str(error).split()) if os.path.lexists(path) else gone
        )
    return CellCard(
        card,
        RunDirectory(card.paths, card.kill_switch),
        _changed(path, study, cell=cell, card=card, load=load),
    )


def _changed(path: Path, study: str, cell: ManifestCell, card: OwnCard, load: Load) -> str:
    """What of the plan the card does not say any more: it would train something else, or elsewhere."""
    if card.paths.root.resolve() != path.parent.resolve():
        return (
            f"{path}: its run directory is {card.paths.root}, not the folder that it is in: the study was moved, or"
            " the card changed; put it back"
        )
    own = as_options({"run.name": study, "run.variant": cell.name, **cell.derived})
    try:
        planned = load(path, (*own, *(f"{key}={value}" for key, value in cell.settings.items())))
    except CardError as error:
        return f"{' '.join(str(error).split())} (as it was planned)"
    found = [
        f"{key} = {now} where {was} was planned"
        for key, now, was in differences(
            card.model_dump(mode="json"), planned.model_dump(mode="json")
        )
    ]
    if found:
        return f"{path}: {'; '.join(found)}: put it back, or make it a study of its own"
    return ""


class CellState(StrEnum):
    """What a cell is, as the person who studies it needs it."""

    DONE = "done"
    RUNNING = "running"
    QUEUED = "queued"
    STOPPED = "stopped"  # saved and left in order
    FAILED = "failed"
    NEW = "not begun"
    UNKNOWN = "unknown"


# what `tr11 sweep resume` takes up
OPEN = frozenset({CellState.STOPPED, CellState.FAILED, CellState.NEW})

# what needs no sign of life
LISTED = frozenset({CellState.DONE, CellState.RUNNING, CellState.QUEUED})


class CellProgress(Record):
    """One cell at one moment. `why` says what the state rests on. None: not known, or nothing was
    logged.

    `card` is None where it cannot be used, and `fault` says why, or what it says otherwise than was
    planned.
    """

    number: int
    name: str
    card: OwnCard | None
    directory: RunDirectory
    state: CellState
    why: str
    view: StopView
    iteration: int | None = None
    samples: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    stranger: LeaseHolder | None = None  # a living trainer of no job that the scheduler lists
    fault: str = ""

    @property
    def total_iterations(self) -> int | None:
        """How many steps it is to take; None where its card does not tell."""
        if self.card is None:
            return None
        return self.card.total_iterations

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Its jobs that are not over."""
        return (*self.view.running, *self.view.queued)


class NoScheduler:
    """An Overview where there is none to ask."""

    name = ""

    def __init__(self, why: str) -> None:
        self._why = why

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        raise SchedulerUnreachable(self._why)

    def job(self, job_id: str) -> Job | None:
        raise SchedulerUnreachable(self._why)

    def nodes(self) -> tuple[Node, ...]:
        raise SchedulerUnreachable(self._why)


def look_at_cell(number: int, name: str, found: CellCard, queue: Overview) -> CellProgress:
    """Look at one cell; changes nothing. What cannot be read is unknown."""
    card, directory = found.card, found.directory
    view = look_at_run(card, directory, queue)
    attempts = read_attempts(directory.paths)
    steps = [step.record for step in known(read_steps(directory.paths), ())]
    last = None
    if steps:
        last = steps[-1]
    stranger = _stranger(view, directory, queue)
    state, why = _state(view, attempts)
    if state not in LISTED and stranger is not None:
        state, why = (
            CellState.RUNNING,
            f"job {read_attempt_label(directory.paths, stranger.job_id)} on {stranger.host}, {_not_known(queue)}",
        )
    elif state is CellState.FAILED and (begun := _begun(known(attempts, ()), directory, queue)):
        state, why = CellState.UNKNOWN, begun
    return CellProgress(
        number,
        name,
        card=card,
        directory=directory,
        state=state,
        why=why,
        view=view,
        iteration=last.iteration if last else None,
        samples=last.consumed_samples if last else None,
        loss=last.lm_loss if last else None,
        tokens_per_second=None if card is None else token_rate(steps, card.model.sequence_length),
        stranger=stranger,
        fault=found.fault,
    )


# ----------------------------------------------------------------------------- what the scheduler
# does not list
def _stranger(view: StopView, directory: RunDirectory, queue: Overview) -> LeaseHolder | None:
    """The trainer that holds the lease and lives, though no job of the run does: another scheduler
    or machine runs it.

    None for one whose job the scheduler knows to be over, and for this machine's own, which is
    known by its process.
    """
    if view.running or view.holder is None:
        return None
    holder = known(observed(read_holder, directory.paths, now()), None)
    if holder is None or holder.is_of(host_name()) or _is_over(directory, queue, holder.job_id):
        return None
    return holder


def _begun(attempts: Sequence[Attempt], directory: RunDirectory, queue: Overview) -> str:
    """Why the newest attempt, which left no word, may still be one that starts; "" where it is
    over.
    """
    newest = attempts[0]
    is_young = newest.end is None and now() - newest.changed < SILENCE_SECONDS
    if (
        not is_young
        or newest.job_id.startswith("foreground")
        or _is_over(directory, queue, newest.job_id)
    ):
        return ""
    return f"job {newest.label or newest.job_id} has just begun, {_not_known(queue)}"


def _not_known(queue: Overview) -> str:
    if queue.name:
        return f"not known to the {queue.name} scheduler"
    return "with no scheduler to ask"


def _is_over(directory: RunDirectory, queue: Overview, job_id: str) -> bool:
    """Whether the scheduler lists this job of the run as one that has ended. Its silence says
    nothing.
    """
    try:
        listed = [job for job in queue.jobs() if job.state.is_final and job_id in identifiers(job)]
    except SchedulerError:
        return False
    submissions, _ = read_submissions(directory)
    return any(map(Ownership(directory, known(submissions, ()), scheduler=queue.name).has, listed))


# ----------------------------------------------------------------------------- what is on record
def _state(view: StopView, attempts: Observed[tuple[Attempt, ...]]) -> tuple[CellState, str]:
    """By what can be seen: the queue goes before the records of what has ended."""
    if view.finished is not None:
        return CellState.DONE, "all samples were trained"
    if view.foreground or view.running:
        return CellState.RUNNING, view.foreground[
            0
        ] if view.foreground else f"job {view.running[0].job_id}"
    if view.queued:
        return CellState.QUEUED, f"job {view.queued[0].job_id} {view.queued[0].reason}".rstrip()
    read_error = view.read_error or view.unclear or view.unread
    if isinstance(attempts, Unknown):
        return CellState.UNKNOWN, attempts.why
    if read_error:
        return CellState.UNKNOWN, read_error
    if attempts:
        return _ended(view, attempts[0])
    return (CellState.NEW, "no attempt was begun")


def _ended(view: StopView, newest: Attempt) -> tuple[CellState, str]:
    """By the word of the newest attempt's trainer; one that left none did not end by itself."""
    if view.checkpoint is None:
        saved = ""
    else:
        saved = f"; saved at {view.checkpoint}"
    end = newest.end
    if isinstance(end, Unknown):
        return CellState.UNKNOWN, end.why
    if end is None:
        return CellState.FAILED, f"{newest.failure or 'it ended without a word of its own'}{saved}"
    if end.reason in {*BAD_REASONS, "superseded"}:
        return CellState.FAILED, f"{end.reason}: {one_line(end.message)}{saved}"
    return CellState.STOPPED, f"{end.reason} {end.place}{saved}"


def token_rate(steps: Sequence[MeasuredStep], sequence_length: int) -> float | None:
    """Tokens a second, the median of the last steps; None before the first."""
    rates = [
        step.samples_per_second * (step.curriculum_length or sequence_length)
        for step in steps[-RECENT_STEPS:]
        if step.samples_per_second > 0
    ]
    if rates:
        return median(rates)
    return None


def open_cells(cells: Iterable[CellProgress]) -> tuple[CellProgress, ...]:
    """The cells to take up: what failed, was stopped, or never began. What runs, waits or is done
    is left alone.
    """
    return tuple(cell for cell in cells if cell.state in OPEN)


# Stopping a study: queued jobs are cancelled, what runs saves and leaves.


def stop_cells(
    cells: Iterable[CellProgress], scheduler: Scheduler, user: str, now: bool
) -> JobChanges:
    """Cancel queued jobs first, for they would start in place of what leaves. `now`: also end what
    runs, unsaved.
    """
    listed = tuple(cells)
    asked: list[str] = []
    refused: list[tuple[str, str]] = []
    for job in (job for cell in listed for job in cell.view.queued):
        if not can_modify(job, user):
            refused.append((job.job_id, f"{job.user} owns it"))
            continue
        try:
            scheduler.cancel(job.job_id)
        except SchedulerError as error:
            refused.append((job.job_id, cause(error)))
        else:
            asked.append(job.job_id)
    for cell in listed:
        found = stop_by_scheduler(cell.view, scheduler, user, now)
        asked, refused = [*asked, *found.done], [*refused, *found.refused]
    return JobChanges(tuple(asked), tuple(refused))


def out_of_reach(cells: Iterable[CellProgress]) -> Iterator[tuple[CellProgress, str, str]]:
    """Cells that train where the scheduler cannot stop them: (cell, number of the attempt, why)."""
    for cell in cells:
        if cell.stranger is not None:
            yield cell, cell.stranger.job_id, cell.why
        elif cell.view.foreground and not cell.view.running:
            holder = cell.view.holder
            yield (
                cell,
                holder.job_id if holder is not None else "foreground",
                cell.view.foreground[0],
            )
