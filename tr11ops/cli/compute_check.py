"""`tr11 compute-check`: one check of every rank's arithmetic in a running training, now."""

from __future__ import annotations

from typing import Annotated

import typer

from tr11ops.base.units import duration
from tr11ops.cli.common import DryRunOption, Refusal, YesOption, agree, say, timeout_option
from tr11ops.cli.context import SCHEDULER, RunContext
from tr11ops.cli.stopping import (
    ReasonOption,
    ask_training,
    await_answer,
    require_training,
    run_to_stop,
    seconds_to_wait,
    standing_lines,
)
from trainer.contract.requests import new_request


def compute_check(
    context: Annotated[RunContext, SCHEDULER],
    *,
    timeout: Annotated[float | None, timeout_option("Give up waiting after this long.")] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    why: ReasonOption = "",
) -> None:
    """Check every rank's arithmetic after the next step: one micro batch is computed twice and compared bit for bit.

    The training goes on, and no bit of it changes. It costs about two steps of one micro batch. Where results differ,
    the answer names rank and node, the exit code is 1, and `tr11 status` shows the finding until the node is excluded.

    Examples:
      tr11 compute-check --reason "the loss left its course"
    """
    run = run_to_stop(context)
    view = run.look()
    require_training(view, run, "checked")
    what = "one micro batch is computed twice after the next step"
    for line in [*(f"running:    attempt {name}: {what}" for name in view.attempts), *standing_lines(view)]:
        say(line)
    if dry_run:
        say("nothing was changed (--dry-run)")
        return
    agree("Ask for a check?", yes)
    request = new_request("compute-check", run.user, why, run.directory.root)
    ask_training(run, run.directory.paths.check_request, request, "a check", "compute-check", {})
    seconds = seconds_to_wait(run, timeout)
    say(f"asked for; waiting for the answer, {duration(seconds)} at most")
    answer = await_answer(run, view, request, seconds)
    if answer is None or answer.step is None:
        raise Refusal(answer.message if answer else f"no answer came in time; look with `{run.command('logs')}`")
    typer.echo(f"checked: {answer.message}")
