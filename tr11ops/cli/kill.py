"""`tr11 kill`: stop a run through its kill switch, whoever started it; `--release` takes the switch away again."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    YesOption,
    agree,
    say,
)
from tr11ops.cli.stopping import (
    DryRunOption,
    Patience,
    ReasonOption,
    Scene,
    fall_back,
    hold_queued,
    put_request,
    queued_lines,
    record,
    require_switch,
    running_lines,
    scene,
    standing_lines,
    stop_without_files,
)

if TYPE_CHECKING:
    from tr11ops.rundir import RunDirectory
    from tr11ops.stop import Ending, Receipts, StopView
    from trainer.requests import Request

KILL_SCHEMA = 1
NOW_MINUTES = 1.0  # what does not end within this time after `--now` is cancelled


def kill(
    *,
    run: RunOption = None,
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
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="With --wait: give up after this long.")
    ] = 3600,
    why: ReasonOption = "",
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Save and stop a run, with all that is queued of it; nothing is lost.

    The running job saves a checkpoint at its next iteration and leaves. What waits is held at once, and starts again
    with `tr11 resume`. It works for another person's run too: rights to write in the run directory are enough.

    With --wait, a job that has not stopped within resilience.stop_within_minutes is cancelled, where you may do that.

    [bold]Examples[/bold]

      tr11 kill --reason "loss spike, rolling back" --wait

      tr11 kill --now --dry-run        what would be lost

      tr11 kill --release
    """
    if release:
        _release(scene(run, overrides, scheduler, is_releasing=True), why, yes, dry_run, as_json)
        return
    from tr11ops.holds import to_hold
    from tr11ops.stop import receipts, wait_for_end
    from trainer.requests import new_request, read_request

    place = scene(run, overrides, scheduler)
    directory, view = place.directory, place.look()
    require_switch(place, view)
    before = read_request(directory.kill_switch, "kill")
    is_new = before is None or (now and before.kind != "kill-now")
    for line in _lines(place, view, before, now):
        say(line)
    if dry_run:
        say("nothing was changed (--dry-run)")
        if as_json:
            typer.echo(json.dumps(_value("dry-run", directory, view), indent=1))
        return
    request = before
    is_stopped = True
    held: tuple[str, ...] = ()
    if is_new or to_hold(view.queued, place.user)[0]:
        agree("End the run now, without saving?" if now else "Set the kill switch?", yes)
        if is_new:
            request = new_request("kill-now" if now else "kill", place.user, why, directory.root)
            is_stopped = _set(place, view, request)
        held = hold_queued(place, view, why or "kill switch")
    assert request is not None
    endings: tuple[Ending, ...] = ()
    if wait and view.running:
        minutes = NOW_MINUTES if request.kind == "kill-now" else place.card.resilience.stop_within_minutes
        patience = Patience(timeout, minutes * 60, lambda: fall_back(place, view.running, request.id, minutes))
        endings = wait_for_end(directory, view.running, place.edge, patience, lambda text: say(f"  {text}"), request.id)
    code = max(_report(place, endings, as_json), 0 if is_stopped else 1)
    if not wait or all(ending.is_over for ending in endings):
        say(f"to let it go on: {place.command('resume')}")
    if as_json:
        answered = receipts(directory, request.id, view.attempts)
        action = "already-set" if not is_new else "set" if directory.kill_switch_is_set() else "asked-scheduler"
        typer.echo(json.dumps(_value(action, directory, view, endings, request, held, answered), indent=1))
    if wait and view.doubt:
        raise Refusal(f"it is not known whether anything still runs: {view.doubt}", exit_code=3)
    raise typer.Exit(code)


def _lines(place: Scene, view: StopView, before: Request | None, now: bool) -> list[str]:
    """What is there and what will happen, for a person."""
    what = "will end within seconds, unsaved" if now else "will save and leave"
    lines = [*running_lines(view, what), *queued_lines(view, place.user)]
    if view.doubt:
        lines.append(f"jobs:       unknown, the scheduler did not answer ({view.doubt}); the switch works without it")
    if view.is_idle:
        lines.append(
            "jobs:       nothing of this run is running or queued; launches are refused until the switch is released"
        )
    lines += standing_lines(view)
    if now:
        lines.append(f"lost:       {_loss(view)}")
    if before is not None:
        by = f" by {before.who}" if before.who else ""
        reason = f" ({before.why})" if before.why else ""
        end = ", to end without saving" if before.kind == "kill-now" else ""
        lines.append(f"the kill switch is already set{by}{reason}{end}: {place.directory.kill_switch}")
    return lines


