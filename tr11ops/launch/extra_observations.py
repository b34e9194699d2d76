"""What else a launch looks at: clocks, the group's access, pause, lease, index maps, lost jobs, and
the folders that the card names for copies.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tr11ops.backup.archives import folder_fault, folder_of, is_folder, overlap, same_device
from tr11ops.base.observed import known
from tr11ops.observe.files import read_heartbeats
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, refused, warning
from tr11ops.rundir.datasets import prefixes_of
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import user_of
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

# Whether the folders that the card names for copies are others than the run directory, on another
# disk at best.


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
            found.append(
                ArchiveFacts(
                    f"backup.{key}",
                    str(folder),
                    overlap=shared,
                    is_same_device=is_same,
                    fault=fault,
                )
            )
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


RECENT_BEATS_SECONDS = 7 * 86400.0


class ClockFacts(Record):
    """How far one clock is ahead of another, in seconds (below zero: behind)."""

    what: str
    ahead: float
    against: str


class AccessFault(Record):
    """One folder or file of the run that the group cannot work with, and whose it is."""

    path: Path
    fault: str
    owner: str


# ----------------------------------------------------------------------------- clocks
def read_clocks(paths: RunPaths, now: float) -> tuple[ClockFacts, ...]:
    """Each node's clock at its newest heartbeat, against the file system's, which stamped the same
    file.

    Heartbeats of more than a week ago are left out: clocks change. One entry a host.
    """
    beats, _ = read_heartbeats(paths)
    newest: dict[str, ClockFacts] = {}
    for beat in sorted(known(beats, ()), key=lambda beat: beat.time):
        if now - beat.time > RECENT_BEATS_SECONDS:
            continue
        try:
            stamp = paths.heartbeat(beat.rank).stat().st_mtime
        except FileNotFoundError:
            continue
        newest[beat.host] = ClockFacts(f"node {beat.host}", beat.time - stamp, "the file system")
    return tuple(newest[host] for host in sorted(newest))


def clock_of_file_system(folder: Path) -> ClockFacts:
    """This machine's clock against the file system's. Raises OSError where nothing can be written."""
    from trainer.contract.files import file_system_time

    here, stamped = file_system_time(folder)
    return ClockFacts("this machine", here - stamped, "the file system")


# ----------------------------------------------------------------------------- access
def read_access(directory: RunDirectory) -> tuple[AccessFault, ...]:
    """The folders of the run in which the group cannot write, or whose new files would get another
    group.
    """
    paths = directory.paths
    wanted = (
        directory.root,
        paths.state,
        paths.attempts,
        directory.submissions,
        paths.checkpoints,
        paths.logs,
    )
    found = []
    group = directory.root.stat().st_gid if directory.exists else None
    for folder in (*wanted, directory.journal):
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue
        faults = []
        if status.st_mode & 0o070 != 0o070:
            faults.append("not writable for its group")
        if not status.st_mode & stat.S_ISGID:
            faults.append("without the setgid bit")
        if status.st_gid != group:
            faults.append("of another group than the run directory")
        if faults:
            found.append(AccessFault(folder, ", ".join(faults), user_of(status.st_uid)))
    return tuple(found)


# ----------------------------------------------------------------------------- index maps
def prefixes_without_maps(card: RunCard) -> tuple[str, ...]:
    """The prefixes for which no index map of this card's sequence length and seed is there; they
    are built at start.
    """
    length, seed = card.model.sequence_length, card.run.seed
    missing = []
    for prefix in prefixes_of(card.data):
        path = Path(prefix)
        if card.data.cache is None:
            folder = path.parent
        else:
            folder = Path(card.data.cache)
        start, middle = f"{path.name}_", f"ns_{length}sl_{seed}s_"
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            names = []
        if not any(
            name.startswith(start) and middle in name and name.endswith(".json") for name in names
        ):
            missing.append(prefix)
    return tuple(missing)
