"""Index maps on disk: built by one rank, named after everything they depend on, checked before use."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract import file_digest, read_json, write_json
from trainer.data.errors import DataError, explain_os_errors
from trainer.data.index import LAST_EPOCH_SHARE, IndexMaps, build_index_maps

# Raised by one whenever the maths of the maps changes, so that no map of older maths is found.
MAPS_REVISION = 1
PARTS = ("doc", "sample", "shuffle")
# How long a rank that did not build waits for the files to appear: shared file systems show them late.
APPEARANCE_SECONDS = 30.0


@dataclass(frozen=True)
class IndexMapsKey:
    """Everything that index maps are a function of.

    `sizes_digest` stands for the data: the maps depend on nothing of it but the lengths of the documents in the range.
    """

    data_set: str
    name: str
    samples: int
    sequence_length: int
    seed: int
    first_document: int
    end_document: int
    sizes_digest: str
    last_epoch_share: float = LAST_EPOCH_SHARE
    revision: int = MAPS_REVISION

    @property
    def stem(self) -> str:
        """Beginning of the files' names: readable parts, then a digest of all of the key."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        size = f"{self.samples}ns_{self.sequence_length}sl_{self.seed}s"
        return f"{self.data_set}_{self.name}_indexmap_{size}_{digest}"


def digest_sizes(sizes: npt.NDArray[Any], documents: range) -> str:
    """Digest of the lengths of a range of documents (little-endian int32), whatever type they are stored in."""
    digest = hashlib.blake2b(digest_size=16)
    for first in range(documents.start, documents.stop, 1 << 20):
        block = sizes[first : min(first + (1 << 20), documents.stop)]
        digest.update(np.asarray(block).astype("<i4").tobytes())
    return digest.hexdigest()


class IndexMapsCache:
    """Index maps in one folder: three `.npy` files and, written last, one `.json` with their sizes and digests."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def record_path(self, key: IndexMapsKey) -> Path:
        """The file whose existence says that the three maps are complete."""
        return self.folder / f"{key.stem}.json"

    def part_path(self, key: IndexMapsKey, part: str) -> Path:
        """The file of one map; part is `doc`, `sample` or `shuffle`."""
        return self.folder / f"{key.stem}_{part}_idx.npy"

    def load(self, key: IndexMapsKey, check_digests: bool) -> IndexMaps | None:
        """The memory-mapped maps; None when they are absent or damaged in any way, and so must be built.

        Sizes, types and shapes are always compared with the record; contents only when `check_digests`.
        """
        try:
            record = read_json(self.record_path(key))
            if record is None or record.get("key") != asdict(key):
                return None
            return IndexMaps(*(self._load_part(key, part, record["files"][part], check_digests) for part in PARTS))
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None

    def _load_part(self, key: IndexMapsKey, part: str, entry: dict[str, Any], check_digest: bool) -> npt.NDArray[Any]:
        path = self.part_path(key, part)
        if path.stat().st_size != entry["bytes"] or (check_digest and file_digest(path) != entry["digest"]):
            raise ValueError(f"{path} is not the file that was written")
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
            raise ValueError(f"{path} is not the array that was written")
        return array

    def build(self, key: IndexMapsKey, sizes: npt.NDArray[Any]) -> None:
        """Build the maps of `key` and write them. Raises DataError when the data or the disk does not allow it."""
        maps = build_index_maps(
            sizes,
            range(key.first_document, key.end_document),
            samples=key.samples,
            sequence_length=key.sequence_length,
            seed=key.seed,
            last_epoch_share=key.last_epoch_share,
        )
        with explain_os_errors("writing index maps to", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record_path(key).unlink(missing_ok=True)
            arrays = zip(PARTS, (maps.documents, maps.samples, maps.shuffle), strict=True)
            files = {part: self._write_part(self.part_path(key, part), array) for part, array in arrays}
            write_json(self.record_path(key), {"key": asdict(key), "files": files})

    def _write_part(self, path: Path, array: npt.NDArray[Any]) -> dict[str, Any]:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=self.folder)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o664)
            entry = {
                "bytes": temporary.stat().st_size,
                "digest": file_digest(temporary),
                "shape": list(array.shape),
                "dtype": str(array.dtype),
            }
            temporary.replace(path)
            return entry
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def ensure(self, key: IndexMapsKey, sizes: npt.NDArray[Any]) -> bool:
        """Build the maps unless sound ones are there; True when they were built. For the one rank that builds."""
        if self.load(key, check_digests=True) is not None:
            return False
        self.build(key, sizes)
        return True

    def wait(self, key: IndexMapsKey, seconds: float = APPEARANCE_SECONDS) -> IndexMaps:
        """The maps that the builder made. Raises DataError when they do not appear in time."""
        deadline = time.monotonic() + seconds
        while True:
            maps = self.load(key, check_digests=False)
            if maps is not None:
                return maps
            if time.monotonic() > deadline:
                raise DataError(
                    f"the index maps {self.record_path(key)} did not appear: the rank that builds them failed (see its"
                    " error), or this node does not see that folder; use a folder that all nodes share"
                )
            time.sleep(0.2)


def build_or_load(
    cache: IndexMapsCache,
    key: IndexMapsKey,
    sizes: npt.NDArray[Any],
    is_builder: bool,
    barrier: Callable[[], None],
) -> IndexMaps:
    """The maps of `key`, built by the one rank that `is_builder` and read by all.

    Every rank that takes part in `barrier` must call this; it is reached once by each, also when building fails, so
    that nobody waits for ever. Raises DataError on the builder with the cause, on the others because nothing appeared.
    """
    try:
        if is_builder:
            cache.ensure(key, sizes)
    finally:
        barrier()
    return cache.wait(key)
