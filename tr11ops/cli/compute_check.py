"""`tr11 compute-check`: one check of every rank's arithmetic in a running training, now."""

from __future__ import annotations

from typing import Annotated

import typer

from tr11ops.base.units import duration
from tr11ops.cli.asking import ask_training, await_answer, require_answer, seconds_to_wait, training_to_ask
from tr11ops.cli.common import DryRunOption, YesOption, agree, say, timeout_option
from tr11ops.cli.context import SCHEDULER, RunContext
from tr11ops.cli.stopping import ReasonOption
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
    run, view = training_to_ask(context, "checked", "one micro batch is computed twice after the next step")
    if dry_run:
        say("nothing was changed (--dry-run)")
        return
    agree("Ask for a check?", yes)
    request = new_request("compute-check", run.user, why, run.directory.root)
    ask_training(run, run.directory.paths.check_request, request, "a check", "compute-check", {})
    seconds = seconds_to_wait(run, timeout)
    say(f"asked for; waiting for the answer, {duration(seconds)} at most")
    answer = require_answer(run, await_answer(run, view, request, seconds), "answer")
    typer.echo(f"checked: {answer.message}")
