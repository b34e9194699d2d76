"""`tr11 pause` and `tr11 kill`: a run stops after its task, or saves and stops now, no matter who
started it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import Late, Refusal, Unobserved
from tr11ops.base.units import counted, duration
from tr11ops.cli.common import say, timeout_option
from tr11ops.cli.resume import Resumption, plan_resumption
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, SCHEDULER, YES, Change, Outcome, RunContext
from tr11ops.cli.stopping import (
    StopContext,
    StopWait,
    all_may_be_cancelled,
    fall_back,
    hold_queued,
    is_all_held,
    put_request,
    queued_lines,
    record,
    require_switch,
    run_to_stop,
    running_lines,
    standing_lines,
    stop_without_files,
    way_on,
)
from tr11ops.cluster.base import JobState
from tr11ops.queue.held_jobs import to_hold
from tr11ops.queue.stop import (
    Acknowledgements,
    JobEnding,
    StopView,
    acknowledgements,
    wait_for_end,
    wait_for_lease,
)
from trainer.contract.lease import LeaseClaim
from trainer.contract.record import JsonObject, Record
from trainer.contract.requests import Request, new_request, read_request

PAUSE_SCHEMA = 1
KILL_SCHEMA = 1
NOW_MINUTES = 1.0  # what does not end within this time after `--now` is cancelled


# ----------------------------------------------------------------------------- pause
def pause(context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON]) -> Change:
    """Stop after this task: the running attempt trains to its limit, queued jobs are held.

    `tr11 resume` lets it go on. It works for another person's run too: rights to write in its
    directory are enough.

    Examples:
      tr11 pause --reason "new data on Monday"
      tr11 pause --dry-run
    """
    run = run_to_stop(context)
    view = run.look(needs_directory=False)
    if view.unmounted:
        before = None
    else:
        before = run.read(lambda: read_request(run.directory.paths.pause, "pause"))
    plan = Pause(run, view, before, context.reason)
    question = ""
    if before is None:
        question = "Pause the run after this task?"
    refusal = None
    if view.unmounted and view.is_idle:
        refusal = Unobserved(f"nothing was paused: {view.unmounted}")
    return Change(
        plan.lines(),
        question,
        apply=plan.apply,
        preview=plan.outcome("dry-run", plan.exempt),
        refusal=refusal,
        is_empty=before is not None and not to_hold(view.queued, run.user)[0],
    )


class Pause(Record):
    """No attempt after the one that trains. `before`: the pause that is set already."""

    run: StopContext
    view: StopView
    before: Request | None
    why: str

    @property
    def exempt(self) -> str:
        """The attempt that trains on, "" for none."""
        if self.view.attempts:
            return self.view.attempts[0]
        return ""

    def lines(self) -> list[str]:
        """What is there, and what will happen."""
        view = self.view
        lines = [
            *running_lines(view, "will train to its limit"),
            *queued_lines(view, self.run.user),
        ]
        if view.read_error:
            lines.append(_without_scheduler(view, "pause"))
        if view.is_idle:
            lines.append(
                "jobs:       nothing of this run is running or queued; a launch will leave untrained"
            )
        lines += standing_lines(self.run, view)
        if view.unmounted and not view.is_idle:
            lines.append(
                "instead:    no pause is set; what the scheduler shows as queued of this run is held"
            )
        if self.before is not None:
            lines.append(f"this run is already paused, by {self.before}")
        return lines

    def apply(self) -> Outcome:
        """Set the pause and hold what is queued. Says what was done."""
        run = self.run
        view = self.view
        is_paused = self.before is not None or self._set()
        held = hold_queued(run, view, self.why or "pause", is_paused)
        if not is_paused and not is_all_held(run, view, held):
            raise Refusal(
                "what is queued is not all held, and no file keeps it from training: hold it where it is queued"
            )
        unknown = view.unread or view.unclear
        if not is_paused and unknown:
            raise Unobserved(
                f"the run is not paused, and what else of it may start is not known: {unknown}",
            )
        say(way_on(run, view))
        if self.before is None:
            return self.outcome("paused", self.exempt, held)
        return self.outcome("already-paused", self.before.exempt, held)

    def _set(self) -> bool:
        """Set the pause, as far as there is a place for it, and put on record that it was wanted."""
        run = self.run
        path = self.run.directory.paths.pause
        unmounted = self.view.unmounted
        request = new_request(
            "pause", run.who, why=self.why, directory=run.directory.root, exempt=self.exempt
        )
        is_paused = not unmounted and put_request(run, path, request)
        data = {"request": request.id, "exempt": self.exempt}
        record(run.directory, "pause", why=self.why, data=data, who=run.who, unmounted=unmounted)
        if is_paused:
            say(f"paused: {path}")
        return is_paused

    def outcome(self, action: str, exempt: str, held: tuple[str, ...] = ()) -> Outcome:
        """The answer; `exempt` trains on."""
        path = str(self.run.directory.paths.pause)
        return Outcome(
            {
                "schema": PAUSE_SCHEMA,
                "action": action,
                "pause": path,
                "trains_on": exempt or None,
                "held": list(held),
            }
        )


def _without_scheduler(view: StopView, name: str) -> str:
    return f"jobs:       unknown, the scheduler did not answer ({view.read_error}); the {name} works without it"


# ----------------------------------------------------------------------------- kill
def kill(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON],
    *,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="End within seconds, without saving: what is not saved yet is lost."
        ),
    ] = False,
    release: Annotated[
        bool,
        typer.Option(
            "--release", help="Let it go on, as `tr11 resume` does: switch, pause and holds."
        ),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until the running job has ended; cancel one that does not end in time.",
        ),
    ] = False,
    timeout: Annotated[float, timeout_option("With --wait: give up after this long.")] = 3600,
) -> Change:
    """Save and stop a run, with all that is queued of it; nothing is lost.

    The running job saves a checkpoint at its next iteration and leaves. Queued jobs are held at
    once, and go on with `tr11 resume`. It works for another person's run too: rights to write in
    the run directory are enough.

    With --wait, a job that has not stopped within resilience.stop_within_minutes is cancelled,
    where you may do that. Where no switch can be set (a read-only disk, or one that is not mounted
    here) the scheduler itself is asked.

    Examples:
      tr11 kill --reason "loss spike, rolling back" --wait
      tr11 kill --now --dry-run        what would be lost
      tr11 kill --release
    """
    if release:
        return _release(context)
    run = run_to_stop(context)
    view = run.look(needs_directory=False)
    has_switch = require_switch(run, view)
    before = None
    if has_switch:
        before = run.read(lambda: read_request(run.directory.kill_switch, "kill"))
    patience = timeout if wait else None
    stop = Kill(
        run=run,
        view=view,
        before=before,
        has_switch=has_switch,
        now=now,
        why=context.reason,
        patience=patience,
        as_json=context.as_json,
    )
    return Change(
        stop.lines(),
        stop.question,
        apply=stop.apply,
        preview=Outcome(stop.document("dry-run")),
        refusal=stop.refusal,
        is_empty=not stop.is_wanted,
    )


class Kill(Record):
    """Save and stop, or with `now` stop unsaved. `before`: the request that is in the switch
    already.

    `has_switch`: False where none can be set, so that the scheduler is asked. `patience`: seconds
    that the end is waited for, None for not at all. `as_json`: standard output is the document's.
    """

    run: StopContext
    view: StopView
    before: Request | None
    has_switch: bool
    now: bool
    why: str
    patience: float | None
    as_json: bool

    @property
    def is_new(self) -> bool:
        """Whether the switch has to be set: it is not, or asks for less."""
        return self.before is None or (self.now and self.before.kind != "kill-now")

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to do."""
        return self.is_new or bool(to_hold(self.view.queued, self.run.user)[0])

    @property
    def question(self) -> str:
        """What is asked before."""
        if not self.is_wanted:
            return ""
        if self.now:
            return "End the run now, without saving?"
        if self.has_switch:
            return "Stop the run?"
        return "Ask the scheduler to stop it?"

    def lines(self) -> list[str]:
        """What is there, and what will happen."""
        from tr11ops.observe.look import standing_of_card

        view = self.view
        before = self.before
        standing = self.run.read(partial(standing_of_card, self.run.card))
        what = "will save and leave"
        saves = f"saves first, at about iteration {(view.iteration or 0) + 1}"
        if self.now:
            what = "will end within seconds"
            saves = ""
            if view.lost_iterations != 0:
                what += ", unsaved"
        elif standing is not None and standing.saves_when_asked is False:
            what = "will leave after its next checkpoint"
            saves = "leaves after the next one"
        elif standing is not None and standing.saves_when_asked is None:
            what = "is asked to save and leave"
            saves = "it is not known whether it saves one first"
        if not view.attempts or view.iteration is None:
            saves = ""
        lines = [*running_lines(view, what), *queued_lines(view, self.run.user)]
        if view.read_error:
            lines.append(_without_scheduler(view, "switch"))
        if view.is_idle:
            rest = "; launches are refused until the switch is released"
            if view.unmounted:
                rest = ""
            lines.append(f"jobs:       nothing of this run is running or queued{rest}")
        lines += standing_lines(self.run, view, saves)
        if self.now:
            lines.append(f"lost:       {_loss(self.run, view)}")
        elif standing is not None:
            lines.append(f"how:        {standing.stop}")
        if before is not None:
            end = ""
            if before.kind == "kill-now":
                end = ", to end without saving"
            lines.append(
                f"the kill switch is already set by {before}{end}: {self.run.directory.kill_switch}"
            )
        if not self.has_switch and not view.is_idle:
            lines.append(
                "instead:    no kill switch is set; the scheduler is asked to stop what it shows of this run"
            )
        return lines

    @property
    def refusal(self) -> Refusal | None:
        """Why nothing can be stopped at all."""
        if self.has_switch or not self.view.is_idle:
            return None
        why = self.view.unmounted
        return Unobserved(f"nothing was stopped, and no kill switch can be set from here: {why}")

    def apply(self) -> Outcome:
        """Stop it, and wait for its end where that is wanted. Says what was done."""
        run = self.run
        view = self.view
        request = self.before
        is_set = not self.is_new
        is_stopped = True
        held: tuple[str, ...] = ()
        if self.is_wanted:
            is_enough = True
            if self.is_new:
                request = new_request(
                    "kill-now" if self.now else "kill", run.who, self.why, run.directory.root
                )
                is_set, is_enough = self._set(request)
            # before anything ends: no file keeps the next task from training where the switch could
            # not be set
            held = hold_queued(run, view, self.why or "kill switch", is_set)
            if not is_enough:
                is_stopped = stop_without_files(run, view, self.now)
            is_stopped = is_stopped and (is_set or is_all_held(run, view, held))
        assert request is not None
        endings, lease = self._wait(request)
        is_fine = self._report(endings) and is_stopped and lease is None
        unknown = self._unknown(is_stopped)
        if all(ending.is_over for ending in endings) and (held or not unknown):
            say(way_on(run, view))
        action = "already-set"
        if self.is_new:
            action = "asked-scheduler"
            if is_set:
                action = "set"
        document = self.document(action, endings, request, held, answered=self._answered(request))
        if unknown:
            return Outcome(
                document,
                exit_code=3,
                fault=f"it is not known whether anything still runs: {unknown}",
            )
        return Outcome(document, exit_code=0 if is_fine else 1)

    def _set(self, request: Request) -> tuple[bool, bool]:
        """Set the switch, where there is one to set. Returns whether it is set, and whether that
        stops what runs.
        """
        directory = self.run.directory
        is_set = self.has_switch and put_request(self.run, directory.kill_switch, request)
        is_whole = False
        if is_set:
            with suppress(Late):
                there = deadline.within(
                    deadline.STOP_SECONDS, lambda: read_request(directory.kill_switch, "kill")
                )
                is_whole = there is not None and there.id == request.id
            say(f"kill switch set: {directory.kill_switch}")
        # an empty switch makes it save and leave, which is all that is wanted but for an end
        # without saving
        is_enough = is_whole or (is_set and not self.now)
        data = {
            "kill_switch": str(directory.kill_switch),
            "request": request.id,
            "kind": request.kind,
            "set": is_set,
        }
        entry = "stop-asked"
        if is_set:
            entry = "kill-switch-set"
        record(
            directory,
            entry,
            why=request.why,
            data=data,
            who=request.who,
            unmounted=self.view.unmounted,
        )
        return is_set, is_enough

    def _wait(self, request: Request) -> tuple[tuple[JobEnding, ...], LeaseClaim | None]:
        """How what runs has ended, where that is waited for, and whose lease counts still as a living
        trainer's, though its job is over.
        """
        run = self.run
        view = self.view
        # one in the foreground is no job, and saves as long as it needs
        attempts = [one for one in view.attempts if not one.startswith("foreground")]
        if self.patience is None or not attempts:
            return (), None
        minutes = run.card.resilience.stop_within_minutes
        if request.kind == "kill-now":
            minutes = NOW_MINUTES
        patience = StopWait(
            self.patience, minutes * 60, lambda: fall_back(run, view, request.id, minutes)
        )
        hint = _unsaved_end(run, view, request.kind, minutes)
        endings = wait_for_end(
            run.directory,
            view.running,
            scheduler=run.edge,
            pause=patience,
            progress=_say_indented,
            request=request.id,
            unsaved_end=hint,
        )
        is_known = not (view.unmounted or view.read_error or view.unclear)
        if not is_known or not all(ending.is_over for ending in endings):
            return endings, None
        lease = wait_for_lease(run.directory, attempts, patience, _say_indented)
        if lease is not None:
            say(
                f"tr11: the lease of {lease.told(run.directory.paths)} still counts as a living trainer's, though "
                f"its job is over: `{run.command('status')}` shows it"
            )
        return endings, lease

    def _report(self, endings: tuple[JobEnding, ...]) -> bool:
        """Say how the jobs ended. Returns whether all of them ended well."""
        is_fine = True
        for ending in endings:
            marker = ending.marker
            if not ending.is_over:
                text = f"is still there: it did not end in time; `{self.run.command('status')}` shows it"
            elif ending.gave_way:
                text = "trained nothing, as another job of the run did"
                if ending.state is JobState.PENDING:
                    text += ": it is back in the queue"
            elif marker is None and self.view.unmounted:
                text = "ended; what it saved is not known: the run directory is not mounted here"
            elif marker is None:
                look = self.run.command("status")
                text = f"ended without a word of the trainer: the last checkpoint is what `{look}` shows"
            else:
                step = marker.checkpoint_step
                saved = "no checkpoint was made"
                if step is not None:
                    saved = f"checkpoint {self.run.card.checkpoint_label(step)}"
                text = f"ended ({marker.reason}) {marker.place}: {saved}"
            has_word = ending.gave_way or (
                marker is not None and marker.reason not in {"error", "unexplained"}
            )
            if not (ending.is_over and has_word):
                is_fine = False
            print(f"job {ending.job_id} {text}", file=sys.stderr if self.as_json else sys.stdout)
        return is_fine

    def _unknown(self, is_stopped: bool) -> str:
        """Why it is not known whether anything still runs; "" where that is known, or no one waits
        for it.
        """
        view = self.view
        if not is_stopped:
            return view.unread or view.unclear
        if self.patience is not None:
            return view.read_error or view.unclear
        return ""

    def _answered(self, request: Request) -> Acknowledgements | None:
        """Who has honoured the request; None where the files do not answer, which undoes nothing of
        the stop.
        """
        if not self.as_json:
            return None
        directory = self.run.directory
        attempts = self.view.attempts
        try:
            return deadline.within(
                deadline.STOP_SECONDS, lambda: acknowledgements(directory, request.id, attempts)
            )
        except Late:
            return None

    def document(
        self,
        action: str,
        endings: tuple[JobEnding, ...] = (),
        request: Request | None = None,
        held: tuple[str, ...] = (),
        *,
        answered: Acknowledgements | None = None,
    ) -> JsonObject:
        """For --json."""
        view = self.view
        return {
            "schema": KILL_SCHEMA,
            "action": action,
            "kind": request.kind if request else None,
            "request": request.id if request else None,
            "kill_switch": str(self.run.directory.kill_switch),
            "running": [job.job_id for job in view.running],
            "foreground": list(view.foreground),
            "queued_tasks": None if view.read_error else view.queued_tasks,
            "held": list(held),
            "iteration": view.iteration,
            "checkpoint": view.checkpoint,
            "iterations_at_risk": view.lost_iterations,
            "unknown": view.read_error or view.unclear or view.unmounted or None,
            "receipts": None
            if answered is None
            else {
                "given": [{"rank": rank, "host": host} for rank, host in answered.given],
                "missing": [{"rank": rank, "host": host} for rank, host in answered.missing],
            },
            "ended": [
                {
                    "job_id": ending.job_id,
                    "is_over": ending.is_over,
                    "reason": ending.marker.reason if ending.marker else None,
                    "iteration": ending.marker.iteration if ending.marker else None,
                    "checkpoint": ending.marker.checkpoint_step if ending.marker else None,
                }
                for ending in endings
            ],
        }


