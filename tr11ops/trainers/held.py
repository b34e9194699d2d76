"""What the run holds of a foreign trainer's checkpoint, in tr11's own layout:

    checkpoints/VARIANT/global_stepN/
      foreign/...     its files, under the names that they have in the trainer's folder
      foreign.json    where each came from: bytes, time, inode; written once all of them are there
      manifest.json   the digest of each; written last

The files are links to the trainer's own where that can be; copies where it writes over them, or
where the file system has no links. A link is never written to, and its rights are never changed: it
is the trainer's file. All is made in a hidden folder, which gets its name when all digests are read
and nothing has changed meanwhile. A later launch goes on with a hidden
folder that has a foreign.json; one without is of no use.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import StopAsked
from tr11ops.dialects.dialect import CheckpointRules
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.rundir.checkpoint_digests import digest_of, note_damage
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, files_of, look_at
from tr11ops.trainers.start_names import current_folder
from trainer.contract.checkpoint_formats import FOREIGN, FOREIGN_FILE, MANIFEST_FILE
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    checkpoint_steps,
    hidden_name,
    read_latest,
    set_apart,
)
from trainer.contract.checkpoints import remove_leftovers
from trainer.contract.documents import read_record, write_record
from trainer.contract.files import make_shared, open_shared, sync_folder, write_beside
from trainer.contract.manifest import FileEntry, ForeignFacts, Manifest, file_digest
from trainer.contract.paths import RunPaths
from trainer.contract.record import Count, Finite, Record
from trainer.contract.replacing import retire, take_place
from trainer.contract.units import size

Report = Callable[[str], None]
Fence = Callable[[], None]  # raises where another launch has taken the run over

WORD = "holding"  # in the name of a hidden folder
SCHEMA = 1
# what a file system says that makes no link of this file, though it may take a copy
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
)
_PIECE = 64 << 20
_SPARE = 64 << 20  # bytes that a copy leaves free


class NotHeld(Exception):
    """One checkpoint cannot be held now; the text says why."""


class NotLinked(NotHeld):
    """It would have to be copied, and there is no time for that now."""


class Changed(NotHeld):
    """The trainer wrote to a checkpoint, or removed it, while it was being held."""


class HoldPlace(Record):
    """Whose checkpoints are held, and where: the trainer's `dialect`, its `rules`, the `folder` in
    which its checkpoints lie, the run's own `paths`. `ranks`: how many train; None where that is
    not known. `told`: its command says which one it resumes from.
    """

    dialect: str
    rules: CheckpointRules
    folder: Path
    paths: RunPaths
    ranks: int | None = None
    told: bool = False
    card_hash: str = ""
    job_id: str = ""

    @classmethod
    def of(
        cls,
        settings: TrainerSettings,
        paths: RunPaths,
        ranks: int | None,
        card_hash: str = "",
        job_id: str = "",
    ) -> HoldPlace | None:
        """By the card's `[trainer]` section, whose folder is an absolute path here; None where its dialect says
        nothing of checkpoints.
        """
        folder, rules = current_folder(settings), settings.dialect.checkpoints
        if folder is None or rules is None:
            return None
        words = (*settings.words, *settings.resume)
        return cls(
            settings.dialect.name,
            rules,
            folder.resolve(),
            paths=paths,
            ranks=ranks,
            told=any("{path}" in word or "{step}" in word for word in words),
            card_hash=card_hash,
            job_id=job_id,
        )

    @property
    def copies(self) -> bool:
        """Whether a link would keep nothing."""
        return self.rules.rewritten


class ForeignFile(Record):
    """One file as it lay in the trainer's folder: its path there, bytes, when it was written
    (nanoseconds since the epoch), which file it is. `linked`: what is held is that
    very file.
    """

    path: str
    bytes: Count
    modified: int
    device: int
    inode: int
    linked: bool = True

    def is_still(self, path: Path) -> bool:
        """Whether the file at `path` has this length and was written at this time. Raises OSError."""
        facts = path.stat()
        return facts.st_size == self.bytes and facts.st_mtime_ns == self.modified


class Origin(Record):
    """The content of `foreign.json`. `written`: when the newest of the files was written."""

    foreign: ForeignFacts
    step: int
    files: tuple[ForeignFile, ...]
    written: Finite
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.files)

    @property
    def modified(self) -> int:
        """When the newest of the files was written, in nanoseconds since the epoch: moments are compared
        by this alone, as seconds are rounded.
        """
        return max(one.modified for one in self.files)


def read_origin(place: Path) -> Origin | None:
    """Where the files of a held checkpoint came from; None where it holds none. Raises OSError,
    ValueError.
    """
    return read_record(Origin, place / FOREIGN_FILE, "what is held of another trainer", SCHEMA)


def is_same(origin: Origin, place: HoldPlace, found: FoundCheckpoint) -> bool:
    """Whether what is held is what lies in the trainer's folder now. Raises OSError."""
    if origin.foreign.name != found.name:
        return False
    paths = files_of(place.rules, place.folder, found)
    if sorted(paths) != sorted(one.path for one in origin.files):
        return False
    return all(one.is_still(place.folder / one.path) for one in origin.files)


