"""Opening an archive: the card's store or url, or any folder or address that a person names."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import FolderArchive
from tr11ops.backup.overlap import overlap_fault
from tr11ops.base.deadline import within
from tr11ops.base.errors import ArchiveError, ArchivePermanentError, Late
from tr11ops.rundir.copies import read_copies
from tr11ops.rundir.identity import run_id
from tr11ops.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

FILE_SCHEMES = ("file://", "local://")
ANSWER_SECONDS = 10.0  # for a file system that is only looked at


def open_archive(name: str, card: RunCard) -> Archive:
    """The archive "store" or "url" of the card, or the one at an address: a folder, or an address
    that fsspec knows.

    An archive that is not the card's has a name of its own, made from its address, so that its
    copies have records of their own. Raises ArchiveError when it cannot be reached or is another
    run's; ArchivePermanentError when the card lacks it.
    """
    section = card.backup
    address = {"store": section.store, "url": section.url}.get(name, name)
    if address is None:
        raise ArchivePermanentError(
            f"backup.{name} is not set in the run card; set it, or name an address"
        )
    key = archive_key(address, card)
    if is_folder(address):
        folder = folder_of(address)
        fault = overlap_fault(
            f"backup.{key}" if key in ("store", "url") else "--to", folder, card.paths
        )
        if fault:
            raise ArchivePermanentError(fault)
        has_copies = _has_copies(card, key, str(folder))
        return FolderArchive(
            folder, key, card.run.name, has_copies=has_copies, run_id=_run_id(card)
        )
    from tr11ops.backup.remote import open_remote

    # another bucket, the same account
    is_alike = section.url is not None and _scheme(section.url) == _scheme(address)
    credentials = None
    if section.credentials_file and is_alike:
        credentials = Path(section.credentials_file)
    remote: Archive = open_remote(
        address,
        section.options if is_alike else {},
        credentials,
        key,
        card.run.name,
        run_id=_run_id(card),
    )
    return remote


def folder_fault(name: str, card: RunCard) -> str:
    """Why a round could not use this archive, if it is a folder: what `open_archive` says, or that
    it does not answer.

    "" when nothing speaks against it, and for an address behind a network, which is not asked.
    """
    address = {"store": card.backup.store, "url": card.backup.url}.get(name, name)
    if address is None or not is_folder(address):
        return ""
    try:
        # a dead mount point hangs for good
        within(ANSWER_SECONDS, lambda: open_archive(name, card).close())
    except Late:
        return f"{archive_address(address)} does not answer within {ANSWER_SECONDS:g} s: is its file system well?"
    except ArchiveError as error:
        return str(error)
    return ""


def archive_key(address: str, card: RunCard) -> str:
    """Under which name the copies at an address are on record: "store", "url", or one made from the
    address.
    """
    for key, known in (("store", card.backup.store), ("url", card.backup.url)):
        if known is not None and archive_address(known) == archive_address(address):
            return key
    return f"other-{hashlib.sha256(archive_address(address).encode()).hexdigest()[:8]}"


def is_folder(address: str) -> bool:
    """Whether an address is that of a folder."""
    return address.startswith(FILE_SCHEMES) or "://" not in address


def folder_of(address: str) -> Path:
    """The folder that an address names (see `is_folder`)."""
    for scheme in FILE_SCHEMES:
        address = address.removeprefix(scheme)
    return Path(address).expanduser().absolute()


def archive_address(address: str) -> str:
    """An address as the archive itself gives it (`Archive.address`)."""
    if is_folder(address):
        return str(folder_of(address))
    return address.rstrip("/").replace("gcs://", "gs://", 1)


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _run_id(card: RunCard) -> str:
    """The run's id; "" before its first launch. Raises ArchivePermanentError when it cannot be
    read.
    """
    try:
        return run_id(RunDirectory(card.paths, card.kill_switch))
    except (OSError, ValueError) as error:
        raise ArchivePermanentError(f"which run this is cannot be read: {error}") from error


def _has_copies(card: RunCard, key: str, address: str) -> bool:
    """Whether the run has a record of a copy there. Raises ArchivePermanentError when its records
    cannot be read.
    """
    try:
        copies = read_copies(RunDirectory(card.paths, card.kill_switch), every_variant=True)
    except (OSError, ValueError) as error:
        raise ArchivePermanentError(f"the records of copies cannot be read: {error}") from error
    return any(copy.archive == key and copy.address == address for copy in copies)
