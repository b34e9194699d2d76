"""Index maps and the order of mixtures on disk: arrays that one rank computes and all read, named
after everything they depend on, complete or absent, checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainer.contract.documents import document, record_of
from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.files import make_shared, write_json
from trainer.contract.manifest import file_digest
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json
from trainer.data.blend import build_blend
from trainer.data.index import LAST_EPOCH_SHARE, build_index_maps
from trainer.data.indexed import IndexedDataset

# Raised by one whenever the maths changes, so that nothing of older maths is found.
MAPS_REVISION = 1
BLEND_REVISION = 1
# How long a process that did not compute them waits for the files to appear: shared file systems
# show them late.
APPEARANCE_SECONDS = 30.0

Arrays = tuple[npt.NDArray[Any], ...]


class CacheKey(Record):
    """Everything that some arrays, whose names are `parts`, are a function of."""

    parts: ClassVar[tuple[str, ...]]

    name: str
    samples: int

    @property
    def label(self) -> str:
        """What of it people read in the files' names."""
        raise NotImplementedError

    @property
    def stem(self) -> str:
        """Beginning of the files' names: the label, then a digest of all of the key."""
        text = json.dumps(document(self), sort_keys=True)
        return f"{self.label}_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def record_path(self, folder: Path) -> Path:
        """The file whose existence says that all parts are complete."""
        return folder / f"{self.stem}.json"

    def part_path(self, folder: Path, part: str) -> Path:
        """The file of one part."""
        return folder / f"{self.stem}_{part}_idx.npy"


class MapsKey(CacheKey):
    """What every kind of maps depends on.

    `sizes_digest` stands for the data: the maps depend on nothing of it but the lengths of the
    documents in the range.
    """

    data_set: str
    seed: int
    first_document: int
    end_document: int
    sizes_digest: str

    def build(self, data: IndexedDataset) -> Arrays:
        """The maps, in the order of `parts`. Raises DataError when the data does not allow it."""
        raise NotImplementedError


class IndexMapsKey(MapsKey):
    """Everything that the three index maps of a GPT are a function of."""

    parts = ("doc", "sample", "shuffle")

    sequence_length: int
    last_epoch_share: float = LAST_EPOCH_SHARE
    revision: int = MAPS_REVISION

    @property
    def label(self) -> str:
        size = f"{self.samples}ns_{self.sequence_length}sl_{self.seed}s"
        return f"{self.data_set}_{self.name}_indexmap_{size}"

    def build(self, data: IndexedDataset) -> Arrays:
        maps = build_index_maps(
            data.sizes,
            range(self.first_document, self.end_document),
            samples=self.samples,
            sequence_length=self.sequence_length,
            seed=self.seed,
            last_epoch_share=self.last_epoch_share,
        )
        return maps.documents, maps.samples, maps.shuffle


class BlendKey(CacheKey):
    """Everything that the order of a mixture is a function of: the weights, in their order, and its
    length.
    """

    parts = ("set", "number")

    weights: tuple[float, ...]
    revision: int = BLEND_REVISION

    @property
    def label(self) -> str:
        return f"{self.name}_blend_{len(self.weights)}sets_{self.samples}ns"

    def build(self) -> Arrays:
        """For each sample the member and its number there. That of a long training takes half a
        minute to compute, and no time to map.
        """
        return build_blend(self.weights, self.samples)


def digest_sizes(sizes: npt.NDArray[Any], documents: range) -> str:
    """Digest of the lengths of a range of documents (little-endian int32), whatever type they are
    stored in.
    """
    digest = hashlib.blake2b(digest_size=16)
    for first in range(documents.start, documents.stop, 1 << 20):
        block = sizes[first : min(first + (1 << 20), documents.stop)]
        digest.update(np.asarray(block).astype("<i4").tobytes())
    return digest.hexdigest()


def ensure_arrays(folder: Path, key: CacheKey, build: Callable[[], Iterable[Any]]) -> bool:
    """Build the arrays unless sound ones are there; True when they were built. For the one rank
    that builds.

    Raises DataError when the data or the disk does not allow it.
    """
    if load_arrays(folder, key, check_digests=True) is not None:
        return False
    arrays = build()
    record = key.record_path(folder)
    with explain_os_errors("writing index maps to", folder):
        make_shared(folder)
        record.unlink(missing_ok=True)
        files = {
            part: _write_part(key.part_path(folder, part), array)
            for part, array in zip(key.parts, arrays, strict=True)
        }
        write_json(record, {"key": document(key), "files": files})
    return True


def wait_for_arrays(folder: Path, key: CacheKey, seconds: float = APPEARANCE_SECONDS) -> Arrays:
    """The arrays that the builder computed. Raises DataError when they do not appear in time."""
    deadline = time.monotonic() + seconds
    while True:
        arrays = load_arrays(folder, key, check_digests=False)
        if arrays is not None:
            return arrays
        if time.monotonic() > deadline:
            raise DataError(
                f"the index maps {key.record_path(folder)} did not appear: the rank that builds them failed (see its"
                " error), or this node does not see that folder; use a folder that all nodes share"
            )
        time.sleep(0.2)


def load_arrays(folder: Path, key: CacheKey, check_digests: bool) -> Arrays | None:
    """The memory-mapped arrays; None when they are absent or damaged in any way, and so must be
    computed.

    Sizes, types and shapes are always compared with the record; contents only when `check_digests`.
    """
    try:
        record = read_json(key.record_path(folder))
        if record is None or record_of(type(key), record["key"]) != key:
            return None
        return tuple(
            _load_part(key.part_path(folder, part), record["files"][part], check_digests)
            for part in key.parts
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _load_part(path: Path, entry: JsonObject, check_digest: bool) -> npt.NDArray[Any]:
    if path.stat().st_size != entry["bytes"] or (
        check_digest and file_digest(path) != entry["digest"]
    ):
        raise ValueError(f"{path} is not the file that was written")
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
        raise ValueError(f"{path} is not the array that was written")
    return array


def _write_part(path: Path, array: npt.NDArray[Any]) -> JsonObject:
    with _replacing(path) as temporary:
        with temporary.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        return {
            "bytes": temporary.stat().st_size,
            "digest": file_digest(temporary),
            "shape": list(array.shape),
            "dtype": str(array.dtype),
        }


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and goes away
    when it does not.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o664)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