def is_held(place: HoldPlace, found: FoundCheckpoint) -> bool:
    """Whether the run holds a checkpoint as it lies in the trainer's folder now, with its manifest.
    Raises OSError.
    """
    if found.step is None:
        return False
    home = place.paths.checkpoint(found.step)
    if not (home / MANIFEST_FILE).exists():
        return False
    try:
        origin = read_origin(home)
    except ValueError:
        return False
    return origin is not None and is_same(origin, place, found)


def with_held(place: HoldPlace, found: CheckpointSurvey) -> CheckpointSurvey:
    """The checkpoints, where one of which nothing is known lies as it did when it was whole and was
    held: a file that names the newest says nothing of older ones. Raises OSError.
    """
    looked = tuple(
        replace(one, state="whole", why="")
        if one.state == "not known" and is_held(place, one)
        else one
        for one in found.found
    )
    if looked == found.found:
        return found
    taken = found.taken
    if taken is not None:
        taken = looked[found.found.index(taken)]
    wanted = next((one for one in reversed(looked) if one.state == "whole"), None)
    return replace(found, found=looked, taken=taken, wanted=wanted)


def is_older(place: HoldPlace, found: FoundCheckpoint) -> bool:
    """Whether one that is not held is older than the last that is: it was removed, or never wanted. Raises
    OSError.
    """
    folder = place.paths.checkpoints
    try:
        named = read_latest(folder)
        if named is None:
            return False
        last = read_origin(folder / checkpoint_name(named))
    except ValueError:
        return False
    return last is not None and modified_at(place, found) < last.modified


# ----------------------------------------------------------------------------- taking hold
def take_hold(
    place: HoldPlace, found: FoundCheckpoint, now: float, stop: threading.Event | None = None
) -> Path:
    """The files of a whole checkpoint, with their foreign.json, in a hidden folder, which is
    returned. `stop` ends a copy; without it, nothing is copied that could be linked elsewhere.

    Raises Changed where the trainer was faster, NotLinked and NotHeld where it cannot be held,
    StopAsked, OSError. Nothing is left then.
    """
    if found.step is None:
        raise NotHeld(f"{found.name}: which step it is of is not known")
    folder = place.paths.checkpoints
    make_shared(folder)
    hidden = folder / hidden_name(checkpoint_name(found.step), WORD, uuid.uuid4().hex[:12])
    try:
        sources = [
            _source(place.folder, path) for path in files_of(place.rules, place.folder, found)
        ]
        if place.copies:
            check_room(folder, sum(one.bytes for one in sources))
        make_shared(hidden / FOREIGN)
        files = tuple(_taken(place, hidden, one, stop) for one in sources)
        _look_again(place, found, files, now)
        facts = ForeignFacts(
            place.dialect,
            found.name,
            place.rules.layout,
            ranks=place.ranks,
            weights=place.rules.weights,
        )
        origin = Origin(facts, found.step, files, max(one.modified for one in files) / 1e9)
        write_record(hidden / FOREIGN_FILE, origin)
    except FileNotFoundError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise Changed(f"{found.name}: {error.filename} has gone meanwhile") from None
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return hidden


