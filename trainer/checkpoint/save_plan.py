"""Who writes which pieces of a checkpoint's folder, and where in its file each of them lies.

Decided once, by rank 0, before any byte is written; DCP's own planner removes duplicates and
refuses overlaps. What follows needs no word between the ranks, so that it can go on beside the
training.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from trainer.checkpoint.files import Bytes, as_bytes
from trainer.checkpoint.sharded_files import chunk_of, index_of, tiling_fault
from trainer.contract.record import Record
from trainer.parallel.agreement import RankGroup
from trainer.parallel.state import LocalTensor

_READ_BYTES = 8  # of what is written to an archive, by torch's writer
_SMALL_BYTES = 64 << 10  # nothing but a tensor's own bytes is written in a piece larger than this


class Envelope(Record):
    """The bytes before and after a tensor's own bytes in its archive."""

    head: bytes
    tail: bytes


class Envelopes:
    """Envelopes by dtype and shape; each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, tuple[int, ...]], Envelope] = {}

    def of(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
        """The envelope of a contiguous tensor with at least one element."""
        found = self._made.get((dtype, shape))
        if found is None:
            found = self._made[dtype, shape] = _make(dtype, shape)
        return found


def _make(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    size = math.prod(shape) * dtype.itemsize
    recorder = _Recorder()
    # Uninitialised: of a large tensor one page is touched, since the recorder drops the content
    # unread. But its first bytes are read: content that begins as a descriptor of a zip file does,
    # as freed memory may, gets into the id.
    blank = torch.empty(shape, dtype=dtype)
    blank.view(-1)[:_READ_BYTES].zero_()
    with _without_crc32():
        torch.save(blank, cast(IO[bytes], recorder))
    if size > _SMALL_BYTES:
        assert recorder.dropped == size, (
            f"torch.save wrote {recorder.dropped} bytes for a tensor of {size}"
        )
        return Envelope(recorder.before.getvalue(), recorder.after.getvalue())
    archive = recorder.before.getvalue()
    begin = _content_offset(archive)
    return Envelope(archive[:begin], archive[begin + size :])


def _content_offset(archive: bytes) -> int:
    """Where the tensor's bytes begin in a whole archive: behind the local header of the entry
    `data/0`.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        [entry] = [info for info in opened.infolist() if info.filename.endswith("/data/0")]
    # of name and extra field, little-endian
    lengths = archive[entry.header_offset + 26 : entry.header_offset + 30]
    return (
        entry.header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )


class _Recorder(io.RawIOBase):
    """Keeps all that is written except large pieces, of which it only counts the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = io.BytesIO(), io.BytesIO()
        self.dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        with memoryview(data) as view:
            if view.nbytes > _SMALL_BYTES:
                self.dropped += view.nbytes
            else:
                (self.after if self.dropped else self.before).write(view)
            return view.nbytes


@contextmanager
def _without_crc32() -> Generator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


INDEX_FILE = ".metadata"  # DCP's name for it


class PlacedPiece(Record):
    """One piece in a rank's file: which, its envelope, and the bytes of both together."""

    index: MetadataIndex
    envelope: Envelope
    bytes: int


class FolderShare(Record):
    """What one rank writes into one folder of a checkpoint.

    `file`: its name in the folder. `placed`: the pieces in the order of the file. `size`: bytes of
    the file, 0 when this rank writes none. `index`: the folder's index file, on rank 0 only.
    """

    file: str
    placed: tuple[PlacedPiece, ...]
    size: int
    index: bytes | None

    def contents(self, pieces: Mapping[MetadataIndex, LocalTensor]) -> Iterator[Bytes]:
        """The file's bytes, front to back, read from the live tensors as the iteration gets there."""
        for placed in self.placed:
            yield as_bytes(placed.envelope.head)
            yield _raw(pieces[placed.index].tensor)
            yield as_bytes(placed.envelope.tail)


def plan_share(pieces: Sequence[LocalTensor], ranks: RankGroup, what: str) -> FolderShare:
    """This rank's share of the folder that all ranks' pieces make up. Collective.

    Raises CheckpointError, beginning with `what`, on every rank when the pieces do not tile their
    tensors exactly.
    """
    items = ranks.each(what, lambda: [_write_item(piece) for piece in pieces if piece.is_owner])
    everyones = ranks.collect(items)
    envelopes = Envelopes()

    def arrange() -> list[tuple[list[WriteItem], bytes | None]]:
        plans, metadata = _Planner().create_global_plan([SavePlan(each) for each in everyones])
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for rank, plan in enumerate(plans):
            position = 0
            for item in plan.items:
                placed = _place(item, envelopes)
                stored[item.index] = _StorageInfo(_file_name(rank), position, placed.bytes)
                position += placed.bytes
        whole = dataclasses.replace(  # noqa: TID251 (torch's dataclass)
            metadata, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
        )
        index = pickle.dumps(whole)
        return [(list(plan.items), None if rank else index) for rank, plan in enumerate(plans)]

    mine, index = ranks.deal(what, arrange)
    placed = tuple(_place(item, envelopes) for item in mine)
    return FolderShare(_file_name(ranks.rank), placed, sum(one.bytes for one in placed), index)


def signature(pieces: Iterable[LocalTensor]) -> tuple[object, ...]:
    """What a share depends on: equal on every rank, the shares of an earlier save still hold."""
    return tuple(
        (
            piece.name,
            piece.global_shape,
            piece.offsets,
            piece.tensor.shape,
            piece.tensor.dtype,
            piece.is_owner,
        )
        for piece in pieces
    )


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"  # as DCP names the first file of a rank


def _place(item: WriteItem, envelopes: Envelopes) -> PlacedPiece:
    assert item.tensor_data is not None
    dtype = item.tensor_data.properties.dtype
    sizes = tuple(item.tensor_data.chunk.sizes)
    envelope = envelopes.of(dtype, sizes)
    return PlacedPiece(
        item.index,
        envelope,
        len(envelope.head) + math.prod(sizes) * dtype.itemsize + len(envelope.tail),
    )


def _raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes in row-major order: its own memory when it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class _Planner(DefaultSavePlanner):
    """DCP's global plan, with two checks that it does not make."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for plan in plans:
            for item in plan.items:
                _check_alike(
                    item, cast(TensorStorageMetadata, metadata.state_dict_metadata[item.index.fqn])
                )
        for key, stored in metadata.state_dict_metadata.items():
            fault = tiling_fault(key, cast(TensorStorageMetadata, stored))
            if fault:
                raise ValueError(f"the ranks' parts do not make up the state: {fault}")
        return plans, metadata


def _write_item(piece: LocalTensor) -> WriteItem:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    data = TensorWriteData(
        chunk=chunk_of(piece), properties=properties, size=torch.Size(piece.global_shape)
    )
    return WriteItem(index=index_of(piece), type=WriteItemType.SHARD, tensor_data=data)


def _check_alike(item: WriteItem, stored: TensorStorageMetadata) -> None:
    assert item.tensor_data is not None
    mine = (tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
    if mine != (tuple(stored.size), stored.properties.dtype):
        others = f"{tuple(stored.size)} {stored.properties.dtype}"
        raise ValueError(
            f"the ranks disagree on {item.index.fqn}: {mine[0]} {mine[1]} and {others}"
        )
