"""One process reads any rectangle of any tensor of a checkpoint, without a process group and
without loading it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from trainer.checkpoint.deepspeed.layout import open_deepspeed_layout
from trainer.checkpoint.save_plan import INDEX_FILE
from trainer.checkpoint.sharded_files import STEP_KEY, tiling_fault
from trainer.checkpoint.source import PARTS, CheckpointFacts, Part, TensorFacts, TensorSource
from trainer.contract.checkpoint_formats import (
    CURSOR_FILE,
    DEEPSPEED,
    MANIFEST_FILE,
    OPTIMIZER,
    OWN,
    WEIGHTS,
    format_at,
    part_prefixes,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.parallel.agreement import one_line

T = TypeVar("T")

_PIECE_BYTES = 64 << 20  # read at once when only a part of each row is wanted


def open_checkpoint(place: Path) -> TensorSource:
    """Open the checkpoint folder `place` (a `global_stepN`), of either layout. Reads its indexes,
    not its tensors.

    A folder without optimizer/ is a weights-only copy. Raises CheckpointError, naming the file,
    when it is not a checkpoint, not complete, or damaged as far as sizes and indexes tell (digests:
    `check_digests`).
    """
    return READERS[format_at(place).name](place)


def check_digests(
    place: Path, part: Part, on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Read every byte of one part of a checkpoint with a manifest, and compare it with the
    manifest's digests.

    `on_bytes` is told the size of each file read. Raises CheckpointError with the first file that
    differs.
    """
    for entry in _files_of(read_manifest(place), part):
        if _attempt(place / entry.path, file_digest) != entry.digest:
            raise CheckpointError(
                f"{place / entry.path}: its digest differs from the manifest's: it was changed or damaged after it was "
                "saved; restore it from a backup, or use another step"
            )
        on_bytes(entry.bytes)


def part_bytes(place: Path, part: Part) -> int:
    """Bytes of all files of one part, as the manifest says. Raises CheckpointError."""
    return sum(entry.bytes for entry in _files_of(read_manifest(place), part))


def read_manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises CheckpointError when there is none, or a
    damaged one.
    """
    if not place.is_dir():
        raise CheckpointError(
            f"{place} is not a folder; give the folder of a checkpoint (global_stepN)"
        )
    try:
        manifest = Manifest.read(place)
    except ValueError as error:
        raise CheckpointError(one_line(error)) from None
    if manifest is None:
        raise CheckpointError(
            f"{place} has no {MANIFEST_FILE}, so it is no checkpoint or not complete; use another step"
        )
    if manifest.foreign is not None:
        held = manifest.foreign
        raise CheckpointError(
            f"{place} is {held.name} of another trainer ({held.dialect}), which alone loads it; use another step"
        )
    return manifest


class StoredCheckpoint:
    """A topology-free checkpoint (see `trainer.checkpoint.store`) as a `TensorSource`."""

    def __init__(self, place: Path):
        """Raises CheckpointError as `open_checkpoint` says."""
        manifest = read_manifest(place)
        self._parts: dict[str, _StoredPart] = {}
        for name in PARTS:
            entries = _files_of(manifest, name)
            if name == WEIGHTS or (entries and (place / name).is_dir()):
                _check_sizes(place, entries)
                self._parts[name] = _StoredPart(place / name)
        cursor = _attempt(
            place / CURSOR_FILE, lambda path: json.loads(path.read_text(encoding="utf-8"))
        )
        if not isinstance(cursor, dict):
            raise CheckpointError(
                f"{place / CURSOR_FILE} does not hold a JSON object; restore it or use another step"
            )
        optimizer = self._parts.get(OPTIMIZER)
        step = optimizer.read(STEP_KEY, (), ()) if optimizer and STEP_KEY in optimizer.index else 0
        self._facts = CheckpointFacts(
            step=manifest.step,
            layout="tr11",
            topology=dict(manifest.topology),
            model=dict(manifest.model),
            cursor=cursor,
            optimizer_step=int(step),
        )

    @property
    def facts(self) -> CheckpointFacts:
        return self._facts

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        if part not in self._parts:
            return {}
        return {
            key: TensorFacts(tuple(stored.size), stored.properties.dtype)
            for key, stored in sorted(self._parts[part].index.items())
            if key != STEP_KEY
        }

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if part not in self._parts or key not in self._parts[part].index:
            raise CheckpointError(
                f"the checkpoint of step {self._facts.step} has no {key} among its {part}"
            )
        return self._parts[part].read(key, offsets, sizes)


READERS: Mapping[str, Callable[[Path], TensorSource]] = {
    OWN.name: StoredCheckpoint,
    DEEPSPEED.name: open_deepspeed_layout,
}
"""What opens the checkpoint of a step, by its format."""


class _StoredPart:
    """One folder written by torch.distributed.checkpoint: chunks of tensors inside a few large
    files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        path = folder / INDEX_FILE
        metadata = _attempt(path, lambda _: FileSystemReader(folder).read_metadata())
        self.index = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        for key, stored in self.index.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(
                    f"{path}: {key} is not a tensor; this folder was not written by tr11"
                )
            fault = tiling_fault(key, stored)
            if fault:
                raise CheckpointError(f"{path}: {fault}; use another step")

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        stored = self.index[key]
        if len(offsets) != len(stored.size) or any(
            begin < 0 or size < 0 or begin + size > full
            for begin, size, full in zip(offsets, sizes, stored.size, strict=True)
        ):
            raise ValueError(
                f"{key} of shape {tuple(stored.size)} has no rectangle {tuple(sizes)} at {tuple(offsets)}"
            )
        target = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            lows = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            highs = [min(a + extent, b + held) for a, extent, b, held in ends]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            wanted = tuple(
                slice(low - at, high - at)
                for low, high, at in zip(lows, highs, chunk.offsets, strict=True)
            )
            goal = tuple(
                slice(low - at, high - at)
                for low, high, at in zip(lows, highs, offsets, strict=True)
            )
            place = self._places[MetadataIndex(key, chunk.offsets)]
            _attempt(
                self._folder / place.relative_path,
                lambda path, place=place, goal=goal, wanted=wanted, chunk=chunk: _copy_chunk(  # type: ignore[misc]
                    path,
                    (place.offset, place.length),
                    tuple(chunk.sizes),
                    wanted=wanted,
                    target=target[goal],
                ),
            )
        return target


