"""One process writes a whole topology-free checkpoint from any source of tensors, a piece at a
time.

The folder is the same as `trainer.checkpoint.store.save` makes on many ranks, and torch's own tools
read it: chunks of logical tensors in a few files, an index of them, the manifest last, one rename.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.checkpoint.files import digesting, make_folder
from trainer.checkpoint.publishing import NewCheckpoint, save_alone
from trainer.checkpoint.save_plan import INDEX_FILE
from trainer.checkpoint.sharded_files import STEP_KEY
from trainer.checkpoint.source import PARTS, Part, TensorFacts, TensorSource, read_finite
from trainer.contract.checkpoint_formats import OPTIMIZER
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry
from trainer.contract.record import Record

CHUNK_BYTES = 256 << 20
FILE_BYTES = 16 << 30

OnBytes = Callable[[int], None]


def write_checkpoint(
    new: NewCheckpoint, source: TensorSource, *, on_bytes: OnBytes = lambda count: None
) -> Path:
    """Write all tensors of `source` as a checkpoint; returns its own folder.

    Holds one chunk (CHUNK_BYTES, or one row of a tensor where that is larger) in memory at a time. A source without an
    optimizer gives a checkpoint of weights alone. Without random state among the extras a load derives random streams
    again. `on_bytes` is told of each chunk written (`source_bytes` in all).
    Leaves alone what other savers have in the folder. Raises CheckpointError when the step exists already, when the
    source is damaged or holds NaN or infinity, or when the disk refuses; nothing of the new checkpoint is then left.
    """

    def write(partial: Path) -> list[FileEntry]:
        return [entry for part in PARTS for entry in _write_part(partial, part, source, on_bytes)]

    return save_alone(new, write)


def source_bytes(source: TensorSource) -> int:
    """Bytes of all tensors of a source."""
    return sum(tensor_bytes(facts) for part in PARTS for facts in source.tensors(part).values())


def tensor_bytes(facts: TensorFacts) -> int:
    """Bytes of one tensor."""
    return math.prod(facts.shape) * facts.dtype.itemsize


def row_blocks(
    facts: TensorFacts, most_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """`blocks_of` a tensor, none above `most_bytes` unless one row is."""
    return blocks_of(facts.shape, most_bytes // facts.dtype.itemsize)


def blocks_of(
    shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of blocks of whole rows that tile a tensor in order, none of more than
    `most` elements unless one row has.

    A tensor without dimensions or elements is one block.
    """
    if not math.prod(shape) or not shape:
        yield (0,) * len(shape), shape
        return
    rows = shape[0]
    rest = shape[1:]
    height = max(1, most // math.prod(rest))
    for top in range(0, rows, height):
        yield (top, *(0 for _ in rest)), (min(height, rows - top), *rest)


class _Chunk(Record):
    """One block of one tensor: what is written at a time."""

    key: str
    facts: TensorFacts
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _write_part(
    partial: Path, part: Part, source: TensorSource, on_bytes: OnBytes
) -> list[FileEntry]:
    """Write one folder of a checkpoint, which a source may lack; returns the entries of its files."""
    tensors = source.tensors(part)
    if not tensors:
        return []
    make_folder(partial / part)
    step = torch.tensor(source.facts.optimizer_step)
    chunks = [
        _Chunk(key, facts, *block)
        for key, facts in tensors.items()
        for block in row_blocks(facts, CHUNK_BYTES)
    ]
    if part == OPTIMIZER:
        chunks.append(_Chunk(STEP_KEY, TensorFacts((), step.dtype), (), ()))
    places: dict[MetadataIndex, _StorageInfo] = {}
    entries = []
    for number, group in enumerate(_files(chunks)):
        # how torch.distributed.checkpoint names the files of its first rank
        name = f"__0_{number}.distcp"
        with digesting(partial / part / name) as stream:
            for chunk in group:
                begin = stream.tell()
                if chunk.key == STEP_KEY:
                    tensor = step
                else:
                    tensor = _read(source, part, chunk)
                torch.save(tensor, cast(IO[bytes], stream))
                places[MetadataIndex(chunk.key, chunk.offsets)] = _StorageInfo(
                    name, begin, stream.tell() - begin
                )
                on_bytes(tensor.numel() * tensor.element_size())
        entries.append(stream.entry(f"{part}/{name}"))
    with digesting(partial / part / INDEX_FILE) as stream:
        pickle.dump(_metadata(chunks, places), cast(IO[bytes], stream))
    return [*entries, stream.entry(f"{part}/{INDEX_FILE}")]


def _files(chunks: list[_Chunk]) -> Iterator[list[_Chunk]]:
    """Deal the chunks to files in order, a new file whenever one has reached FILE_BYTES."""
    group: list[_Chunk] = []
    held = 0
    for chunk in chunks:
        group.append(chunk)
        held += math.prod(chunk.sizes) * chunk.facts.dtype.itemsize
        if held >= FILE_BYTES:
            yield group
            group = []
            held = 0
    if group:
        yield group


def _read(source: TensorSource, part: Part, chunk: _Chunk) -> Tensor:
    """One chunk from its source, in a storage no larger than itself, because the whole storage is
    written.
    """
    tensor = read_finite(source, part, chunk.key, offsets=chunk.offsets, sizes=chunk.sizes)
    if tuple(tensor.shape) != chunk.sizes or tensor.dtype != chunk.facts.dtype:
        raise CheckpointError(
            f"{chunk.key} at {chunk.offsets} is {tuple(tensor.shape)} {tensor.dtype}, its source announced "
            f"{chunk.sizes} {chunk.facts.dtype}"
        )
    tensor = tensor.contiguous()
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if own:
        return tensor
    return tensor.clone()


def _metadata(chunks: list[_Chunk], places: dict[MetadataIndex, _StorageInfo]) -> Metadata:
    """The index of a folder, as torch.distributed.checkpoint writes it."""
    index: dict[str, TensorStorageMetadata] = {}
    for chunk in chunks:
        stored = index.setdefault(
            chunk.key,
            TensorStorageMetadata(
                TensorProperties(dtype=chunk.facts.dtype), torch.Size(chunk.facts.shape), []
            ),
        )
        stored.chunks.append(
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        )
    return Metadata(
        dict(index), storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
