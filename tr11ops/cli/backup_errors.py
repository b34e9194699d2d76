"""What the commands that read an archive do about its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tr11ops.backup.damage import note_damage
from tr11ops.base.errors import ArchiveError, ArchiveUnavailable, CopyError, Refusal

if TYPE_CHECKING:
    from tr11ops.backup.base import Archive
    from tr11ops.backup.round_values import BackupContext
    from tr11ops.base.errors import CopyDamaged
    from tr11ops.rundir.copies import Receipt


def recorded(backup: BackupContext, archive: Archive, receipt: Receipt, error: CopyDamaged) -> str:
    """Put damage of a copy on record, so that the next round repairs it; returns what to say of that."""
    if not backup.directory.exists:
        return ""
    try:
        faults = {error.path: error.fault}
        is_noted = note_damage(backup.directory, backup.journal, archive, receipt, faults, "found by a restore")
    except (OSError, ValueError) as failure:
        return f"; it could not be put on record: {failure}"
    return "; the damage is on record, and tr11 backup run repairs it while the checkpoint is here" if is_noted else ""


@contextmanager
def archive_errors() -> Iterator[None]:
    """Errors of archives and copies as one line, each with its exit code."""
    try:
        yield
    except ArchiveError as error:
        raise Refusal(str(error), exit_code=3 if isinstance(error, ArchiveUnavailable) else 1) from None
    except CopyError as error:
        raise Refusal(str(error)) from None
    except ValueError as error:
        raise Refusal(f"{error}; restore from another copy") from None
