"""`tr11 backup`: copies of checkpoints, and how they stand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.backup.archive_round import plan_of, rows_of
from tr11ops.backup.archives import folder_fault
from tr11ops.backup.data_sets import data_states
from tr11ops.backup.ledger import read_archive_state
from tr11ops.backup.round_values import RoundRequest, owner_of
from tr11ops.backup.screen import ArchiveView, BackupStatus, status_lines, status_value
from tr11ops.backup.service import rebuild
from tr11ops.base.errors import Unobserved
from tr11ops.cli.backup_owner import adopt
from tr11ops.cli.backup_restore import drill, restore
from tr11ops.cli.backup_run import (
    ArchiveOption,
    KindOption,
    StepsArgument,
    asked_of,
    open_backup,
    planned_copies,
    read_back,
    require_archives,
    run_copies,
)
from tr11ops.cli.common import directory_of, in_time, require_directory, say
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.logs.lines import plain
from tr11ops.rundir.copies import read_copies, read_drill

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

SCHEMA = 1


# ----------------------------------------------------------------------------- status
def status(
    context: Annotated[RunContext, JSON],
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="First make the records again from the receipts at the destination."
        ),
    ] = False,
) -> Outcome:
    """For each archive: its copies, the last success, how far re-reading is, what is damaged, what
    is due, who copies.

    Goes by what is on record, and looks whether the store is there; `--rebuild` asks the
    destination.

    Exit code 0: fine; 1: a copy is damaged, the last round failed, or the store is not there; 3:
    the records cannot be read.

    Examples:
      tr11 backup status
      tr11 backup status --rebuild
    """
    card, directory = context.seen(missing=None)
    archives = require_archives(card, None, None, option=None)
    context.require_mounted()
    require_directory(directory)
    code = 0
    if rebuild:
        code = _rebuild(card, archives, context.as_json)
    try:
        screen = in_time(lambda: _screen(card, archives))
    except (OSError, ValueError) as error:
        raise Unobserved(f"what is copied is not known: {error}; try --rebuild") from None
    if screen.needs_person:
        code = max(code, 1)
    return Outcome(status_value(screen), map(plain, status_lines(screen)), exit_code=code)


def _rebuild(card: RunCard, archives: tuple[str, ...], is_quiet: bool) -> int:
    with open_backup(card, is_quiet) as backup:
        done = rebuild(backup, archives)
    for tally in done.tallies:
        for fault in tally.faults:
            say(f"{tally.archive}: {fault}")
        if tally.busy:
            say(f"{tally.archive}: {tally.busy}; its records were left to it")
    return done.exit_code


def _screen(card: RunCard, archives: tuple[str, ...]) -> BackupStatus:
    directory, now = directory_of(card), time.time()
    rows, copies = rows_of(directory), read_copies(directory)
    views = []
    for name in archives:
        state = read_archive_state(directory, name)
        ours = tuple(
            c for c in copies if c.archive == name and (state is None or c.address == state.address)
        )
        plan = plan_of(card, rows, ours, RoundRequest((name,)))
        if state is not None:
            address = state.address
        else:
            address = str(getattr(card.backup, name))
        owner, fault = owner_of(directory, name, now), folder_fault(name, card)
        views.append(
            ArchiveView(
                name,
                address,
                state=state,
                copies=ours,
                due=plan.due,
                owner=owner,
                fault=fault,
                data=data_states(card, ours, name),
            )
        )
    return BackupStatus(
        card.run.name,
        card.run.variant,
        now=now,
        archives=tuple(views),
        drill=read_drill(directory),
        reread_days=card.backup.reread_days,
    )


# ----------------------------------------------------------------------------- the commands
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
) -> Outcome:
    """What the next round copies where and why, how long that takes, what is copied already, and
    what is not copied.

    Goes by what is on record; no bucket is asked. Exit code 1: a folder that copies should go to
    cannot be used.

    Examples:
      tr11 backup plan
      tr11 backup plan 12300 --to store
    """
    card, _ = context.seen(missing=None)
    archives = require_archives(card, to, steps)
    context.require_mounted()
    return planned_copies(card, asked_of(steps, kind), archives)


app.command("run")(run_copies)
app.command("verify")(read_back)
app.command("restore")(restore)
app.command("drill")(drill)
app.command("status")(status)
app.command("adopt")(adopt)
