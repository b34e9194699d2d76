"""Where each cell of a study stands: by queue, end markers and checkpoints, which are read again at each look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.redact import one_line
from tr11ops.cluster.base import Job, Node, Overview, SchedulerUnreachable
from tr11ops.launch.history import RECENT_STEPS
from tr11ops.observe.files import read_attempts, read_steps
from tr11ops.observe.snapshot import Attempt
from tr11ops.queue.stop import StopView
from tr11ops.queue.stop import look as look_at_run
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.logline import StepRecord


class CellState(StrEnum):
    """What a cell is, as the person who studies it needs it."""

    DONE = "done"
    RUNNING = "running"
    QUEUED = "queued"
    STOPPED = "stopped"  # saved and left in order
    FAILED = "failed"
    NEW = "not begun"
    UNKNOWN = "unknown"


OPEN = frozenset({CellState.STOPPED, CellState.FAILED, CellState.NEW})  # what `tr11 sweep resume` takes up


@dataclass(frozen=True)
class CellProgress:
    """One cell at one moment. `why` says what the state rests on. None: not known, or nothing was logged."""

    number: int
    name: str
    card: RunCard
    directory: RunDirectory
    state: CellState
    why: str
    view: StopView
    iteration: int | None = None
    samples: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Its jobs that are not over."""
        return (*self.view.running, *self.view.queued)


class NoScheduler:
    """An Overview where there is none to ask."""

    name = ""

    def __init__(self, why: str) -> None:
        self._why = why

    def jobs(self, name: str | None = None, user: str | None = None) -> tuple[Job, ...]:
        raise SchedulerUnreachable(self._why)

    def nodes(self) -> tuple[Node, ...]:
        raise SchedulerUnreachable(self._why)


def look_at_cell(number: int, name: str, card: RunCard, directory: RunDirectory, queue: Overview) -> CellProgress:
    """Look at one cell; changes nothing. What cannot be read is unknown."""
    view = look_at_run(card, directory, queue)
    attempts = read_attempts(directory.paths)
    steps = [step.record for step in known(read_steps(directory.paths), ())]
    last = steps[-1] if steps else None
    state, why = _state(view, attempts)
    return CellProgress(
        number, name, card, directory, state, why, view,
        iteration=last.iteration if last else None,
        samples=last.consumed_samples if last else None,
        loss=last.lm_loss if last else None,
        tokens_per_second=token_rate(steps, card.model.sequence_length),
    )  # fmt: skip


def _state(view: StopView, attempts: Observed[tuple[Attempt, ...]]) -> tuple[CellState, str]:
    """By what can be seen: the queue goes before the records of what has ended."""
    if view.finished is not None:
        return CellState.DONE, "all samples were trained"
    if view.foreground or view.running:
        return CellState.RUNNING, view.foreground[0] if view.foreground else f"job {view.running[0].job_id}"
    if view.queued:
        return CellState.QUEUED, f"job {view.queued[0].job_id} {view.queued[0].reason}".rstrip()
    doubt = view.doubt or view.unclear or view.unread
    if isinstance(attempts, Unknown):
        return CellState.UNKNOWN, attempts.why
    if doubt:
        return CellState.UNKNOWN, doubt
    return _ended(view, attempts[0]) if attempts else (CellState.NEW, "no attempt was begun")


def _ended(view: StopView, newest: Attempt) -> tuple[CellState, str]:
    """By the word of the newest attempt's trainer; one that left none did not end by itself."""
    saved = "" if view.checkpoint is None else f"; saved at {view.checkpoint}"
    end = newest.end
    if isinstance(end, Unknown):
        return CellState.UNKNOWN, end.why
    if end is None:
        return CellState.FAILED, f"{newest.failure or 'it ended without a word of its own'}{saved}"
    if end.reason in {"error", "refused", "superseded"}:
        return CellState.FAILED, f"{end.reason}: {one_line(end.message)}{saved}"
    return CellState.STOPPED, f"{end.reason} at iteration {end.iteration}{saved}"


def token_rate(steps: Sequence[StepRecord], sequence_length: int) -> float | None:
    """Tokens a second, the median of the last steps; None before the first."""
    rates = [
        step.samples_per_second * (step.curriculum_length or sequence_length)
        for step in steps[-RECENT_STEPS:]
        if step.samples_per_second > 0
    ]
    return median(rates) if rates else None


def open_cells(cells: Iterable[CellProgress]) -> tuple[CellProgress, ...]:
    """The cells to take up: what failed, was stopped, or never began. What runs, waits or is done is left alone."""
    return tuple(cell for cell in cells if cell.state in OPEN)
