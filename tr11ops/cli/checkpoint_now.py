"""`tr11 checkpoint-now`: a checkpoint at the next step of a running training, which goes on."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tr11ops.cli.common import JsonOption, Refusal, RunOption, SchedulerOption, SetOption, YesOption, agree, say
from tr11ops.cli.stopping import (
    DryRunOption,
    ReasonOption,
    await_answer,
    put_request,
    record,
    scene,
    standing_lines,
)

CHECKPOINT_NOW_SCHEMA = 1


def checkpoint_now(
    *,
    run: RunOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the checkpoint, and name its step.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="With --wait: give up after this long."),
    ] = None,
    why: ReasonOption = "",
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Save a checkpoint at the next step, and train on. The receipt is the checkpoint's step.

    [bold]Examples[/bold]

      tr11 checkpoint-now --wait --reason "before the maintenance"
    """
    from trainer.requests import new_request, read_request

    place = scene(run, overrides, scheduler)
    paths, view = place.directory.paths, place.look()
    if not (view.attempts or view.foreground or view.doubt):
        raise Refusal(
            f"nothing of this run is training, so nothing can be saved; look with `{place.command('status')}`"
        )
    before = read_request(paths.checkpoint_request, "checkpoint")
    for line in [*(f"running:    attempt {name}: will save and train on" for name in view.attempts),
                 *standing_lines(view)]:  # fmt: skip
        say(line)
    if before is not None:
        say(f"a checkpoint has been asked for already, by {before}")
    if dry_run:
        say("nothing was changed (--dry-run)")
        return
    request = before
    if request is None:
        agree("Ask for a checkpoint?", yes)
        request = new_request("checkpoint", place.user, why, place.directory.root)
        if not put_request(place, paths.checkpoint_request, request):
            raise Refusal("a checkpoint could not be asked for: make room first, runbooks/filesystem-full.md")
        record(place.directory, "checkpoint-now", why, {"request": request.id}, place.user)
        say(f"asked for a checkpoint at the next step; `{place.command('status')}` shows it when it is there")
    answer = None
    if wait:
        seconds = place.card.resilience.stop_within_minutes * 60 if timeout is None else timeout
        answer = await_answer(place, view, request, seconds)
    if as_json:
        value = {"schema": CHECKPOINT_NOW_SCHEMA, "request": request.id, "answered": answer is not None}
        typer.echo(json.dumps({**value, "checkpoint": answer.step if answer else None}, indent=1))
    if answer is not None and answer.step is not None and not as_json:
        typer.echo(f"saved: global_step{answer.step}; the training goes on")
    if wait and (answer is None or answer.step is None):
        raise Refusal(answer.message if answer else f"no checkpoint came in time; look with `{place.command('logs')}`")
