"""The checkpoints of a run as rows, from their manifests and the sizes of their files. Reads;
concludes nothing.

Every look takes every file's size again: what was remembered of an earlier look could hide a file
that was cut since. On a shared file system each question is a round trip, so checkpoints are read
by threads where reading means waiting.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from tr11ops.base.observed import Unknown
from tr11ops.base.units import counted
from tr11ops.rundir.checkpoint_digests import DigestRecord, NotFiniteRecord
from tr11ops.rundir.checkpoint_pins import Pin
from tr11ops.rundir.copies import CopyRecord, identity_of
from trainer.contract.checkpoint_formats import MANIFEST_FILE, FormatName, format_of, is_whole
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_step, folder_names
from trainer.contract.documents import document
from trainer.contract.manifest import ForeignFacts, Manifest
from trainer.contract.record import JsonObject, Record
from trainer.contract.resumable import ResumeFault, ResumeNeed, lack_of, unnamed_files
from trainer.contract.units import shortened

Layout = FormatName | Literal["unknown"]
ManifestState = Literal["read", "none", "unreadable", "foreign"]

# where the file system makes us wait; elsewhere they only take turns at the interpreter
THREADS = 16
PROBES = 4  # checkpoints that tell which of the two it is
WAITING_SHARE = 0.4  # of the time, from which on threads pay
LARGEST_MANIFEST = 64 << 20  # that of a checkpoint of 400,000 files
NO_CARD = ResumeNeed()  # where the card is not known, any model is the run's
FAULTS_KEPT = 50  # of one checkpoint; the count of the rest is the last of them


class SavedCheckpoint(Record):
    """One checkpoint of a run, and what is known of it. `faults`: why it is not whole, by sizes;
    `created`: seconds since the epoch.

    What only a manifest says is None where there is none (a copy of another trainer, a save that
    was killed). `identity` tells it from another checkpoint of the same step (see
    `tr11ops.rundir.copies.identity_of`); "" where it could not be read. `manifest` is "foreign"
    where there is another step's, or another trainer's save has none. `changed`: when a file in it
    was last written; None where not all of it could be seen. `lack`: why no training of this run
    resumes from it although it is whole (see `trainer.contract.resumable`); `is_foreign`: because
    it is of another model. `unnamed`: files in it that its manifest does not name: someone put them
    there. `foreign`: of what other trainer it is, where it is held of one; `linked`: the bytes of
    its files then that have a name elsewhere too.

    A scan leaves what follows at its defaults; `tr11ops.checkpoints.catalogue` looks it up.
    `digests`: what was found when it was last read; None: never read. `numbers`: which of them are
    known to be NaN or infinite, if any. `copies` are those of this very checkpoint, damaged ones
    too. `is_discarded`: a roll-back passes over it.
    """

    step: int
    path: str
    layout: Layout
    bytes: int
    faults: tuple[str, ...]
    is_latest: bool
    created: float
    topology: Mapping[str, int] | None = None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    run_card_hash: str | None = None
    identity: str = ""
    files: int = 0
    manifest: ManifestState = "read"
    is_link: bool = False
    changed: float | None = None
    lack: str = ""
    is_foreign: bool = False
    unnamed: tuple[str, ...] = ()
    foreign: ForeignFacts | None = None
    linked: int | None = None
    digests: DigestRecord | Unknown | None = None
    numbers: NotFiniteRecord | Unknown | None = None
    copies: tuple[CopyRecord, ...] = ()
    pin: Pin | None = None
    used_by: tuple[str, ...] = ()
    is_discarded: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.rpartition("/")[2]

    @property
    def is_superseded(self) -> bool:
        """Whether another one was saved in its place since (see `trainer.contract.replacing`)."""
        return self.name != checkpoint_name(self.step)

    @property
    def state(self) -> str:
        if self.faults:
            return "NOT WHOLE"
        if self.lack:
            return "no resume"
        if self.topology is not None:
            return "whole"
        return "no manifest"

    @property
    def no_resume(self) -> str:
        """Why no training resumes from it, as far as is known; empty where one does."""
        if isinstance(self.digests, Unknown):
            return f"what was read of it is not known: {self.digests.why}"
        if isinstance(self.numbers, Unknown):
            return f"what its numbers are is not known: {self.numbers.why}"
        if self.is_discarded:
            return "a roll-back discarded it"
        if self.complete is None:
            return "no manifest says what it should hold"
        if self.faults:
            return f"it is not whole: {self.faults[0]}"
        if self.lack:
            return self.lack
        if self.digests is not None and self.digests.bad:
            return f"it is damaged: {self.digests.bad[0]}"
        if self.numbers is not None:
            return f"NaN or infinity in {self.numbers.not_finite[0]}"
        return ""

    @property
    def is_sound(self) -> bool:
        """Whether a training can resume from it, as far as is known (see
        `trainer.contract.resumable`).
        """
        return not self.no_resume

    @property
    def shape(self) -> str:
        """Tensor x pipeline x data, or a question mark."""
        if not self.topology:
            return "?"
        return " x ".join(
            str(self.topology.get(axis, "?")) for axis in ("tensor", "pipeline", "data")
        )

    @property
    def complete(self) -> bool | None:
        """None where no manifest says what there should be."""
        if self.faults:
            return False
        if self.topology is None:
            return None
        return True

    @property
    def freed(self) -> int:
        """Bytes that are free once it is removed: of one that is held, what its trainer has deleted."""
        return self.bytes - (self.linked or 0)

    def document(self) -> JsonObject:
        """The checkpoint as JSON values; `digests` is null where it was never read."""
        return {**document(self), "complete": self.complete}


def list_rows(
    folder: Path, latest: int | None, need: ResumeNeed = NO_CARD
) -> list[SavedCheckpoint]:
    """Rows of all checkpoints below `folder` (checkpoints/VARIANT), oldest first. Raises OSError
    when unreadable.

    `need`: what the run needs of one that it resumes from. One that goes while it is looked at is
    left out.
    """
    return read_rows(folder, checkpoint_folders(folder), latest, need)


def read_rows(
    folder: Path, steps: Sequence[int], latest: int | None, need: ResumeNeed
) -> list[SavedCheckpoint]:
    """Rows of these steps, in their order."""

    def read(step: int) -> SavedCheckpoint | None:
        return read_row(folder / checkpoint_name(step), step, step == latest, need)

    first, rest = steps[:PROBES], steps[PROBES:]
    began, worked = time.perf_counter(), time.thread_time()
    found = [read(step) for step in first]
    if rest and is_waiting(time.perf_counter() - began, time.thread_time() - worked):
        with ThreadPoolExecutor(
            min(THREADS, len(rest)), thread_name_prefix="checkpoints"
        ) as readers:
            found += readers.map(read, rest)
    else:
        found += map(read, rest)
    return [row for row in found if row is not None]


def is_waiting(took: float, worked: float) -> bool:
    """Whether a reading that took so many seconds, of which the processor worked so many, waited
    for a file system.
    """
    return took > 0.0 and (took - worked) / took > WAITING_SHARE


def checkpoint_folders(folder: Path) -> list[int]:
    """Steps whose folder is named as the trainer names it, ascending by number. Raises OSError when
    unreadable.
    """
    steps = ((checkpoint_step(name), name) for name in folder_names(folder))
    return sorted(
        step for step, name in steps if step is not None and checkpoint_name(step) == name
    )


# ----------------------------------------------------------------------------- one checkpoint
class Tree(Record):
    """The files below a folder: sizes by path, the last change, whether all of it could be seen, and
    the bytes of those that have another name too.
    """

    sizes: Mapping[str, int]
    changed: float
    is_whole: bool
    linked: int = 0


def walk(place: Path) -> Tree:
    """Look at every file below a folder; folders behind links are not entered. Raises OSError for
    `place` itself.
    """
    sizes: dict[str, int] = {}
    changed, is_whole, linked = place.stat().st_mtime, True, 0
    waiting = [(str(place), "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, f"{prefix}{entry.name}/"))
                        changed = max(changed, entry.stat(follow_symlinks=False).st_mtime)
                        continue
                    try:
                        facts = entry.stat()
                    except FileNotFoundError:  # a link to nowhere, or it has just gone
                        continue
                    sizes[prefix + entry.name] = facts.st_size
                    if facts.st_nlink > 1:
                        linked += facts.st_size
                    changed = max(changed, facts.st_mtime)
        except OSError:
            if not prefix:
                raise
            is_whole = False
    return Tree(sizes, changed, is_whole, linked)


def read_row(place: Path, step: int, is_latest: bool, need: ResumeNeed) -> SavedCheckpoint | None:
    """The row of one checkpoint, whatever its folder is called; None when it has gone."""
    try:
        tree = walk(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _without(
            place,
            step,
            is_latest=is_latest,
            tree=None,
            manifest="unreadable",
            fault=f"{place} cannot be read: {error.strerror}",
        )
    try:
        content = read_manifest(place)
        if content is None:
            manifest = None
        else:
            manifest = _parse(content, place)
    except (OSError, ValueError) as error:
        why = shortened(" ".join(str(error).split()), 300)
        if isinstance(error, OSError):
            why = error.strerror or str(error)
        if str(place) in why:
            text = why
        else:
            text = f"{place / MANIFEST_FILE} cannot be read: {why}"
        return _without(
            place, step, is_latest=is_latest, tree=tree, manifest="unreadable", fault=text
        )
    if content is not None and manifest is not None:
        identity = hashlib.sha256(content).hexdigest()
        return _whole(
            place,
            step,
            is_latest=is_latest,
            tree=tree,
            manifest=manifest,
            identity=identity,
            lack=lack_of(manifest, need),
        )
    if is_whole(tree.sizes.keys() - {MANIFEST_FILE}):  # of a format that has none
        return _without(place, step, is_latest=is_latest, tree=tree, manifest="foreign", fault="")
    return _without(
        place,
        step,
        is_latest=is_latest,
        tree=tree,
        manifest="none",
        fault=f"has no {MANIFEST_FILE}: its save did not end",
    )


def _whole(
    place: Path,
    step: int,
    is_latest: bool,
    tree: Tree,
    manifest: Manifest,
    identity: str,
    lack: ResumeFault | None,
) -> SavedCheckpoint:
    faults = list(_size_faults(place, manifest, tree.sizes))
    samples: int | None = manifest.consumed_samples
    tokens: int | None = manifest.consumed_tokens
    if manifest.foreign is not None:
        samples = tokens = None
    if manifest.step != step:
        faults.insert(0, f"holds the manifest of step {manifest.step}: it was renamed")
    return SavedCheckpoint(
        step=step,
        path=str(place),
        layout=_layout(tree),
        bytes=manifest.total_bytes,
        faults=_shortened(faults),
        is_latest=is_latest,
        created=manifest.created,
        topology=dict(manifest.topology),
        consumed_samples=samples,
        consumed_tokens=tokens,
        run_card_hash=manifest.run_card_hash,
        identity=identity,
        files=len(manifest.files),
        manifest="read" if manifest.step == step else "foreign",
        is_link=place.is_symlink(),
        changed=tree.changed if tree.is_whole else None,
        lack="" if lack is None else lack.text,
        is_foreign=lack is not None and lack.is_foreign,
        unnamed=_shortened(unnamed_files(manifest, tree.sizes)),
        foreign=manifest.foreign,
        linked=None if manifest.foreign is None else tree.linked,
    )


def _parse(content: bytes, place: Path) -> Manifest:
    """Raises ValueError for what is no manifest: it may come from anywhere."""
    try:
        return Manifest.of(json.loads(content), place)
    except (AttributeError, RecursionError) as error:
        raise ValueError(
            f"{place / MANIFEST_FILE} is not a manifest: {type(error).__name__}"
        ) from None


def read_manifest(place: Path) -> bytes | None:
    """The bytes of a checkpoint's manifest; None when it has none. Raises OSError, ValueError where
    it is too large.
    """
    try:
        descriptor = os.open(place / MANIFEST_FILE, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        content = stream.read(LARGEST_MANIFEST + 1)
    if len(content) > LARGEST_MANIFEST:
        raise ValueError(f"it is larger than {LARGEST_MANIFEST >> 20} MiB")
    return content


def _size_faults(place: Path, manifest: Manifest, sizes: Mapping[str, int]) -> Iterable[str]:
    for entry in manifest.files:
        size = sizes.get(entry.path)
        if size is None:  # behind a link, in a folder that cannot be read, or not there
            try:
                size = (place / entry.path).stat().st_size
            except (OSError, ValueError) as error:
                yield f"{entry.path}: {getattr(error, 'strerror', None) or error}"
                continue
        if size != entry.bytes:
            yield f"{entry.path}: {size} bytes, the manifest says {entry.bytes}"


def _shortened(faults: Sequence[str]) -> tuple[str, ...]:
    if len(faults) <= FAULTS_KEPT:
        return tuple(faults)
    return (
        *faults[: FAULTS_KEPT - 1],
        f"and {counted(len(faults) - FAULTS_KEPT + 1, 'more file')}",
    )


def _layout(tree: Tree | None) -> Layout:
    form = None if tree is None else format_of(tree.sizes)
    if form is None:
        return "unknown"
    return form.name


def _without(
    place: Path, step: int, is_latest: bool, tree: Tree | None, manifest: ManifestState, fault: str
) -> SavedCheckpoint | None:
    """A checkpoint of which only the files are known; None when it has gone meanwhile."""
    try:
        created = place.stat().st_mtime
        identity = ""
        if tree is not None and manifest in {"none", "foreign"}:
            identity = identity_of(place)
    except FileNotFoundError:
        return None
    except OSError:
        created, identity = 0.0, ""
    return SavedCheckpoint(
        step=step,
        path=str(place),
        layout=_layout(tree),
        bytes=0 if tree is None else sum(tree.sizes.values()),
        faults=(fault,) if fault else (),
        is_latest=is_latest,
        created=created,
        identity=identity,
        files=0 if tree is None else len(tree.sizes),
        manifest=manifest,
        is_link=place.is_symlink(),
        changed=tree.changed if tree is not None and tree.is_whole else None,
    )
