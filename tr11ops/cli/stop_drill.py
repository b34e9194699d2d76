"""`tr11 drill` of a card of another trainer: prove that it saves and stops in order when it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from tr11ops.base.errors import Refusal, Unobserved, WrongUsage
from tr11ops.base.observed import observed
from tr11ops.base.units import counted
from tr11ops.cli.common import directory_of, in_time, say
from tr11ops.cli.runner import Change, Outcome, RunContext
from tr11ops.cli.stopping import (
    StopContext,
    record,
    run_to_stop,
    running_lines,
    standing_lines,
    stop_context,
)
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.launch.stop_drill import StopDrill
from tr11ops.observe.readers import looking, open_scheduler
from tr11ops.queue.held_jobs import can_modify
from tr11ops.queue.stop import StopView
from tr11ops.runcard.card import ForeignCard
from tr11ops.trainers.proof import StopProof, proof_path, stop_digest, write_proof
from tr11ops.trainers.stopping import lack_of_asking, way_of
from trainer.contract.documents import document
from trainer.contract.record import Record
from trainer.contract.requests import read_request

STOP_DRILL_SCHEMA = 1
Launch = Callable[[int], tuple[str, str]]
"""Submits the card's array of so many tasks."""


class ForeignDrill(Record):
    """A drill of a run's trainer: whether it can be held, what it interrupts, and what came of it.

    `tasks`: how many are submitted, 0 for none. `view` is what runs and is queued now.
    """

    run: StopContext
    card: ForeignCard
    view: StopView
    tasks: int
    timeout: float
    launch: Launch

    @property
    def minutes(self) -> float:
        return self.card.resilience.stop_within_minutes

    @property
    def refusal(self) -> Refusal | None:
        """Why no drill is held."""
        card = self.card
        view = self.view
        settings = card.settings
        ranks = card.world_size
        lack = lack_of_asking(settings, ranks)
        if lack:
            return Refusal(
                f"there is nothing to prove: {lack}; a stop ends it after its next checkpoint"
            )
        if settings.checkpoint_folder is None:
            return WrongUsage("where its checkpoints lie is not known: set trainer.folder")
        unclear = view.read_error or view.unread or view.unclear
        if unclear:
            return Unobserved(f"what runs is not known: {unclear}")
        paths = card.paths
        if observed(read_request, card.kill_switch, "kill") is not None:
            return Refusal("the kill switch is set, so no launch would follow: tr11 resume")
        if observed(read_request, paths.pause, "pause") is not None:
            return Refusal("the run is paused, so no launch would follow: tr11 resume")
        others = [job.user for job in view.running if not can_modify(job, self.run.user)]
        if others:
            return Refusal(f"{others[0]} owns the running job, and may drill it")
        if not view.running and view.foreground:
            return Refusal("it trains in the foreground: a drill asks a job")
        lacking = self._lack_of_tasks()
        if lacking:
            return Refusal(f"{lacking}: tr11 drill --launch submits it")
        return None

    def _lack_of_tasks(self) -> str:
        if self.tasks:
            return ""
        if self.view.running and not _queued(self.view):
            return "no task is queued that could go on after the stop"
        if not self.view.running and _queued(self.view) < 2:
            return "nothing of this run trains, and no two tasks are queued"
        return ""

    def lines(self) -> list[str]:
        """What is interrupted, and what may be lost."""
        card = self.card
        view = self.view
        way = way_of(card.settings, card.world_size)
        lines = running_lines(view, f"is asked to save and leave, by {way}")
        if not view.running:
            lines.append(
                "running:    nothing yet: the first task is asked once it has trained a step"
            )
        lines += standing_lines(self.run, view)
        then = "the next task of the queue goes on"
        if self.tasks:
            then = f"{counted(self.tasks, 'task')} of the card submitted, the last of which goes on"
        return [
            *lines,
            f"then:       {then} from what was saved",
            "price:      nothing trains from the stop to the next launch's first step",
            f"may be lost: {_loss(view)}, where it does not save",
            f"at most:    {self.minutes:g} min: a job that has not left by then is cancelled",
        ]

    def _start_next(self) -> None:
        job_id, kind = self.launch(self.tasks)
        say(f"submitted: job {job_id} ({kind})")

    def apply(self) -> Outcome:
        """Hold the drill, and keep what it found."""
        card = self.card
        run = self.run
        settings = card.settings
        ranks = card.world_size
        digest = stop_digest(settings, ranks)
        began = time.time()
        proof = StopProof(
            settings.dialect.name, way_of(settings, ranks), digest, time=began, job_id=""
        )
        if not self.view.running and self.tasks:
            self._start_next()
        write_proof(card.paths, proof)  # a failed one before it would keep it from being asked
        try:
            proof = StopDrill(
                run.directory,
                run.edge,
                settings,
                ranks=ranks,
                minutes=self.minutes,
                say=say,
                start_next=self._start_next if self.view.running and self.tasks else None,
            ).run(proof, began + self.timeout)
        finally:
            if proof.result == "under way":
                write_proof(card.paths, _given_up(proof))
        path = write_proof(card.paths, proof)
        data = {"result": proof.result, "why": proof.why, "job_id": proof.job_id}
        record(run.directory, "stop-drill", "", data, who=run.who)
        value = {
            "schema": STOP_DRILL_SCHEMA,
            "run": card.run.name,
            "fine": proof.is_proved,
            **document(proof),
            "proof": str(path),
        }
        codes = {"proved": 0, "failed": 1}
        return Outcome(value, _said(proof, str(path)), exit_code=codes.get(proof.result, 3))


