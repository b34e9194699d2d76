"""Where a logical tensor lies in the files of the original layout: runs of flat tensors, and
reading them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.checkpoint.deepspeed.states import OpenFiles
from trainer.checkpoint.source import TensorFacts
from trainer.contract.record import Record
from trainer.parallel.state import rectangles


class FlatRun(Record):
    """Elements [first, first + numel) of a flattened slice are [start, start + numel) of a
    flattened stored tensor.

    The stored tensor is under nested `keys` of the file `path` (relative to the checkpoint's
    folder).
    """

    path: str
    keys: tuple[str | int, ...]
    first: int
    numel: int
    start: int


class Slice(Record):
    """One tensor rank's part of a logical tensor: the rectangle of `shape` at `offsets`, and the
    runs that make it.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    runs: tuple[FlatRun, ...]


class StoredTensor(Record):
    """A logical tensor. `replicated`: each slice is the whole tensor, and all should be equal."""

    facts: TensorFacts
    slices: tuple[Slice, ...]
    replicated: bool


def missing_elements(part: Slice) -> int:
    """Elements of a slice that no run holds (negative: held twice); 0 when the runs, in order, make
    up the slice.
    """
    held = 0
    for run in sorted(part.runs, key=lambda run: run.first):
        if run.first != held:
            return math.prod(part.shape) - sum(run.numel for run in part.runs) or 1
        held += run.numel
    return math.prod(part.shape) - held


def read_slice(files: OpenFiles, part: Slice, offsets: Sequence[int], out: Tensor) -> None:
    """Fill the part of `out`, the rectangle of the logical tensor at `offsets`, that the slice
    holds.

    Raises CheckpointError, naming the file, when a stored tensor is not there or too short.
    """
    wanted = [(begin, begin + size) for begin, size in zip(offsets, out.shape, strict=True)]
    for run in part.runs:
        blocks = [
            (block, [base + inner for base, inner in zip(part.offsets, block.offsets, strict=True)])
            for block in rectangles(part.shape, run.first, run.numel)
        ]
        for block, corner in blocks:
            shared = [
                (max(low, begin), min(high, begin + size))
                for (low, high), begin, size in zip(wanted, corner, block.sizes, strict=True)
            ]
            if any(low >= high for low, high in shared):
                continue
            flat = files.tensor(run.path, run.keys).flatten()
            start = run.start + block.start
            view = flat[start : start + math.prod(block.sizes)].view(block.sizes)
            source = tuple(
                slice(low - begin, high - begin)
                for (low, high), begin in zip(shared, corner, strict=True)
            )
            target = tuple(
                slice(low - begin, high - begin)
                for (low, high), begin in zip(shared, offsets, strict=True)
            )
            out[target].copy_(view[source])


def read_stored(
    files: OpenFiles, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, float | None]:
    """The rectangle of a logical tensor, and, where copies differ, by how much at most (else None).

    Copies that differ are averaged in fp64, as the original's own converters to other layouts do:
    no rank's copy is better than another's, and the mean is what each of them drifted from. Equal
    copies are returned unchanged.
    """
    if not stored.replicated:
        out = torch.empty(tuple(sizes), dtype=stored.facts.dtype)
        for part in stored.slices:
            read_slice(files, part, offsets, out)
        return out, None
    copies = []
    for part in stored.slices:
        copy = torch.empty(tuple(sizes), dtype=stored.facts.dtype)
        read_slice(files, part, offsets, copy)
        copies.append(copy)
    first = copies[0]
    if all(torch.equal(first, other) for other in copies[1:]):
        return first, None
    stacked = torch.stack(copies).double()
    spread = float((stacked.amax(0) - stacked.amin(0)).max())
    return stacked.mean(0).to(stored.facts.dtype), spread
