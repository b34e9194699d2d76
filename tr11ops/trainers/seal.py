"""Which files of a held checkpoint are for certain still those whose digests were read.

    state/checkpoints/VARIANT/seals/global_stepN.json

Written when the digests of a checkpoint are known, and for links alone: what lies there is then the
trainer's own file, with its inode, its size, its time of writing, and the time of the last change that
the kernel keeps of it (ctime).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.observed import replace_json
from tr11ops.rundir.copies import identity_of
from tr11ops.trainers.held import Origin
from trainer.contract.checkpoint_formats import FOREIGN
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document, read_record
from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths
from trainer.contract.record import Count, Record

SCHEMA = 1


class SealedFile(Record):
    """One file at the moment of the seal: `modified` and `changed` (ctime) in nanoseconds since the
    epoch; `names`: how many it has.
    """

    path: str
    inode: int
    bytes: Count
    modified: int
    changed: int
    names: Count

    @classmethod
    def of(cls, home: Path, path: str) -> SealedFile:
        """Raises OSError."""
        facts = (home / path).stat()
        return cls(
            path,
            facts.st_ino,
            facts.st_size,
            modified=facts.st_mtime_ns,
            changed=facts.st_ctime_ns,
            names=facts.st_nlink,
        )

    def has_lost_a_name(self, now: SealedFile) -> bool:
        """Whether nothing but the removal of a name has changed since."""
        return (
            replace(now, changed=self.changed, names=self.names) == self and now.names < self.names
        )


class Seal(Record):
    """Of one held checkpoint, by its identity."""

    identity: str
    files: tuple[SealedFile, ...]
    schema: int = SCHEMA


def seal(paths: RunPaths, origin: Origin) -> None:
    """Put on record how the files lie there; for who knows that their bytes are those of the
    manifest, and that no one has written to them since. Raises OSError, also where a newer tr11 has written the seal.
    """
    home = paths.checkpoint(origin.step)
    linked = [f"{FOREIGN}/{one.path}" for one in origin.files if one.linked]
    files = tuple(SealedFile.of(home, path) for path in linked)
    _write(paths, origin.step, Seal(identity_of(home), files))


def sealed_files(paths: RunPaths, step: int) -> frozenset[str]:
    """The files of a held checkpoint, by their paths in its folder, whose bytes need not be read again.

    That is safe: their digests were read whole once, when they were sealed, and since then neither
    inode nor ctime has changed. Nothing can write to a file, cut it, or set its times back without
    a new ctime, which no program can set. A copy is not among them, nor what was restored, nor what
    has another ctime for whatever reason: these are read.
    """
    home, found = paths.checkpoint(step), _read(paths, step)
    if found is None:
        return frozenset()
    still = set()
    for one in found.files:
        with suppress(OSError):
            now = SealedFile.of(home, one.path)
            if replace(now, names=one.names) == one:
                still.add(one.path)
    return frozenset(still)


def renew(paths: RunPaths, step: int) -> None:
    """Seal again where the trainer has removed its own name of a file, which changes the file's ctime
    and nothing else: for who looks often, while the trainer runs.
    """
    home = paths.checkpoint(step)
    with suppress(OSError):
        found = _read(paths, step)
        if found is None:
            return
        now = tuple(SealedFile.of(home, one.path) for one in found.files)
        pairs = zip(found.files, now, strict=True)
        files = tuple(after if before.has_lost_a_name(after) else before for before, after in pairs)
        if files != found.files:
            _write(paths, step, replace(found, files=files))


def _read(paths: RunPaths, step: int) -> Seal | None:
    """The seal of what is held of this step now; None where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        path = paths.seal_record(checkpoint_name(step))
        found = read_record(Seal, path, "a seal", SCHEMA)
        if found is not None and found.identity == identity_of(paths.checkpoint(step)):
            return found
    return None


def _write(paths: RunPaths, step: int, value: Seal) -> None:
    path = paths.seal_record(checkpoint_name(step))
    make_shared(path.parent)
    replace_json(path, document(value), SCHEMA)