def _source(folder: Path, path: str) -> ForeignFile:
    """Raises NotHeld for what is no plain file, OSError."""
    facts = (folder / path).stat()
    if not stat.S_ISREG(facts.st_mode):
        raise NotHeld(f"{folder / path} is no plain file: a checkpoint with it is not held")
    return ForeignFile(
        path,
        facts.st_size,
        modified=facts.st_mtime_ns,
        device=facts.st_dev,
        inode=facts.st_ino,
    )


def _taken(
    place: HoldPlace, hidden: Path, file: ForeignFile, stop: threading.Event | None
) -> ForeignFile:
    """Link a file, or copy it; returns it as it is held. Raises as `take_hold`."""
    source, target = place.folder / file.path, hidden / FOREIGN / file.path
    make_shared(target.parent)
    linked = not place.copies and link(source, target)
    if not linked:
        if stop is None and not place.copies:
            raise NotLinked(f"{source} cannot be linked into {hidden.parent}")
        check_room(hidden.parent, file.bytes)
        copy(source, target, file, stop)
    if not file.is_still(source) or not file.is_still(target):
        raise Changed(f"{source} was written to while it was being held")
    return replace(file, linked=linked)


def link(source: Path, target: Path) -> bool:
    """Make `target` a link to the file that `source` leads to; False where none can be made. Raises
    OSError.
    """
    try:
        os.link(os.path.realpath(source), target)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def copy(
    source: Path, target: Path, file: ForeignFile, stop: threading.Event | None = None
) -> None:
    """Copy a file with its time; blocks are shared where the file system can do that. Raises
    OSError, StopAsked, Changed where it is shorter than it was.
    """
    left = file.bytes
    with source.open("rb") as reader:
        descriptor = open_shared(target, os.O_WRONLY | os.O_EXCL)
        try:
            while left > 0:
                moved = _moved(reader.fileno(), descriptor, min(left, _PIECE))
                if not moved:
                    raise Changed(f"{source} was cut while it was being copied")
                left -= moved
                if stop is not None and stop.is_set():
                    raise StopAsked
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    os.utime(target, ns=(file.modified, file.modified))


def _moved(source: int, target: int, most: int) -> int:
    """How many bytes were copied. Raises OSError."""
    try:
        return os.copy_file_range(source, target, most)
    except OSError as error:
        if error.errno not in _NO_LINKS | {errno.EINVAL, errno.EBADF}:
            raise
    piece = memoryview(os.read(source, min(most, 4 << 20)))
    done = 0
    while done < len(piece):
        done += os.write(target, piece[done:])
    return done


def check_room(folder: Path, needed: int) -> None:
    """Raises NotHeld where a copy of so many bytes would not fit, OSError."""
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    if free < needed + _SPARE:
        raise NotHeld(f"{folder} has no room for a copy of {size(needed)}: {size(free)} are free")


def _look_again(
    place: HoldPlace, found: FoundCheckpoint, files: Iterable[ForeignFile], now: float
) -> None:
    """Raises Changed where what was taken is not, or may not be, what was found whole."""
    again = look_at(place.rules, place.folder, found.name, world_size=place.ranks, now=now)
    if again != found or not all(one.is_still(place.folder / one.path) for one in files):
        raise Changed(f"{found.name} was written to while it was being held")


def modified_at(place: HoldPlace, found: FoundCheckpoint) -> int:
    """When the newest file of a checkpoint was written, in nanoseconds since the epoch. Raises OSError."""
    paths = files_of(place.rules, place.folder, found)
    return max((place.folder / path).stat().st_mtime_ns for path in paths)


def note_overwritten(place: HoldPlace, home: Path, origin: Origin) -> None:
    """Put on record that the trainer wrote over files which are held as links, where that is so: what is
    sealed is not what lies there. Raises OSError.
    """
    directory = RunDirectory(place.paths, kill_switch=place.paths.root)
    for file in origin.files:
        held, source = home / FOREIGN / file.path, place.folder / file.path
        if file.linked and source.exists() and held.samefile(source) and not file.is_still(held):
            path = f"{FOREIGN}/{file.path}"
            identity, why = identity_of(home), "its trainer wrote over it"
            note_damage(directory, origin.step, identity, path=path, why=why)


