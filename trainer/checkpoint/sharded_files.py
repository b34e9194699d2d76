"""Rectangles of logical tensors to and from a folder, through torch.distributed.checkpoint (DCP).

Each rank writes exactly what it holds, as chunks of the logical tensors, into one file; nothing is gathered. The
folder is an ordinary DCP checkpoint, so torch's own tools read it.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.checkpoint.agreement import Crew
from trainer.checkpoint.files import DigestingWriter, digesting
from trainer.checkpoint.state import Fragment, LocalTensor, rectangles
from trainer.contract import FileEntry

STEP_KEY = "optimizer_step"


@dataclass(frozen=True)
class Piece:
    """A rectangle of the logical tensor `key` (of `global_shape`) at `offsets`: a live view of what this rank holds."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    is_owner: bool

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())


def weight_pieces(weights: Iterable[LocalTensor]) -> list[Piece]:
    """One piece for each local weight."""
    return [
        Piece(item.name, tuple(item.global_shape), tuple(item.offsets), item.tensor.detach(), item.is_owner)
        for item in weights
        if item.tensor.numel()
    ]


def fragment_pieces(fragments: Iterable[Fragment]) -> list[Piece]:
    """The rectangles of every fragment, under the key NAME/KIND (for instance `h.0.mlp.weight/exp_avg`).

    Raises ValueError when a view is not 1-D, contiguous and of `numel` elements.
    """
    pieces = []
    for item in fragments:
        for kind, run in item.tensors.items():
            if run.shape != (item.numel,) or not run.is_contiguous():
                raise ValueError(f"{item.name}/{kind} must be a contiguous 1-D view of {item.numel} elements")
            for block in rectangles(item.local_shape, item.start, item.numel):
                offsets = tuple(base + inner for base, inner in zip(item.offsets, block.offsets, strict=True))
                view = run.detach()[block.start : block.start + math.prod(block.sizes)].view(block.sizes)
                pieces.append(Piece(f"{item.name}/{kind}", tuple(item.global_shape), offsets, view, item.is_owner))
    return pieces


def by_index(pieces: Iterable[Piece]) -> dict[MetadataIndex, Piece]:
    """Pieces by name and place. Raises ValueError when one rank describes the same place twice."""
    found: dict[MetadataIndex, Piece] = {}
    for piece in pieces:
        if found.setdefault(piece.index, piece) is not piece:
            raise ValueError(f"{piece.key} at {piece.offsets} is described twice on one rank")
    return found


def write(folder: Path, root: Path, pieces: list[Piece], crew: Crew) -> list[FileEntry]:
    """Write all ranks' pieces into the existing `folder`, collectively; returns the entries of this rank's files.

    Raises (torch's CheckpointException on all ranks, wrapping) OSError, or ValueError when the pieces of all ranks
    do not tile their tensors exactly.
    """
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=64 << 20)
    files = _DigestingFiles(root)
    writer.fs = files  # the only door to its streams
    with _quiet():
        dcp_save({}, storage_writer=writer, planner=_SavePlanner(pieces), process_group=crew.group, no_dist=crew.alone)
    return files.entries()


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What a folder holds: logical name -> dtype, shape, chunks. Raises OSError or a pickle error when damaged."""
    return cast(dict[str, TensorStorageMetadata], FileSystemReader(folder).read_metadata().state_dict_metadata)


def read(folder: Path, pieces: list[Piece], crew: Crew) -> None:
    """Fill the pieces from `folder`, collectively, whatever topology wrote it. Check the index first."""
    with _quiet():
        dcp_load(
            {},
            storage_reader=FileSystemReader(folder),
            planner=_LoadPlanner(pieces),
            process_group=crew.group,
            no_dist=crew.alone,
        )


def tiling_fault(key: str, stored: TensorStorageMetadata) -> str | None:
    """Why a stored tensor's chunks cannot make up the whole tensor, or None."""
    held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if held != math.prod(stored.size):
        return f"{key} of shape {tuple(stored.size)} has {held} of {math.prod(stored.size)} elements"
    return None


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of pieces; DCP's own planner removes duplicates and refuses overlaps."""

    def __init__(self, pieces: list[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = by_index(piece for piece in pieces if piece.is_owner)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for plan in plans:
            for item in plan.items:
                _check_alike(item, cast(TensorStorageMetadata, metadata.state_dict_metadata[item.index.fqn]))
        for key, stored in metadata.state_dict_metadata.items():
            fault = tiling_fault(key, cast(TensorStorageMetadata, stored))
            if fault:
                raise ValueError(f"the ranks' parts do not make up the state: {fault}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return _in_own_storage(self._pieces[write_item.index].tensor)


def _in_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself: DCP copies any other before it writes it."""
    if tensor.is_cpu and tensor.is_contiguous():
        return torch.from_numpy(tensor.flatten().view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)
    return tensor


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    data = TensorWriteData(chunk=piece.chunk, properties=properties, size=torch.Size(piece.global_shape))
    return WriteItem(index=piece.index, type=WriteItemType.SHARD, tensor_data=data)


def _check_alike(item: WriteItem, stored: TensorStorageMetadata) -> None:
    assert item.tensor_data is not None
    mine = (tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
    if mine != (tuple(stored.size), stored.properties.dtype):
        others = f"{tuple(stored.size)} {stored.properties.dtype}"
        raise ValueError(f"the ranks disagree on {item.index.fqn}: {mine[0]} {mine[1]} and {others}")


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of pieces from whichever chunks overlap them."""

    def __init__(self, pieces: list[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = by_index(pieces)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for piece in self._pieces.values():
            chunks.setdefault(piece.key, []).append(piece.chunk)
        items: list[ReadItem] = []
        for key, wanted in chunks.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])
            items += create_read_items_for_chunk_list(key, stored, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


class _DigestingFiles(FileSystem):
    """DCP's door to the file system, with digests of all that is written and every file flushed to disk."""

    def __init__(self, root: Path):
        self._root = root
        self._writers: dict[Path, DigestingWriter] = {}
        self._renamed: dict[Path, Path] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoint files are only written here, not opened with {mode!r}")
        with digesting(Path(path)) as writer:
            self._writers[Path(path)] = writer
            yield writer

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        Path(path).rename(new_path)
        self._renamed[Path(path)] = Path(new_path)

    def entries(self) -> list[FileEntry]:
        return [
            writer.entry(str(self._renamed.get(path, path).relative_to(self._root)))
            for path, writer in self._writers.items()
        ]


@contextmanager
def _quiet() -> Generator[None]:
    """Silence DCP's notices on a single process and on an existing folder: both are meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint.*")
        yield
