"""What is true of checkpoints and copies, read from the bytes alone: no record, receipt or manifest
is believed.

A `Saved` is what the walk itself read right after a save. Whether it is still somewhere is decided
by comparing bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tests.plugins.object_store_fixture import ObjectStore
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.record import Record

Prints: TypeAlias = Mapping[str, str]  # path to digest
RECEIPT = ".copy.json"


class Saved(Record):
    """One checkpoint as it was saved: the digests of all its files. `token`: of its tensors;
    `layers`: of its model.
    """

    step: int
    token: int
    is_whole: bool
    layers: int
    files: Prints

    @property
    def identity(self) -> str:
        """The digest of its manifest, which copies know it by."""
        return self.files[MANIFEST_FILE]

    def is_in(self, *found: Prints) -> bool:
        """Whether all its bytes are among these, each file in any of them."""
        return all(
            any(prints.get(path) == print_ for prints in found)
            for path, print_ in self.files.items()
        )

    def __str__(self) -> str:
        return f"step {self.step} ({'whole' if self.is_whole else 'weights alone'}, token {self.token})"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def prints_of(folder: Path) -> Prints:
    """Digests of all files below a folder."""
    return {name: digest(content) for name, content in _read(folder).items()}


def folders_of(checkpoints: Path) -> dict[str, Prints]:
    """Every folder beside the checkpoints, under whatever name."""
    if not checkpoints.is_dir():
        return {}
    return {
        entry.name: prints_of(entry) for entry in sorted(checkpoints.iterdir()) if entry.is_dir()
    }


def _read(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# ----------------------------------------------------------------------------- archives
class Shelf(Protocol):
    """The bytes of one archive, past all code that is under test."""

    def contents(self) -> dict[str, bytes]: ...
    def replace(self, name: str, content: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


@dataclass
class FolderShelf:
    """An archive that is a folder. While its file system is not mounted, all lies in `away`."""

    root: Path

    @property
    def away(self) -> Path:
        return self.root.with_name(f"{self.root.name}-unmounted")

    @property
    def place(self) -> Path:
        return self.away if self.away.exists() else self.root

    def contents(self) -> dict[str, bytes]:
        return _read(self.place)

    def replace(self, name: str, content: bytes) -> None:
        (self.place / name).write_bytes(content)

    def remove(self, name: str) -> None:
        (self.place / name).unlink()


@dataclass
class BucketShelf:
    """A folder of a bucket. An object is read again only when the server says that it is another."""

    bucket: ObjectStore
    prefix: str
    _known: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def contents(self) -> dict[str, bytes]:
        found = {}
        for name, mark in self.bucket.marks().items():
            if name.startswith(self.prefix):
                if (name, mark) not in self._known:
                    self._known[name, mark] = self.bucket.content(name)
                found[name.removeprefix(self.prefix)] = self._known[name, mark]
        return found

    def replace(self, name: str, content: bytes) -> None:
        self.bucket.replace(self.prefix + name, content)

    def remove(self, name: str) -> None:
        self.bucket.remove(self.prefix + name)


class Copy(Record):
    """What lies at one place of an archive, and the identity that its receipt claims ("" without a
    readable one).
    """

    identity: str
    files: Prints


def copies_in(contents: Mapping[str, bytes]) -> dict[str, Copy]:
    """The copies of an archive by place, without the ending of a tar; unfinished ones among them."""
    receipts = {name: _receipt(text) for name, text in contents.items() if name.endswith(RECEIPT)}
    places = {name.removesuffix(RECEIPT) for name in receipts}
    places |= {
        name.removesuffix(".tar")
        for name in contents
        if name.endswith(".tar") or ".tar.partial-" in name
    }
    places |= {
        "/".join(name.split("/")[:3])
        for name in contents
        if name.startswith("checkpoints/") and name.count("/") > 2
    }
    found = {}
    for place in sorted(places):
        receipt = receipts.get(f"{place}{RECEIPT}", {})
        inside, tar = f"{place}/", contents.get(f"{place}.tar", contents.get(place))
        files = {
            name.removeprefix(inside): digest(text)
            for name, text in contents.items()
            if name.startswith(inside)
        }
        found[place] = Copy(
            str(receipt.get("identity", "")), files if tar is None else _of_tar(tar, receipt)
        )
    return found


def _receipt(content: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _of_tar(content: bytes, receipt: Mapping[str, Any]) -> Prints:
    """By the places that a receipt names, without one by the tar's own headers. What is there is
    compared with what was saved, not with either.
    """
    files = [(file["path"], file["offset"], file["bytes"]) for file in receipt.get("files", ())]
    return {
        path: digest(content[begin : begin + size])
        for path, begin, size in files or _members(content)
    }


def _members(content: bytes) -> Iterator[tuple[str, int, int]]:
    """Path, first byte and size of each file of a tar, up to where it cannot be read."""
    with suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            yield member.name.partition("/")[2], member.offset_data, member.size
