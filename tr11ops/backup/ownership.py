"""Whose archive it is: a run's, known by its id. Two runs of one name do not mix their copies.

ARCHIVE/tr11-archive.json        the run's name, and its id since ids are made; written before the first byte
ARCHIVE/tr11-archive-id.json     the id, where the archive is older than ids and was adopted
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import MARKER_FILE, NO_ONE, Owner, marker_text
from tr11ops.base.errors import ArchivePermanentError
from tr11ops.rundir.copies import Receipt
from tr11ops.rundir.paths import short
from trainer.contract.documents import record_of_text

ID_FILE = "tr11-archive-id.json"
LARGEST_BYTES = 64 << 10


def owner_of(archive: Archive) -> Owner | None:
    """Who an archive says it belongs to; None where nothing was ever written. Raises ArchiveError."""
    marker = read_marker(archive, MARKER_FILE)
    if marker is None:
        return None
    if not marker.id and (later := read_marker(archive, ID_FILE)) is not None:
        return Owner(marker.run, later.id)
    return marker


def stranger_fault(address: str, owner: Owner | None, run: Owner) -> str:
    """Why a run may not write to an archive, in one line; "" when it may. Pure."""
    if owner is None:
        return ""
    if owner.run != run.run:
        return f"{address} is the archive of {owner.run!r}, not of {run.run!r}; name another place in [backup]"
    if not owner.id or not run.id or owner.id == run.id:
        return ""
    return (
        f"{address} is the archive of another run named {run.run!r} (id {short(owner.id)}, this one is "
        f"{short(run.id)}); "
        "name another place in [backup], or, if this run directory goes on with that run: tr11 backup adopt"
    )


def is_proven(receipts: Iterable[Receipt], known: Collection[str]) -> bool:
    """Whether an archive without an id is the run's beyond its name: empty, or it holds a
    checkpoint known here. Pure.

    `known`: identities of the checkpoints that are here, and of the copies on record.
    """
    listed = list(receipts)
    return not listed or any(receipt.identity in known for receipt in listed)


def unproven_fault(address: str, receipts: Collection[Receipt]) -> str:
    """What to say of an archive without an id in which nothing is known here."""
    steps = ", ".join(
        str(receipt.step) for receipt in sorted(receipts, key=lambda receipt: receipt.step)[:5]
    )
    return (
        f"{address} is older than run ids, and none of its copies (steps {steps}) is known here: whether it is this "
        "run's cannot be told. Look at it, then type: tr11 backup adopt"
    )


def give_id(archive: Archive, run: str, run_id: str) -> None:
    """Write the id into an archive that has none; nothing there is replaced. Raises ArchiveError."""
    archive.put(ID_FILE, marker_text(Owner(run, run_id)).encode("utf-8"))


def read_marker(archive: Archive, path: str) -> Owner | None:
    """What one of the two files says; None where there is none. Raises ArchiveError."""
    found = archive.look(path)
    if found is None:
        return None
    try:
        if found.bytes > LARGEST_BYTES:
            raise ValueError
        return record_of_text(Owner, b"".join(archive.read(path)))
    except ValueError:
        raise ArchivePermanentError(
            f"{archive.address}/{path} cannot be read; it names the run that the archive belongs to"
        ) from None


@dataclass
class RunMarker:
    """The marker of an archive that is no folder, read before the first byte; no one's is
    written without one.
    """

    archive: Archive
    owner: Owner

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # `put` may come back here
        self._is_ours = self.owner == NO_ONE

    def require(self) -> None:
        """Mark the archive as the run's, once. Raises ArchivePermanentError when it is another
        run's.
        """
        with self._lock:
            if self._is_ours:
                return
            found = read_marker(self.archive, MARKER_FILE)
            if found is None:
                self._is_ours = True
                try:
                    self.archive.put(MARKER_FILE, marker_text(self.owner).encode("utf-8"))
                except BaseException:
                    self._is_ours = False
                    raise
                return
            if found.run != self.owner.run:
                raise ArchivePermanentError(
                    f"{self.archive.address} is the archive of {found.run!r}, not of {self.owner.run!r}; "
                    "name another path in backup.url"
                )
            self._is_ours = True
