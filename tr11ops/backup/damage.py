"""Damage of a copy goes on record no matter who found it, a restore and a drill too: so the next
round repairs it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from tr11ops.backup.archive_round import summarise
from tr11ops.backup.base import Archive
from tr11ops.rundir.copies import CopyRecord, Receipt, latest_record, write_copy
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory


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
    return note_record(directory, journal, known, faults, why)


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
