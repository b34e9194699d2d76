"""Checkpoints of a few kilobytes, and an archive whose far side misbehaves on demand."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.backup.base import ARCHIVE_RETRIES, Archive, Pieces, RemoteFile, Unread
from tr11ops.backup.copying import copy_source
from tr11ops.backup.folder import FolderArchive, Owner
from tr11ops.backup.source import read_source
from tr11ops.backup.transfer import Transfer
from tr11ops.rundir.copies import Receipt, location_of
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.manifest import FileEntry, Manifest, file_digest

RUN, VARIANT = "tr11-test", "main"
SIZES = {
    "weights/__0_0.distcp": 70_001,
    "weights/.metadata": 900,
    "optimizer/__0_0.distcp": 140_000,
    "optimizer/__1_0.distcp": 65_536,
    "optimizer/.metadata": 1200,
    "rng/rank_0.pt": 0,
    "cursor.json": 120,
}


def make_checkpoint(
    variant_folder: Path, step: int = 100, sizes: dict[str, int] | None = None, seed: int = 0
) -> Path:
    """A checkpoint of random bytes with its manifest."""
    chance = random.Random(f"{step} {seed}")
    folder = variant_folder / checkpoint_name(step)
    entries = []
    for path, size in (SIZES if sizes is None else sizes).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(chance.randbytes(size))
        entries.append(FileEntry(path, size, file_digest(place)))
    Manifest(
        step=step, consumed_samples=step, consumed_tokens=step, files=tuple(entries), topology={"tensor": 1}, model={},
        run_card_hash=f"seed {seed}", created=1_650_000_000.0,
    ).write(folder)  # fmt: skip
    return folder


def make_archive(folder: Path, **options: Any) -> FolderArchive:
    folder.mkdir(exist_ok=True)
    return FolderArchive(folder, "store", Owner(RUN), **options)


def quick(**changes: Any) -> Transfer:
    """Settings that wait for nothing and cut every file into several pieces."""
    return Transfer(
        **{
            "parallel": 4,
            "piece_bytes": 16_384,
            "retries": replace(ARCHIVE_RETRIES, first_seconds=0.0),
            **changes,
        }
    )


def copy(
    archive: Archive, folder: Path, transfer: Transfer | None = None, **options: Any
) -> Receipt:
    given: dict[str, Any] = {
        "kind": "full",
        "run": RUN,
        "variant": VARIANT,
        "transfer": transfer or quick(),
        **options,
    }
    step = int(folder.name.removeprefix("global_step"))
    source, base = (
        read_source(folder, step, given["kind"]),
        location_of(given["kind"], given["variant"], step),
    )
    return copy_source(archive, source, base=base, **given)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class OddArchive:
    """Passes everything on to a real archive, and calls `on(what, path, position)` before, which
    may raise.

    `spoil(path, content)` may change what is read back.
    """

    def __init__(
        self,
        archive: Archive,
        on: Callable[[str, str, int], None] = lambda what, path, position: None,
        spoil: Callable[[str, bytes], bytes] = lambda path, content: content,
        renames: bool | None = None,
    ) -> None:
        self.name, self.address = archive.name, archive.address
        self.renames = archive.renames if renames is None else renames
        self.calls: list[tuple[str, str]] = []
        self._archive, self._on, self._spoil = archive, on, spoil
        self._lock = threading.Lock()

    def _call(self, what: str, path: str, position: int = 0) -> None:
        with self._lock:
            self.calls.append((what, path))
            self._on(what, path, position)

    def look(self, path: str) -> RemoteFile | None:
        self._call("look", path)
        return self._archive.look(path)

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        self._call("list", folder)
        return self._archive.list(folder, unread)

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        self._call("upload", path)

        def watched(offset: int) -> Iterator[bytes]:
            for piece in pieces(offset):
                self._call("write", path, offset)
                yield piece
                offset += len(piece)
            self._call("finish", path, offset)

        self._archive.upload(path, size, identity, watched)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        self._call("read", path, offset)
        position = offset
        for piece in self._archive.read(path, offset, length):
            for begin in range(0, len(piece), 10_000):
                part = self._spoil(path, piece[begin : begin + 10_000])
                self._call("piece", path, position)
                position += len(part)
                yield part

    def put(self, path: str, content: bytes) -> None:
        self._call("put", path)
        self._archive.put(path, content)

    def move(self, path: str, to: str) -> None:
        self._call("move", path)
        self._archive.move(path, to)

    def free_bytes(self) -> int | None:
        return self._archive.free_bytes()

    def sweep(self, older_than: float) -> int:
        return self._archive.sweep(older_than)

    def close(self) -> None:
        self._archive.close()
