"""Whether the folders that the card names for copies are others than the run directory, on another
disk at best.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.backup.archives import folder_fault, folder_of, is_folder
from tr11ops.backup.overlap import overlap, same_device
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, refused, warning
from trainer.contract.record import Record


class ArchiveFacts(Record):
    """A folder of [backup]. `overlap`: how it overlaps with the run directory; `is_same_device`: on
    its file system.

    `fault`: why no round could use it now, "" where one could.
    """

    key: str
    folder: str
    overlap: str
    is_same_device: bool
    fault: str = ""


def look_at_archives(card: RunCard) -> tuple[ArchiveFacts, ...]:
    """The card's archives that are folders; what lies behind a network is not asked."""
    found = []
    for key in ("store", "url"):
        address = getattr(card.backup, key)
        if address is not None and is_folder(address):
            folder = folder_of(address)
            is_same = same_device(folder, card.paths)
            shared = overlap(folder, card.paths)
            if shared:
                fault = ""
            else:
                fault = folder_fault(key, card)
            found.append(ArchiveFacts(f"backup.{key}", str(folder), shared, is_same, fault))
    return tuple(found)


def archive_checks(archives: tuple[ArchiveFacts, ...]) -> Iterator[PreflightCheck]:
    """Refuses an archive that is the run directory by whatever name, warns of one on the same file
    system.
    """
    for archive in archives:
        if archive.overlap:
            rule = f"{archive.folder}: {archive.overlap}, so a copy there is no copy"
            yield refused(archive.key, rule, "name a folder of another file system", 2)
        elif archive.fault:
            yield warning(archive.key, f"nothing can be copied there: {archive.fault}")
        elif archive.is_same_device:
            rule = f"{archive.folder} lies on the file system of the run directory: one fault takes both"
            yield warning(archive.key, rule, "name a folder of another file system")
