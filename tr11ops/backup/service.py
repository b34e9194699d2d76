"""One round of backup: each archive by itself gets its due copies, the logs, and its share of being
read again.

An archive that is unreachable, full or in another process's hands does not keep the others from
theirs. Everything that a round did is at the destination and on record before the next thing
begins, so a kill at any point repeats and loses nothing: the next round goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.backup.archive_round import ArchiveRound, summarise
from tr11ops.backup.claim import ArchiveLock, ArchiveLocked
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
from tr11ops.rundir.copies import read_copies
from tr11ops.rundir.identity import require_run_id


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
        with ArchiveLock(context.directory, archive.name, context.stop, context.clock) as turn:
            work = ArchiveRound(context, request, archive, turn, tally)
            try:
                work.run()
            except (ArchiveError, CopyError, ArchiveLocked, OSError, ValueError) as error:
                tally.note_fault(error)
            if not turn.lost:
                work.keep()
    except ArchiveLocked as taken:
        tally.busy = str(taken)
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
            after_round(before, tally.archive, address, context.clock(), copies, tally.faults[0]),
        )
        summarise(context.directory)
    except (OSError, ValueError) as error:
        tally.faults.append(cause(error))
