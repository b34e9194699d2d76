"""`tr11 checkpoint-now`: a checkpoint at the next step of a running training, which goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from tr11ops.cli.asking import ask_training, await_answer, require_answer, seconds_to_wait, training_to_ask
from tr11ops.cli.common import DryRunOption, YesOption, agree, say, timeout_option
from tr11ops.cli.context import JSON, SCHEDULER, RunContext, emit
from tr11ops.cli.stopping import ReasonOption
from trainer.contract.requests import new_request, read_request

CHECKPOINT_NOW_SCHEMA = 1


def checkpoint_now(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the checkpoint, and name its step.")] = False,
    timeout: Annotated[float | None, timeout_option("With --wait: give up after this long.")] = None,
    why: ReasonOption = "",
) -> None:
    """Save a checkpoint at the next step, and train on. The receipt is the checkpoint's step.

    Examples:
      tr11 checkpoint-now --wait --reason "before the maintenance"
    """
    run, view = training_to_ask(context, "saved", "will save and train on")
    path = run.directory.paths.checkpoint_request
    before = read_request(path, "checkpoint")
    if before is not None:
        say(f"a checkpoint has been asked for already, by {before}")
    if dry_run:
        say("nothing was changed (--dry-run)")
        return
    request = before
    if request is None:
        agree("Ask for a checkpoint?", yes)
        request = new_request("checkpoint", run.user, why, run.directory.root)
        ask_training(run, path, request, "a checkpoint", "checkpoint-now", {})
        say(f"asked for a checkpoint at the next step; `{run.command('status')}` shows it when it is there")
    answer = await_answer(run, view, request, seconds_to_wait(run, timeout)) if wait else None
    if context.as_json:
        value = {"schema": CHECKPOINT_NOW_SCHEMA, "request": request.id, "answered": answer is not None}
        emit({**value, "checkpoint": answer.step if answer else None})
    if wait:
        saved = require_answer(run, answer, "checkpoint")
        if not context.as_json:
            typer.echo(f"saved: global_step{saved.step}; the training goes on")
