"""`tr11 kill`: stop a run through its kill switch, no matter who started it; `--release` takes the switch away
again."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base import deadline
from tr11ops.base.errors import Late, Refusal
from tr11ops.cli.common import DryRunOption, YesOption, agree, say, timeout_option
from tr11ops.cli.context import JSON, SCHEDULER, RunContext, emit
from tr11ops.cli.resume import let_go_on
from tr11ops.cli.stopping import (
    ReasonOption,
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
from tr11ops.queue.held_jobs import to_hold
from tr11ops.queue.stop import acknowledgements, wait_for_end
from trainer.contract.requests import new_request, read_request

if TYPE_CHECKING:
    from tr11ops.queue.stop import Acknowledgements, JobEnding, StopView
    from tr11ops.rundir.paths import RunDirectory
    from trainer.contract.requests import Request

KILL_SCHEMA = 1
NOW_MINUTES = 1.0  # what does not end within this time after `--now` is cancelled


def kill(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    now: Annotated[
        bool, typer.Option("--now", help="End within seconds, without saving: what is not saved yet is lost.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Let it go on, as `tr11 resume` does: switch, pause and holds.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the running job has ended; cancel one that does not end in time."),
    ] = False,
    timeout: Annotated[float, timeout_option("With --wait: give up after this long.")] = 3600,
    why: ReasonOption = "",
) -> None:
    """Save and stop a run, with all that is queued of it; nothing is lost.

    The running job saves a checkpoint at its next iteration and leaves. Queued jobs are held at once, and go on
    with `tr11 resume`. It works for another person's run too: rights to write in the run directory are enough.

    With --wait, a job that has not stopped within resilience.stop_within_minutes is cancelled, where you may do that.
    Where no switch can be set (a read-only disk, or one that is not mounted here) the scheduler itself is asked.

    Examples:
      tr11 kill --reason "loss spike, rolling back" --wait
      tr11 kill --now --dry-run        what would be lost
      tr11 kill --release
    """
    if release:
        _release(run_to_stop(context, is_releasing=True), why, yes, dry_run, context.as_json)
        return

    run = run_to_stop(context)
    directory, view = run.directory, run.look(needs_directory=False)
    has_switch = require_switch(run, view)
    before = run.read(lambda: read_request(directory.kill_switch, "kill")) if has_switch else None
    is_new = before is None or (now and before.kind != "kill-now")
    for line in _lines(run, view, before, now):
        say(line)
    if not has_switch:
        _say_without_switch(view)
    if dry_run:
        say("nothing was changed (--dry-run)")
        if context.as_json:
            emit(_value("dry-run", directory, view))
        return
    request = before
    is_set, is_enough, is_stopped = not is_new, True, True
    held: tuple[str, ...] = ()
    if is_new or to_hold(view.queued, run.user)[0]:
        agree(_question(has_switch, now), yes)
        if is_new:
            request = new_request("kill-now" if now else "kill", run.user, why, directory.root)
            is_set, is_enough = _set(run, view, request, has_switch)
        # before anything ends: no file keeps the next task from training where the switch could not be set
        held = hold_queued(run, view, why or "kill switch", is_set)
        if not is_enough:
            is_stopped = stop_without_files(run, view, now)
        is_stopped = is_stopped and (is_set or is_all_held(run, view, held))
    assert request is not None
    endings: tuple[JobEnding, ...] = ()
    if wait and view.running:
        minutes = NOW_MINUTES if request.kind == "kill-now" else run.card.resilience.stop_within_minutes
        patience = StopWait(timeout, minutes * 60, lambda: fall_back(run, view, request.id, minutes))
        endings = wait_for_end(
            directory, view.running, run.edge, patience, lambda text: say(f"  {text}"), request.id,
            _unsaved_end(run, view, request.kind, minutes),
        )  # fmt: skip
    code = max(_report(run, view, endings, context.as_json), 0 if is_stopped else 1)
    unknown = view.unread or view.unclear if not is_stopped else (view.read_error or view.unclear) if wait else ""
    if (not wait or all(ending.is_over for ending in endings)) and (held or not unknown):
        say(way_on(run, view))
    if context.as_json:
        answered = _answered(run, view, request)
        action = "already-set" if not is_new else "set" if is_set else "asked-scheduler"
        emit(_value(action, directory, view, endings, request, held, answered))
    if unknown:
        raise Refusal(f"it is not known whether anything still runs: {unknown}", exit_code=3)
    raise typer.Exit(code)


def _lines(run: StopContext, view: StopView, before: Request | None, now: bool) -> list[str]:
    """What is there and what will happen, for a person."""
    what = "will end within seconds, unsaved" if now else "will save and leave"
    lines = [*running_lines(view, what), *queued_lines(view, run.user)]
    if view.read_error:
        lines.append(
            f"jobs:       unknown, the scheduler did not answer ({view.read_error}); the switch works without it"
        )
    if view.is_idle:
        rest = "" if view.unmounted else "; launches are refused until the switch is released"
        lines.append(f"jobs:       nothing of this run is running or queued{rest}")
    lines += standing_lines(view)
    if now:
        lines.append(f"lost:       {_loss(view)}")
    if before is not None:
        by = f" by {before.who}" if before.who else ""
        reason = f" ({before.why})" if before.why else ""
        end = ", to end without saving" if before.kind == "kill-now" else ""
        lines.append(f"the kill switch is already set{by}{reason}{end}: {run.directory.kill_switch}")
    return lines


def _say_without_switch(view: StopView) -> None:
    """What is done in its place. Raises Refusal where the scheduler shows nothing to stop either."""
    if view.is_idle:
        raise Refusal(f"nothing was stopped, and no kill switch can be set from here: {view.unmounted}", exit_code=3)
    say("instead:    no kill switch is set; the scheduler is asked to stop what it shows of this run")


def _question(has_switch: bool, now: bool) -> str:
    if now:
        return "End the run now, without saving?"
    return "Set the kill switch?" if has_switch else "Ask the scheduler to stop it?"


def _loss(view: StopView) -> str:
    if view.unmounted:
        return "not known: the run directory is not mounted here"
    lost = view.lost_iterations
    if lost is None:
        return "not known: no iteration is on record"
    since = "the start" if view.checkpoint is None else f"global_step{view.checkpoint}"
    seconds = view.seconds_per_iteration
    pace = f", about {max(1, round(lost * seconds / 60))} min of training" if lost and seconds else ""
    return f"{lost} iterations since {since}{pace}"


def _unsaved_end(run: StopContext, view: StopView, kind: str, minutes: float) -> str:
    """What ends a job that cannot save: a command, and this one by itself where it may."""
    late = f"what has not ended after {minutes:g} min is cancelled" if all_may_be_cancelled(run, view) else ""
    if kind == "kill-now":
        return late
    now = f"to end it unsaved, type Ctrl-C, then: {run.command('kill --now --wait')}"
    return f"{now} ({late})" if late else now


def _answered(run: StopContext, view: StopView, request: Request) -> Acknowledgements | None:
    """Who has honoured the request; None where the files do not answer, which undoes nothing of the stop."""
    try:
        return deadline.within(
            deadline.STOP_SECONDS, lambda: acknowledgements(run.directory, request.id, view.attempts)
        )
    except Late:
        return None


def _set(run: StopContext, view: StopView, request: Request, has_switch: bool) -> tuple[bool, bool]:
    """Set the kill switch, where there is one to set. Returns whether it is set, and whether that stops what runs."""
    directory, now = run.directory, request.kind == "kill-now"
    is_set, is_whole = has_switch and put_request(run, directory.kill_switch, request), False
    if is_set:
        with suppress(Late):
            found = deadline.within(deadline.STOP_SECONDS, lambda: read_request(directory.kill_switch, "kill"))
            is_whole = found is not None and found.id == request.id
        say(f"kill switch set: {directory.kill_switch}")
    # an empty switch makes it save and leave, which is all that is wanted but for an end without saving
    is_enough = is_whole or (is_set and not now)
    data = {"kill_switch": str(directory.kill_switch), "request": request.id, "kind": request.kind, "set": is_set}
    record(directory, "kill-switch-set" if is_set else "stop-asked", request.why, data, request.who, view.unmounted)
    return is_set, is_enough


def _release(run: StopContext, why: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    """What `tr11 resume` does; a switch alone is not enough where queued jobs were held with it."""
    was_set = run.read(run.directory.kill_switch_is_set)
    done = let_go_on(run, why, yes, dry_run)
    if not was_set:
        say(f"kill switch was not set: {run.directory.kill_switch}")
    if as_json:
        action = "not-set" if not was_set else "dry-run" if dry_run else "released"
        value = {**done.value(), "schema": KILL_SCHEMA, "action": action}
        emit({**value, "kill_switch": str(run.directory.kill_switch)})
    done.leave(as_json)


def _report(run: StopContext, view: StopView, endings: tuple[JobEnding, ...], as_json: bool) -> int:
    """Say how the jobs ended; returns the exit code."""
    code = 0
    for ending in endings:
        marker = ending.marker
        if not ending.is_over:
            text, fine = f"is still there: it did not end in time; `{run.command('status')}` shows it", False
        elif marker is None and view.unmounted:
            text, fine = "ended; what it saved is not known: the run directory is not mounted here", False
        elif marker is None:
            look = run.command("status")
            text, fine = f"ended without a word of the trainer: the last checkpoint is what `{look}` shows", False
        else:
            step = marker.checkpoint_step
            saved = "no checkpoint was made" if step is None else f"checkpoint global_step{step}"
            text, fine = f"ended ({marker.reason}) at iteration {marker.iteration}: {saved}", marker.reason != "error"
        code = code if fine else 1
        print(f"job {ending.job_id} {text}", file=sys.stderr if as_json else sys.stdout)
    return code


def _value(
    action: str,
    directory: RunDirectory,
    view: StopView,
    endings: tuple[JobEnding, ...] = (),
    request: Request | None = None,
    held: tuple[str, ...] = (),
    answered: Acknowledgements | None = None,
) -> dict[str, Any]:
    return {
        "schema": KILL_SCHEMA,
        "action": action,
        "kind": request.kind if request else None,
        "request": request.id if request else None,
        "kill_switch": str(directory.kill_switch),
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