def _copy_chunk(
    path: Path,
    place: tuple[int, int],
    shape: tuple[int, ...],
    wanted: tuple[slice, ...],
    target: Tensor,
) -> None:
    """Copy `wanted` of the chunk of `shape` that lies at `place` (offset, bytes) of a file into
    `target`.

    torch.load under a fake mode reads the chunk's description and says where its elements begin;
    only the rows that are wanted are then read, a few at a time when they are wanted in part.
    """
    offset, length = place
    with path.open("rb", buffering=0) as stream:
        with FakeTensorMode():
            described = torch.load(
                cast(IO[bytes], _Window(stream, offset, length)), weights_only=True
            )
        if (
            tuple(described.shape) != shape
            or described.dtype != target.dtype
            or not described.is_contiguous()
        ):
            raise CheckpointError(
                f"{path}: what lies at byte {offset} is not the tensor that the index describes"
            )
        begin = offset + described.untyped_storage()._checkpoint_offset
        begin += described.storage_offset() * described.element_size()
        row_bytes = math.prod(shape[1:]) * target.element_size()
        if wanted:
            first = wanted[0].start
            last = wanted[0].stop
        else:
            first = 0
            last = 1
        whole_rows = all(
            part.stop - part.start == size for part, size in zip(wanted[1:], shape[1:], strict=True)
        )
        if whole_rows and target.is_contiguous():
            _read_into(stream, begin + first * row_bytes, target)
            return
        height = max(1, _PIECE_BYTES // max(1, row_bytes))
        for top in range(first, last, height):
            bottom = min(last, top + height)
            rows = torch.empty((bottom - top, *shape[1:]), dtype=target.dtype)
            _read_into(stream, begin + top * row_bytes, rows)
            target[top - first : bottom - first].copy_(rows[(slice(None), *wanted[1:])])


def _read_into(stream: io.FileIO, offset: int, target: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from `offset` on. Raises EOFError when there are too
    few.
    """
    if not target.numel():
        return
    view = target.flatten().view(torch.uint8).numpy().data
    stream.seek(offset)
    while view:
        count = stream.readinto(view[: 1 << 30])
        if not count:
            raise EOFError("the file ends inside a tensor")
        view = view[count:]


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, stream: io.FileIO, offset: int, length: int):
        super().__init__()
        self._stream = stream
        self._offset, self._length, self._position = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._stream.seek(self._offset + self._position)
        count = self._stream.readinto(view)
        self._position += count
        return count


def _files_of(manifest: Manifest, part: Part) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.path.startswith(part_prefixes(part))]


def _check_sizes(place: Path, entries: Sequence[FileEntry]) -> None:
    if not entries:
        raise CheckpointError(
            f"{place / MANIFEST_FILE} lists no file of {WEIGHTS}/; use another step"
        )
    for entry in entries:
        path = place / entry.path
        size = _attempt(path, lambda path: path.stat().st_size)
        if size != entry.bytes:
            raise CheckpointError(
                f"{path}: {size} bytes, the manifest says {entry.bytes}; restore it from a backup or use another step"
            )


def _attempt(path: Path, action: Callable[[Path], T]) -> T:
    """`action(path)`; what goes wrong is said as one CheckpointError that names the file."""
    try:
        return action(path)
    except (CheckpointError, MemoryError):
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; restore it from a backup or use another step"
        ) from None
    except Exception as error:  # a damaged file makes the unpicklers beneath raise almost anything
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}); restore it from a backup or use another step"
        ) from error
