"""Rectangles of logical tensors: whether a checkpoint's fit the run's, and how they are read from a
folder by torch.distributed.checkpoint (DCP).

Each rank writes exactly what it holds, as chunks of the logical tensors, into one file
(`save_plan`); nothing is gathered. The folder is an ordinary DCP checkpoint, so torch's own tools
read it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from trainer.checkpoint.source import TensorFacts, precision_name
from trainer.contract.errors import CheckpointError
from trainer.contract.resumable import model_fault
from trainer.parallel.agreement import RankGroup
from trainer.parallel.state import Fragment, LocalTensor, rectangles

STEP_KEY = "optimizer_step"


def index_of(piece: LocalTensor) -> MetadataIndex:
    """The name by which torch.distributed.checkpoint knows a piece."""
    return MetadataIndex(piece.name, piece.offsets)


def chunk_of(piece: LocalTensor) -> ChunkStorageMetadata:
    """Where a piece lies in its tensor."""
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())


def weight_pieces(weights: Iterable[LocalTensor]) -> list[LocalTensor]:
    """One piece for each local weight."""
    return [replace(item, tensor=item.tensor.detach()) for item in weights if item.tensor.numel()]


def fragment_pieces(fragments: Iterable[Fragment]) -> list[LocalTensor]:
    """The rectangles of every fragment, under the key NAME/KIND (for instance
    `h.0.mlp.weight/exp_avg`).

    Raises ValueError when a view is not 1-D, contiguous and of `numel` elements.
    """
    pieces = []
    for item in fragments:
        for kind, run in item.tensors.items():
            if run.shape != (item.numel,) or not run.is_contiguous():
                raise ValueError(
                    f"{item.name}/{kind} must be a contiguous 1-D view of {item.numel} elements"
                )
            for block in rectangles(item.local_shape, item.start, item.numel):
                offsets = tuple(
                    base + inner for base, inner in zip(item.offsets, block.offsets, strict=True)
                )
                view = run.detach()[block.start : block.start + math.prod(block.sizes)].view(
                    block.sizes
                )
                pieces.append(
                    LocalTensor(
                        f"{item.name}/{kind}",
                        item.global_shape,
                        offsets,
                        tensor=view,
                        is_owner=item.is_owner,
                    )
                )
    return pieces


def by_index(pieces: Iterable[LocalTensor]) -> dict[MetadataIndex, LocalTensor]:
    """Pieces by name and place. Raises ValueError when one rank describes the same place twice."""
    found: dict[MetadataIndex, LocalTensor] = {}
    for piece in pieces:
        if found.setdefault(index_of(piece), piece) is not piece:
            raise ValueError(f"{piece.name} at {piece.offsets} is described twice on one rank")
    return found


def read_index(folder: Path) -> dict[str, TensorFacts]:
    """What a folder holds, by logical name. Raises OSError or a pickle error when damaged,
    CheckpointError when the chunks of a tensor are not all there.
    """
    found = cast(
        dict[str, TensorStorageMetadata],
        FileSystemReader(folder).read_metadata().state_dict_metadata,
    )
    for key, stored in sorted(found.items()):
        fault = tiling_fault(key, stored)
        if fault:
            raise CheckpointError(f"it is damaged: {fault}; resume from another step")
    return {
        key: TensorFacts(tuple(stored.size), stored.properties.dtype)
        for key, stored in found.items()
    }


def read(folder: Path, pieces: list[LocalTensor], ranks: RankGroup) -> None:
    """Fill the pieces from `folder`, collectively, whatever topology wrote it. Check the index
    first.
    """
    with _quiet():
        dcp_load(
            {},
            storage_reader=FileSystemReader(folder),
            planner=_LoadPlanner(pieces),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


def tiling_fault(key: str, stored: TensorStorageMetadata) -> str | None:
    """Why a stored tensor's chunks cannot make up the whole tensor, or None."""
    held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if held != math.prod(stored.size):
        return (
            f"{key} of shape {tuple(stored.size)} has {held} of {math.prod(stored.size)} elements"
        )
    return None


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of pieces from whichever chunks overlap them."""

    def __init__(self, pieces: list[LocalTensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = by_index(pieces)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for piece in self._pieces.values():
            chunks.setdefault(piece.name, []).append(chunk_of(piece))
        items: list[ReadItem] = []
        for key, wanted in chunks.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])
            items += create_read_items_for_chunk_list(key, stored, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


@contextmanager
def _quiet() -> Generator[None]:
    """Silence DCP's notices on a single process and on an existing folder: both are meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint.*")
        yield


_NARROW = {torch.bfloat16, torch.float16}  # every value of theirs is one of fp32


def check_model(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare the facts that both sides know. Raises CheckpointError with the first key that
    differs, and the fix.
    """
    fault = model_fault(saved, wanted)
    if fault is not None:
        raise CheckpointError(fault.text)


def check_pieces(
    part: str,
    stored: Mapping[str, TensorFacts],
    pieces: Iterable[LocalTensor],
    widening: bool,
) -> None:
    """Check that every piece of this rank can be filled: name, shape, dtype.

    `widening`: bf16 and fp16 may be read into fp32. Raises CheckpointError: the first fault, both
    values, the fix.
    """
    for piece in sorted(pieces, key=lambda piece: piece.name):
        found = stored.get(piece.name)
        if found is None:
            raise CheckpointError(
                f"its {part} lack {piece.name}, which this run's model has; use the run card that wrote it, "
                "or another run.variant"
            )
        if found.shape != piece.global_shape:
            raise CheckpointError(
                f"it is of another model: {piece.name} has shape {found.shape} in the checkpoint and "
                f"{piece.global_shape} in this run; use the run card that wrote it, or another run.variant"
            )
        _check_dtype(piece, found.dtype, widening)


def _check_dtype(piece: LocalTensor, saved: torch.dtype, widening: bool) -> None:
    wanted = piece.tensor.dtype
    if saved == wanted or (widening and saved in _NARROW and wanted == torch.float32):
        return
    names = [precision_name(dtype) for dtype in (saved, wanted)]
    raise CheckpointError(
        f"{piece.name} is {names[0]} in the checkpoint and {names[1]} in this run; a training resumes in the precision "
        f'it was saved in: set precision.dtype = "{names[0]}"'
    )


def check_complete(part: str, stored: Iterable[str], wanted: Iterable[str]) -> None:
    """Check that the run, all ranks together, wants all that the checkpoint holds. Raises
    CheckpointError.
    """
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise CheckpointError(
            f"it is of another model: its {part} hold {extra[0]} (and {len(extra) - 1} more), which this run's "
            "model lacks; use the run card that wrote it, or another run.variant"
        )
