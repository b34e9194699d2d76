"""Opening an archive: the card's store or url, or any folder or address that a person names; and
whether such a folder is the run directory itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import FolderArchive, Owner
from tr11ops.base.deadline import watch_files, within
from tr11ops.base.errors import ArchiveError, ArchivePermanentError, Late
from tr11ops.rundir.copies import read_copies
from tr11ops.rundir.paths import RunDirectory, nearest_folder, run_id
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard


# Whether a folder is, lies in, or lies around the run directory: then a copy in it is the
# original, or goes with it.
#
# Names prove nothing: links and bind mounts give one folder several. Each path is followed to its
# real one, and that is looked up in the table of mounts as (file system, path inside it). Folders are
# compared by device and inode besides, for file systems that are mounted twice without a table that
# says so. One that is mounted twice over the network has other numbers too: so a file of an
# unheard-of name is made in the run directory for a moment, and must not be seen there.

MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(Record):
    """One mounted file system: its device, which folder of it is mounted, and where."""

    device: str
    root: PurePosixPath
    point: PurePosixPath


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The lines of /proc/self/mountinfo; lines of another shape are passed over."""
    found = []
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) > 5:
            root, point = (
                _ESCAPE.sub(lambda code: chr(int(code[1], 8)), word) for word in words[3:5]
            )
            found.append(Mount(words[2], PurePosixPath(root), PurePosixPath(point)))
    return tuple(found)


def place_of(path: str, mounts: Iterable[Mount]) -> tuple[str, PurePosixPath]:
    """A real path as (device, path inside its file system). Of mounts on one another, the last
    counts.
    """
    place = PurePosixPath(path)
    best: Mount | None = None
    for mount in mounts:
        is_above = place.is_relative_to(mount.point)
        if is_above and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount
    if best is None:
        return ("", place)
    return (best.device, best.root / place.relative_to(best.point))


def overlap(folder: Path, paths: RunPaths) -> str:
    """How a folder that an archive would use overlaps with the run directory, in words; "" when it
    does not.

    Looks at the folders that copies would go to as well: one of them may be mounted from elsewhere.
    """
    mounts = _mounts()
    ours = [
        ("the run directory", paths.root),
        ("the checkpoint folder", paths.checkpoints.parent),
        ("the checkpoint folder", paths.checkpoints),
    ]
    theirs = [folder, folder / "checkpoints", folder / "checkpoints" / paths.variant]
    for place in theirs:
        if place != folder and not place.exists():
            continue
        for what, home in ours:
            relation = _relation(place, home, mounts)
            if relation and (relation != "around" or what == "the run directory"):
                if place == folder:
                    inner = ""
                else:
                    inner = f"its folder {place.relative_to(folder)} "
                return f"{inner}{_WORDS[relation]} {what} {home}"
    return next((found for what, home in ours if (found := _shown(what, home, theirs))), "")


def _shown(what: str, home: Path, theirs: list[Path]) -> str:
    """Whether a file that is made in `home` for a moment shows in one of the folders, or above the
    first, in words.

    Where none can be made (no rights, a full disk) nothing is said: prune looks at copies once more
    when the original is hidden.
    """
    probe = home / f".tr11-{secrets.token_hex(8)}"
    try:
        probe.touch(0o664, exist_ok=False)
    except OSError:
        return ""
    try:
        for place in theirs:
            if os.path.lexists(place / probe.name):
                if place == theirs[0]:
                    inner = ""
                else:
                    inner = f"its folder {place.relative_to(theirs[0])} "
                return f"{inner}is {what} {home}"
        above = any(os.path.lexists(parent / probe.name) for parent in theirs[0].absolute().parents)
        if above:
            return f"lies in {what} {home}"
        return ""
    finally:
        probe.unlink(missing_ok=True)


def overlap_fault(key: str, folder: Path, paths: RunPaths) -> str:
    """Why a folder cannot be an archive of the run, in one line that names the card's key; "" when
    it can.
    """
    found = overlap(folder, paths)
    return (
        found
        and f"{key} = {folder}: {found}, so a copy there is no copy; name a folder of another file system"
    )


def same_device(folder: Path, paths: RunPaths) -> bool:
    """Whether both lie on one file system, so that one fault takes both. False where that cannot be
    seen.
    """
    try:
        devices = {nearest_folder(place.absolute()).stat().st_dev for place in (folder, paths.root)}
    except OSError:
        return False
    return len(devices) == 1


_WORDS = {"same": "is", "inside": "lies in", "around": "lies around"}


def _relation(one: Path, other: Path, mounts: Iterable[Mount]) -> str:
    """ "same", "inside", "around" or "" of two folders; what is not there yet is judged by its
    path.
    """
    first, second = (
        place_of(os.path.realpath(one), mounts),
        place_of(os.path.realpath(other), mounts),
    )
    if first == second or (_identity(one) is not None and _identity(one) == _identity(other)):
        return "same"
    if first[0] == second[0]:
        if first[1].is_relative_to(second[1]):
            return "inside"
        if second[1].is_relative_to(first[1]):
            return "around"
    if _identity(other) in _identities_above(one):
        return "inside"
    if _identity(one) in _identities_above(other):
        return "around"
    return ""


def _identities_above(folder: Path) -> set[tuple[int, int]]:
    """Of all folders above, but not of the root of the whole tree: everything lies in that."""
    parents = list(Path(os.path.realpath(folder)).parents)[:-1]
    return {found for parent in parents if (found := _identity(parent)) is not None}


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = folder.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _mounts() -> tuple[Mount, ...]:
    try:
        return parse_mounts(MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return ()


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
        watch_files(folder)
        fault = overlap_fault(
            f"backup.{key}" if key in ("store", "url") else "--to", folder, card.paths
        )
        if fault:
            raise ArchivePermanentError(fault)
        has_copies = _has_copies(card, key, str(folder))
        return FolderArchive(folder, key, _owner(card), has_copies=has_copies)
    from tr11ops.backup.remote import open_remote

    # another bucket, the same account
    is_alike = section.url is not None and _scheme(section.url) == _scheme(address)
    credentials = None
    if section.credentials_file and is_alike:
        credentials = Path(section.credentials_file)
    remote: Archive = open_remote(
        address,
        section.options if is_alike else {},
        credentials_file=credentials,
        name=key,
        owner=_owner(card),
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


def _owner(card: RunCard) -> Owner:
    """The run, whose id is "" before its first launch. Raises ArchivePermanentError when it cannot
    be read.
    """
    try:
        return Owner(card.run.name, run_id(RunDirectory(card.paths, card.kill_switch)))
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
