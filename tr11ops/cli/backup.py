"""`tr11 backup`: copies of checkpoints, and how they stand."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tr11ops.backup.archive_round import plan_of, rows_of
from tr11ops.backup.archives import folder_fault
from tr11ops.backup.base import Archive
from tr11ops.backup.data_sets import data_states
from tr11ops.backup.drill import choose_copy, run_drill
from tr11ops.backup.folder import Owner
from tr11ops.backup.ledger import read_archive_state
from tr11ops.backup.ownership import give_id, owner_of
from tr11ops.backup.round_values import BackupContext, RoundRequest
from tr11ops.backup.screen import (
    ArchiveView,
    BackupStatus,
    receipt_line,
    status_lines,
    status_value,
)
from tr11ops.backup.service import rebuild
from tr11ops.backup.survey import list_receipts
from tr11ops.base.errors import Refusal, Unobserved, WrongUsage
from tr11ops.base.units import duration, size
from tr11ops.cli.backup_restore import restore
from tr11ops.cli.backup_run import (
    ArchiveOption,
    KindOption,
    StepsArgument,
    archive_errors,
    asked_of,
    open_backup,
    planned_copies,
    read_back,
    records_of,
    require_archives,
    run_copies,
)
from tr11ops.cli.common import directory_of, in_time, require_directory, say
from tr11ops.cli.runner import DRY_RUN, JSON, YES, Change, Outcome, RunContext, carry_out
from tr11ops.logs.lines import plain
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.claims import ClaimTaken, copy_claims
from tr11ops.rundir.copies import read_copies, read_drill
from tr11ops.rundir.paths import adopt_run_id, require_run_id, run_id, short
from trainer.contract.documents import document

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
        owner, fault = copy_claims(directory, name).holder(now), folder_fault(name, card)
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


# ----------------------------------------------------------------------------- drill
def drill(
    context: Annotated[RunContext, JSON],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="store|url", help="Default: wherever the newest whole copy is."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            "--into",
            metavar="DIR",
            help="Where there is room; default: the run directory.",
        ),
    ] = None,
) -> Outcome:
    """Try a restore: the newest verified whole copy, into a fresh folder, read by the trainer, then
    removed.

    The outcome and its date go on record; `tr11 backup status` shows them.

    Examples:
      tr11 backup drill
      tr11 backup drill --from url --output /scratch/room
    """
    card = context.card
    archives = require_archives(
        card, [source] if source else None, [1], "--from" if source else None
    )
    copy = choose_copy((c for c in records_of(card) if c.archive in archives), source)
    if copy is None:
        raise Refusal(
            f"there is no whole, sound copy in {' or '.join(archives)} yet; see tr11 backup status"
        )
    if into is not None and not into.is_dir():
        raise WrongUsage(f"--output {into}: there is no such folder")
    try:
        with (
            archive_errors(),
            open_backup(card, context.as_json) as backup,
            closing(backup.opened(copy.archive)) as archive,
        ):
            done = run_drill(backup, archive, copy, into)
    except ClaimTaken as taken:
        raise Refusal(f"a drill goes on already: {taken}") from None
    result = "passed" if done.passed else "FAILED"
    took = f"{size(done.bytes)} in {duration(done.seconds)}"
    return Outcome(
        document(done),
        [f"drill {result}: step {done.step} from the {done.archive}, {took}: {done.message}"],
        exit_code=0 if done.passed else 1,
    )


# ----------------------------------------------------------------------------- adopt
def adopt(
    context: Annotated[RunContext, YES, DRY_RUN],
    archive: Annotated[str, typer.Argument(metavar="store|url", help="Which archive of the card.")],
) -> Outcome:
    """Say that an archive is this run's: one that is older than run ids, or that of a run directory
    that was lost.

    An archive knows its run by the id in state/run.json, not by name. One without an id gets this
    run's; a run directory that was begun again takes the archive's id, unless it has copies of its
    own elsewhere.

    Examples:
      tr11 backup adopt store
    """
    card, directory = context.seen(missing=None)
    require_archives(card, [archive], None, "ARCHIVE")
    context.require_mounted()
    require_directory(directory)
    try:
        with open_backup(card, False) as backup, closing(backup.opened(archive)) as opened:
            return carry_out(context, _adoption(backup, opened))
    except (OSError, ValueError) as error:
        raise Refusal(f"nothing was changed: {error}") from None


def _adoption(backup: BackupContext, archive: Archive) -> Change:
    """What would be written, there or here. Raises Refusal where the archive is another run's."""
    name, owner, ours = backup.card.run.name, owner_of(archive), run_id(backup.directory)

    def apply() -> Outcome:
        if owner is not None and owner.id:
            adopt_run_id(backup.directory, name, owner.id)
            facts = {"id": owner.id, "before": ours}
            backup.journal.write("run-id-adopted", archive.address, facts)
        else:
            given = require_run_id(backup.directory, name)
            give_id(archive, name, given)
            facts = {"archive": archive.name, "id": given}
            backup.journal.write("archive-adopted", archive.address, facts)
        return Outcome(lines=("done; next: tr11 backup run",))

    if owner is None or (owner.id and owner.id == ours):
        why = "it is this run's"
        if owner is None:
            why = "nothing was copied there yet"
        nothing = Outcome(lines=(f"{archive.address}: nothing to do: {why}",))
        return Change((), "", apply, nothing, nothing=nothing, unchanged="")
    _require_adoptable(backup, archive, owner, ours)
    if owner.id:
        line = f"this run directory goes on as run {short(owner.id)}"
        if ours:
            line += f", no more as {short(ours)}"
    else:
        line = f"{archive.address} gets the id of this run"
        if ours:
            line += f", {short(ours)}"
    lines = [*map(receipt_line, list_receipts(archive, backup.card.run.variant)), line]
    return Change(lines, "Is it this run's?", apply, is_answer=True)


def _require_adoptable(backup: BackupContext, archive: Archive, owner: Owner, ours: str) -> None:
    if owner.run != backup.card.run.name:
        raise Refusal(
            f"{archive.address} is the archive of {owner.run!r}; name another place in [backup]"
        )
    copies = read_copies(backup.directory, every_variant=True)
    elsewhere = sorted({copy.address for copy in copies if copy.address != archive.address})
    if owner.id and ours and elsewhere:
        raise Refusal(
            f"{archive.address} is the archive of another run of this name, and this run has copies in {elsewhere[0]}: "
            "they are two runs; name another place in [backup]"
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
