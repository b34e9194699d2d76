"""`tr11 checkpoint-now`: a checkpoint at the next step of a running training, which goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from tr11ops.cli.common import DryRunOption, Refusal, YesOption, agree, say, timeout_option
from tr11ops.cli.context import JSON, SCHEDULER, RunContext, emit
from tr11ops.cli.stopping import (
    ReasonOption,
    ask_training,
    await_answer,
    require_training,
    run_to_stop,
    seconds_to_wait,
    standing_lines,
)
from trainer.contract.requests import new_request, read_request

CHECKPOINT_NOW_SCHEMA = 1


def checkpoint_now(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the checkpoint, and name its step.")] = False,
    timeout: Annotated[
        float | None,
        timeout_option("With --wait: give up after this long."),
    ] = None,
    why: ReasonOption = "",
) -> None:
    """Save a checkpoint at the next step, and train on. The receipt is the checkpoint's step.

    Examples:
      tr11 checkpoint-now --wait --reason "before the maintenance"
    """
    run = run_to_stop(context)
    paths, view = run.directory.paths, run.look()
    require_training(view, run, "saved")
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
        request = new_request("checkpoint", run.user, why, run.directory.root)
        ask_training(run, paths.checkpoint_request, request, "a checkpoint", "checkpoint-now", {})
        say(f"asked for a checkpoint at the next step; `{run.command('status')}` shows it when it is there")
    answer = None
    if wait:
        seconds = seconds_to_wait(run, timeout)
        answer = await_answer(run, view, request, seconds)
    if context.as_json:
        value = {"schema": CHECKPOINT_NOW_SCHEMA, "request": request.id, "answered": answer is not None}
        emit({**value, "checkpoint": answer.step if answer else None})
    if answer is not None and answer.step is not None and not context.as_json:
        typer.echo(f"saved: global_step{answer.step}; the training goes on")
    if wait and (answer is None or answer.step is None):
        raise Refusal(answer.message if answer else f"no checkpoint came in time; look with `{run.command('logs')}`")
