"""`tr11 backup`: copies of checkpoints and logs on other file systems, proven by reading them back."""

from __future__ import annotations

from typing import Annotated

import typer

from tr11ops.cli.backup_owner import adopt
from tr11ops.cli.backup_plan import show_plan
from tr11ops.cli.backup_restore import drill, restore
from tr11ops.cli.backup_run import (
    ArchiveOption,
    KindOption,
    StepsArgument,
    asked_of,
    read_back,
    require_archives,
    run_copies,
)
from tr11ops.cli.backup_status import status
from tr11ops.cli.context import JSON, RunContext

SCHEMA = 1

app = typer.Typer(
    name="backup",
    help="""Copies of checkpoints: plan, run, verify, restore, drill, status. Nothing in an archive is ever removed.

    Examples:
      tr11 backup plan
      tr11 backup run
      tr11 backup restore latest
    """,
    no_args_is_help=True,
)


@app.command("plan")
def plan(
    context: Annotated[RunContext, JSON],
    steps: StepsArgument = None,
    to: ArchiveOption = None,
    kind: KindOption = None,
) -> None:
    """What the next round copies where and why, how long that takes, what is copied already, and what is not copied.

    Goes by what is on record; no bucket is asked. Exit code 1: a folder that copies should go to cannot be used.

    Examples:
      tr11 backup plan
      tr11 backup plan 12300 --to store
    """
    card, _ = context.seen(missing=None)
    archives = require_archives(card, to, steps)
    context.require_mounted()
    show_plan(card, asked_of(steps, kind), archives, context.as_json)


app.command("run")(run_copies)
app.command("verify")(read_back)
app.command("restore")(restore)
app.command("drill")(drill)
app.command("status")(status)
app.command("adopt")(adopt)