def _given_up(proof: StopProof) -> StopProof:
    return replace(proof, result="unclear", why="the drill was broken off")


def _queued(view: StopView) -> int:
    """Tasks that start by themselves."""
    return sum(max(1, len(job.pending_tasks)) for job in view.queued if not is_held(job))


def _loss(view: StopView) -> str:
    lost = view.lost_iterations
    if lost is None:
        return "what was trained since the last checkpoint"
    return f"what was trained since the last checkpoint, now {counted(lost, 'step')}"


def _said(proof: StopProof, path: str) -> list[str]:
    lines = []
    if proof.signalled_after is not None:
        lines.append(f"signalled:  after {proof.signalled_after:.1f} s, at step {proof.iteration}")
    if proof.saved_after is not None:
        lines.append(f"seen saved: {proof.checkpoint} after {proof.saved_after:.1f} s")
    if proof.left_after is not None:
        lines.append(f"left:       after {proof.left_after:.1f} s")
    if proof.went_on_at is not None:
        lines.append(f"went on:    job {proof.next_job} at step {proof.went_on_at}")
    if proof.is_proved:
        lines.append("proved: level 3, stopped in order, as long as the command stays as it is")
    elif proof.result == "failed":
        lines.append(
            f"failed: {proof.why}; it stays at level 2: a stop ends it after its next checkpoint"
        )
    else:
        lines.append(f"not proved: {proof.why}; it stays at level 2")
    return [*lines, f"record: {path}"]


def _run_of(context: RunContext, card: ForeignCard, may_launch: bool) -> StopContext:
    """The run that is meant; one that was never launched may be, where the drill submits it."""
    directory = directory_of(card)

    def is_there() -> bool:
        return directory.exists

    if not may_launch or in_time(is_there):
        return run_to_stop(context)
    edge = looking(open_scheduler(context.scheduler))
    return stop_context(context, directory, edge)


def drill_of(
    context: RunContext, card: ForeignCard, may_launch: bool, timeout: float, launch: Launch
) -> Change:
    """The drill of a card of another trainer. Raises Refusal, CardError."""
    run = _run_of(context, card, may_launch)
    view = run.look(needs_directory=False)
    tasks = 0
    if may_launch and not view.running:
        tasks = max(0, 2 - _queued(view))
    elif may_launch and not _queued(view):
        tasks = 1
    plan = ForeignDrill(run, card, view, tasks=tasks, timeout=timeout, launch=launch)
    path = proof_path(card.paths, stop_digest(card.settings, card.world_size))
    preview = Outcome({"schema": STOP_DRILL_SCHEMA, "run": card.run.name, "proof": str(path)})
    return Change(
        plan.lines(),
        "Ask the training to save and stop?",
        plan.apply,
        preview=preview,
        refusal=plan.refusal,
        unchanged="nothing was asked (--dry-run)",
    )