def _say_indented(text: str) -> None:
    say(f"  {text}")


def _loss(run: StopContext, view: StopView) -> str:
    if view.unmounted:
        return "not known: the run directory is not mounted here"
    lost = view.lost_iterations
    if lost is None:
        return "not known: no iteration is on record"
    since = "the start"
    if view.checkpoint is not None:
        since = run.card.checkpoint_label(view.checkpoint)
    if not lost:
        return f"nothing: no iteration has ended since {since}"
    pace = ""
    if view.seconds_per_iteration:
        pace = f", about {duration(lost * view.seconds_per_iteration)} of training"
    return f"{counted(lost, 'iteration')} since {since}{pace}"


def _unsaved_end(run: StopContext, view: StopView, kind: str, minutes: float) -> str:
    """What ends a job that cannot save: a command, and this one by itself where it may."""
    late = ""
    if all_may_be_cancelled(run, view):
        late = f"what has not ended after {minutes:g} min is cancelled"
    if kind == "kill-now":
        return late
    now = f"to end it unsaved, type Ctrl-C, then: {run.command('kill --now --wait')}"
    if late:
        return f"{now} ({late})"
    return now


# ----------------------------------------------------------------------------- kill --release
def _release(context: RunContext) -> Change:
    """What `tr11 resume` does; a switch alone is not enough where queued jobs were held with it."""
    run = run_to_stop(context, is_releasing=True)
    was_set = run.read(run.directory.kill_switch_is_set)
    plan = plan_resumption(run, context)
    preview = _released(plan.outcome("dry-run"), plan, was_set)

    def apply() -> Outcome:
        return _released(plan.apply(), plan, was_set)

    return Change(plan.lines(), plan.question, apply, preview)


def _released(outcome: Outcome, plan: Resumption, was_set: bool) -> Outcome:
    """The answer of a resumption in the words of `tr11 kill`. `was_set`: whether the kill switch
    was.
    """
    switch = plan.run.directory.kill_switch
    document = {**(outcome.document or {}), "schema": KILL_SCHEMA, "kill_switch": str(switch)}
    if not was_set:
        return replace(
            outcome,
            document={**document, "action": "not-set"},
            notes=(f"kill switch was not set: {switch}",),
        )
    if document["action"] != "dry-run":
        document["action"] = "released"
    return replace(outcome, document=document)
