"""One round of backup: each archive by itself gets its due copies, the logs, and its share of being
read again.

An archive that is unreachable, full or in another process's hands does not keep the others from
theirs. Everything that a round did is at the destination and on record before the next thing
begins, so a kill at any point repeats and loses nothing: the next round goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tr11ops.backup.archive_round import ArchiveRound, summarise
from tr11ops.backup.base import Archive
from tr11ops.backup.ledger import after_round, last_state, write_archive_state
from tr11ops.backup.round_values import (
    CARDS_ARCHIVES,
    ArchiveTally,
    BackupContext,
    RoundRequest,
    RoundResult,
)
from tr11ops.backup.survey import forget_unreadable
from tr11ops.base.errors import ArchiveError, CopyError, CopyStopped
from tr11ops.base.observed import cause
from tr11ops.rundir.claims import ClaimTaken, CopyLock
from tr11ops.rundir.copies import CopyRecord, Receipt, latest_record, read_copies, write_copy
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, require_run_id

# Damage of a copy goes on record no matter who found it, a restore and a drill too: so the next
# round repairs it.


def note_damage(
    directory: RunDirectory,
    journal: Journal,
    archive: Archive,
    receipt: Receipt,
    faults: Mapping[str, str],
    why: str,
) -> bool:
    """Put files of a copy on record as damaged, with what is wrong with each.

    False for a copy that has no receipt, and so no record either. Raises OSError, ValueError.
    """
    if not receipt.verified:
        return False
    known = latest_record(directory, CopyRecord.of(receipt, archive.name, archive.address))
    return note_record(directory, journal, copy=known, faults=faults, why=why)


def note_record(
    directory: RunDirectory, journal: Journal, copy: CopyRecord, faults: Mapping[str, str], why: str
) -> bool:
    """The same of a copy on record. Raises OSError, ValueError."""
    write_copy(directory, replace(copy, damaged=tuple(sorted({*copy.damaged, *faults}))))
    said = {
        "archive": copy.archive,
        "step": copy.step,
        "kind": copy.kind,
        "location": copy.location,
    }
    journal.write(
        "backup-damaged", f"{why}: {next(iter(faults.values()))}", {**said, "files": dict(faults)}
    )
    summarise(directory)
    return True


def run_round(context: BackupContext, request: RoundRequest) -> RoundResult:
    """One round at all its archives, one after another. Raises nothing for what an archive does."""
    tallies = []
    for name in request.archives:
        tallies.append(_one_archive(context, request, name))
        if context.stop.is_set():
            break
    return RoundResult(tuple(tallies))


def rebuild(context: BackupContext, names: Sequence[str]) -> RoundResult:
    """Make the records again from the receipts at the destination; no file is read, none is copied.
    Raises OSError.
    """
    forget_unreadable(context.directory)
    return run_round(
        context, RoundRequest(tuple(names), copies=False, logs=False, reading="none", why="rebuild")
    )


# ----------------------------------------------------------------------------- one archive
def _one_archive(context: BackupContext, request: RoundRequest, name: str) -> ArchiveTally:
    tally = ArchiveTally(name)
    try:
        require_run_id(context.directory, context.card.run.name)
        archive = context.opened(name)
    except (ArchiveError, CopyStopped, OSError, ValueError) as error:
        tally.note_fault(error)
        if tally.faults:
            _keep_unopened(context, tally)
        return tally
    tally.archive, tally.address = archive.name, archive.address
    try:
        with CopyLock(context.directory, archive.name, context.stop, context.clock) as turn:
            work = ArchiveRound(context, request, archive=archive, lock=turn, tally=tally)
            try:
                work.run()
            except (ArchiveError, CopyError, ClaimTaken, OSError, ValueError) as error:
                tally.note_fault(error)
            if not turn.lost:
                work.keep()
    except ClaimTaken as taken:
        tally.busy = taken.at_work
    except (OSError, ValueError) as error:
        tally.note_fault(error)
    finally:
        archive.close()
    return tally


def _keep_unopened(context: BackupContext, tally: ArchiveTally) -> None:
    """Put on record that an archive of the card could not even be opened."""
    if tally.archive not in CARDS_ARCHIVES:
        return
    try:
        before = last_state(context.directory, tally.archive)
        address = tally.address or (before.address if before is not None else "")
        copies = [copy for copy in read_copies(context.directory) if copy.archive == tally.archive]
        write_archive_state(
            context.directory,
            after_round(
                before,
                tally.archive,
                address=address,
                now=context.clock(),
                copies=copies,
                fault=tally.faults[0],
            ),
        )
        summarise(context.directory)
    except (OSError, ValueError) as error:
        tally.faults.append(cause(error))