# ----------------------------------------------------------------------------- digests, and the name
def entry_of(
    hidden: Path, file: ForeignFile, progress: Callable[[int], None], stop: threading.Event
) -> FileEntry:
    """The manifest's entry of a held file; reads it. Raises OSError, StopAsked, Changed where it is not
    what was taken any more.
    """
    path = hidden / FOREIGN / file.path
    _, digest, is_still = digest_of(path, file.bytes, progress, stop)
    if not is_still or not file.is_still(path):
        raise Changed(f"{file.path} was written to while its digest was read")
    return FileEntry(f"{FOREIGN}/{file.path}", file.bytes, digest)


def publish(
    place: HoldPlace,
    hidden: Path,
    origin: Origin,
    digests: Mapping[str, FileEntry],
    fence: Fence,
    report: Report,
) -> Path:
    """Give a held checkpoint its name, once the digest of each of its files is read; returns its
    folder. `latest` comes to name the one that the trainer wrote last.

    Raises Changed where the trainer has written to it since, OSError, and what `fence` raises:
    nothing has changed then.
    """
    _check_unchanged(place.folder, hidden, origin)
    record = hidden / FOREIGN_FILE
    own = FileEntry(FOREIGN_FILE, record.stat().st_size, file_digest(record))
    manifest = Manifest(
        step=origin.step,
        consumed_samples=0,
        consumed_tokens=0,
        files=tuple(sorted([*digests.values(), own], key=_path_of)),
        topology={},
        model={},
        run_card_hash=place.card_hash,
        created=origin.written,
        versions={"dialect": origin.foreign.dialect},
        job_id=place.job_id,
        foreign=origin.foreign,
    )
    manifest.write(hidden)
    for inner in [*(path for path in hidden.rglob("*") if path.is_dir()), hidden]:
        sync_folder(inner)
    folder = place.paths.checkpoints
    home = folder / checkpoint_name(origin.step)
    pointer = write_beside(folder / LATEST_FILE, _last_written(folder, manifest))
    try:
        fence()
        # fails where a later launch has taken the hidden folder over
        replaced = take_place(folder, hidden, manifest, report)
        sync_folder(folder)
        pointer.replace(folder / LATEST_FILE)
        sync_folder(folder)
    except BaseException:
        pointer.unlink(missing_ok=True)
        raise
    if replaced is not None:
        retire(folder, replaced, report)
    return home


def _path_of(entry: FileEntry) -> str:
    return entry.path


def _check_unchanged(folder: Path, hidden: Path, origin: Origin) -> None:
    """Raises Changed where a file was written to since it was taken, in the trainer's folder or here.
    That the trainer has removed its own is no change.
    """
    for file in origin.files:
        if not file.is_still(hidden / FOREIGN / file.path):
            raise Changed(f"{file.path} was written to since it was taken")
        if not file.linked:
            continue
        with suppress(FileNotFoundError):
            facts = (folder / file.path).stat()
            is_that = (facts.st_dev, facts.st_ino) == (file.device, file.inode)
            if not is_that or not file.is_still(folder / file.path):
                raise Changed(f"{file.path} was saved again since it was taken")


def _last_written(folder: Path, new: Manifest) -> str:
    """The name of the checkpoint that was written last, `new` among them. A trainer that went back to an older
    step writes lower ones later. Raises OSError.
    """
    found = [new]
    for step in checkpoint_steps(folder):
        try:
            other = Manifest.read(folder / checkpoint_name(step))
        except ValueError:
            continue
        if other is not None and other.foreign is not None and step != new.step:
            found.append(other)
    return checkpoint_name(max(found, key=_age).step)


def _age(manifest: Manifest) -> tuple[float, int]:
    return manifest.created, manifest.step


# ----------------------------------------------------------------------------- what others left
def adopt(folder: Path) -> list[Path]:
    """The hidden folders that an earlier launch left with all their files, each under a new name, so
    that a process which still works on it publishes nothing; what is of no use is removed. Raises OSError.
    """
    remove_leftovers(folder)
    kept = []
    for path, name in set_apart(folder, WORD):
        mine = folder / hidden_name(name.home, WORD, uuid.uuid4().hex[:12])
        try:
            path.rename(mine)
        except FileNotFoundError:
            continue  # it has just got its name
        try:
            origin = read_origin(mine)
        except ValueError:
            origin = None
        if origin is None or origin.step != checkpoint_step(name.home):
            shutil.rmtree(mine, ignore_errors=True)
        else:
            kept.append(mine)
    return kept