def _loss(view: StopView) -> str:
    lost = view.lost_iterations
    if lost is None:
        return "not known: no iteration is on record"
    since = "the start" if view.checkpoint is None else f"global_step{view.checkpoint}"
    seconds = view.seconds_per_iteration
    pace = f", about {max(1, round(lost * seconds / 60))} min of training" if lost and seconds else ""
    return f"{lost} iterations since {since}{pace}"


def _set(place: Scene, view: StopView, request: Request) -> bool:
    """Set the kill switch; where the disk does not take it, stop what runs through the scheduler. False: not all is."""
    from trainer.requests import read_request

    directory, now = place.directory, request.kind == "kill-now"
    is_set = put_request(place, directory.kill_switch, request)
    found = read_request(directory.kill_switch, "kill")
    is_whole = is_set and found is not None and found.id == request.id
    if is_set:
        say(f"kill switch set: {directory.kill_switch}")
    # an empty switch makes it save and leave, which is all that is wanted but for an end without saving
    is_stopped = is_whole or (is_set and not now) or stop_without_files(place, view, now)
    data = {"kill_switch": str(directory.kill_switch), "request": request.id, "kind": request.kind, "set": is_set}
    record(directory, "kill-switch-set" if is_set else "stop-asked", request.why, data, request.who)
    return is_stopped


def _release(place: Scene, why: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    """What `tr11 resume` does; a switch alone is not enough where what waits was held with it."""
    from tr11ops.cli.resume import let_go_on

    was_set = place.directory.kill_switch_is_set()
    done = let_go_on(place, why, yes, dry_run)
    if not was_set:
        say(f"kill switch was not set: {place.directory.kill_switch}")
    if as_json:
        action = "not-set" if not was_set else "dry-run" if dry_run else "released"
        value = {**done.value(), "schema": KILL_SCHEMA, "action": action}
        typer.echo(json.dumps({**value, "kill_switch": str(place.directory.kill_switch)}, indent=1))
    done.leave()


def _report(place: Scene, endings: tuple[Ending, ...], as_json: bool) -> int:
    """Say how the jobs ended; returns the exit code."""
    code = 0
    for ending in endings:
        marker = ending.marker
        if not ending.is_over:
            text, fine = f"is still there: it did not end in time; `{place.command('status')}` shows it", False
        elif marker is None:
            look = place.command("status")
            text, fine = f"ended without a word of the trainer: the last checkpoint is what `{look}` shows", False
        else:
            saved = (
                "nothing to save"
                if marker.checkpoint_step is None
                else f"checkpoint global_step{marker.checkpoint_step}"
            )
            text, fine = f"ended ({marker.reason}) at iteration {marker.iteration}: {saved}", marker.reason != "error"
        code = code if fine else 1
        print(f"job {ending.job_id} {text}", file=sys.stderr if as_json else sys.stdout)
    return code


def _value(
    action: str,
    directory: RunDirectory,
    view: StopView,
    endings: tuple[Ending, ...] = (),
    request: Request | None = None,
    held: tuple[str, ...] = (),
    answered: Receipts | None = None,
) -> dict[str, Any]:
    return {
        "schema": KILL_SCHEMA,
        "action": action,
        "kind": request.kind if request else None,
        "request": request.id if request else None,
        "kill_switch": str(directory.kill_switch),
        "running": [job.job_id for job in view.running],
        "foreground": list(view.foreground),
        "queued_tasks": None if view.doubt else view.queued_tasks,
        "held": list(held),
        "iteration": view.iteration,
        "checkpoint": view.checkpoint,
        "iterations_at_risk": view.lost_iterations,
        "unknown": view.doubt or None,
        "receipts": receipts_value(answered) if answered else None,
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


def receipts_value(answered: Receipts) -> dict[str, Any]:
    """Receipts for a machine."""
    return {
        "given": [{"rank": rank, "host": host} for rank, host in answered.given],
        "missing": [{"rank": rank, "host": host} for rank, host in answered.missing],
    }
