"""Arrays on disk that one process computes and many read: named after their inputs, complete or
absent, checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict

from trainer.contract.errors import DataError
from trainer.contract.files import write_json
from trainer.contract.manifest import file_digest
from trainer.contract.record import JsonObject, Record
from trainer.contract.sharing import make_shared
from trainer.contract.state_file import read_json
from trainer.data.errors import explain_os_errors

# How long a process that did not compute them waits for the files to appear: shared file systems
# show them late.
APPEARANCE_SECONDS = 30.0


class CacheKey(Record):
    """Everything that some arrays are a function of."""

    @property
    def stem(self) -> str:
        """Beginning of the files' names; differs whenever any field does."""
        raise NotImplementedError


def key_digest(key: CacheKey) -> str:
    """A digest of all fields of a key, for its stem."""
    return hashlib.blake2b(
        json.dumps(asdict(key), sort_keys=True).encode(), digest_size=8
    ).hexdigest()


class ArrayCache(Record):
    """A folder of arrays: one `.npy` for each part of a key and, written last, one `.json` with
    sizes and digests.
    """

    folder: Path

    def record_path(self, key: CacheKey) -> Path:
        """The file whose existence says that all parts are complete."""
        return self.folder / f"{key.stem}.json"

    def part_path(self, key: CacheKey, part: str) -> Path:
        """The file of one part."""
        return self.folder / f"{key.stem}_{part}_idx.npy"

    def load(
        self, key: CacheKey, parts: tuple[str, ...], check_digests: bool
    ) -> tuple[npt.NDArray[Any], ...] | None:
        """The memory-mapped parts; None when they are absent or damaged in any way, and so must be
        computed.

        Sizes, types and shapes are always compared with the record; contents only when
        `check_digests`.
        """
        try:
            record = read_json(self.record_path(key))
            if record is None or record.get("key") != json.loads(json.dumps(asdict(key))):
                return None
            return tuple(
                self._load_part(key, part, record["files"][part], check_digests) for part in parts
            )
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None

    def _load_part(
        self, key: CacheKey, part: str, entry: JsonObject, check_digest: bool
    ) -> npt.NDArray[Any]:
        path = self.part_path(key, part)
        if path.stat().st_size != entry["bytes"] or (
            check_digest and file_digest(path) != entry["digest"]
        ):
            raise ValueError(f"{path} is not the file that was written")
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
            raise ValueError(f"{path} is not the array that was written")
        return array

    def write(self, key: CacheKey, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write all parts, then the record. Raises DataError when the disk does not allow it."""
        with explain_os_errors("writing index maps to", self.folder):
            make_shared(self.folder)
            self.record_path(key).unlink(missing_ok=True)
            files = {
                part: self._write_part(self.part_path(key, part), array)
                for part, array in arrays.items()
            }
            write_json(self.record_path(key), {"key": asdict(key), "files": files})

    def _write_part(self, path: Path, array: npt.NDArray[Any]) -> JsonObject:
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

    def wait(
        self, key: CacheKey, parts: tuple[str, ...], seconds: float = APPEARANCE_SECONDS
    ) -> tuple[npt.NDArray[Any], ...]:
        """The parts that the builder computed. Raises DataError when they do not appear in time."""
        deadline = time.monotonic() + seconds
        while True:
            arrays = self.load(key, parts, check_digests=False)
            if arrays is not None:
                return arrays
            if time.monotonic() > deadline:
                raise DataError(
                    f"the index maps {self.record_path(key)} did not appear: the rank that builds them failed (see its"
                    " error), or this node does not see that folder; use a folder that all nodes share"
                )
            time.sleep(0.2)


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
