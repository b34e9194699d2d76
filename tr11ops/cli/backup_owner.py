"""Which copies of a step there are, and whose an archive is: `tr11 backup restore --list` and `tr11
backup adopt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.backup.ownership import give_id, owner_of
from tr11ops.backup.restorable import Candidate, candidates
from tr11ops.backup.survey import list_receipts
from tr11ops.base.errors import ArchiveError, Refusal
from tr11ops.base.units import MINUTE, size, timestamp
from tr11ops.cli.backup_run import open_backup, require_archives
from tr11ops.cli.common import require_directory
from tr11ops.cli.runner import DRY_RUN, YES, Change, Outcome, RunContext, carry_out
from tr11ops.rundir.copies import read_copies
from tr11ops.rundir.paths import adopt_run_id, require_run_id, run_id, short

if TYPE_CHECKING:
    from tr11ops.backup.base import Archive
    from tr11ops.backup.folder import Owner
    from tr11ops.backup.round_values import BackupContext
    from tr11ops.runcard.card import RunCard

SCHEMA = 1


# ----------------------------------------------------------------------------- restore --list
def list_candidates(card: RunCard, step: int, source: str | None, as_json: bool) -> Outcome:
    """Every copy of a step, of any run, in the archives that are meant. Raises Refusal where
    none answers.
    """
    names = require_archives(card, [source] if source else None, [step], "--from")
    found: list[tuple[str, Candidate]] = []
    faults = []
    with open_backup(card, as_json) as backup:
        for name in names:
            try:
                with closing(backup.opened(name)) as archive:
                    ours = run_id(backup.directory)
                    listed = candidates(
                        archive,
                        owner_of(archive),
                        run=card.run.name,
                        run_id=ours,
                        variant=card.run.variant,
                    )
                    found += [(archive.name, one) for one in listed if one.receipt.step == step]
            except (ArchiveError, OSError, ValueError) as error:
                faults.append(f"{name}: {error}")
    document = {"schema": SCHEMA, "step": step, "copies": [_value(*entry) for entry in found]}
    code, lines = 0, list(_table(found))
    if not found:
        code, lines = 1, [f"no copy of step {step} with a receipt in {' or '.join(names)}"]
    if faults:
        code = 3
    return Outcome(document, lines, tuple(faults), exit_code=code)


def _table(found: list[tuple[str, Candidate]]) -> Iterator[str]:
    yield f"{'IDENTITY':<10}{'COPY':<9}{'IN':<9}{'SIZE':>10}  {'COPIED (UTC)':<18}RUN"
    for archive, one in sorted(found, key=lambda entry: (entry[1].receipt.identity, entry[0])):
        receipt = one.receipt
        if one.is_ours:
            whose = "this run"
        else:
            whose = f"another: {one.run_id[:8] or receipt.run}"
        yield (
            f"{receipt.identity[:8]:<10}{receipt.kind:<9}{archive[:8]:<9}{size(receipt.bytes):>10}  "
            f"{_day(receipt.copied):<18}{whose}"
        )


def _day(moment: float) -> str:
    return timestamp(moment, UTC, MINUTE)


def _value(archive: str, one: Candidate) -> dict[str, object]:
    receipt = one.receipt
    return {
        "archive": archive,
        "identity": receipt.identity,
        "kind": receipt.kind,
        "copied": receipt.copied,
        "bytes": receipt.bytes,
        "location": receipt.location,
        "run": receipt.run,
        "run_id": one.run_id or None,
        "ours": one.is_ours,
    }


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
        why = "nothing was copied there yet" if owner is None else "it is this run's"
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
    lines = [*_receipt_lines(backup, archive), line]
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


def _receipt_lines(backup: BackupContext, archive: Archive) -> Iterator[str]:
    for receipt in list_receipts(archive, backup.card.run.variant):
        yield (
            f"  step {receipt.step:>7}  {receipt.kind:<8} {receipt.identity[:8]}  copied {_day(receipt.copied)}"
        )
