"""Files of the original layout, opened without running anything that is in them; where a logical
tensor lies in them, and reading it.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.source import TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.contract.units import shortened
from trainer.parallel.state import rectangles


class Inert:
    """Stands for an object of any class that torch does not know (Megatron's arguments, DeepSpeed's
    addresses).

    Its attributes are those that were stored, `arguments` what its constructor was given. No code
    of the class runs.
    """

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(key): value for key, value in part.items()})


def open_states(path: Path) -> dict[Any, Any]:
    """The dictionary in one file of `torch.save`; its tensors are mapped, so only what is touched
    is read.

    Classes that torch does not allow by default become `Inert`. Raises CheckpointError, naming the
    file, when it is missing, truncated, or not such a file.
    """
    try:
        with _inert(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; copy the checkpoint again, or use another step"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = shortened(" ".join(str(error).split()), 160) or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint file ({reason}); copy it again"
        ) from None
    if not isinstance(states, dict):
        raise CheckpointError(
            f"{path} holds a {type(states).__name__}, not a dictionary: it is not of this layout"
        )
    return states


@contextmanager
def _inert(names: Sequence[str]) -> Iterator[None]:
    with torch.serialization.safe_globals([(Inert, name) for name in names]):
        yield


class OpenFiles:
    """The files of one checkpoint folder, opened when first needed; the least recently used are
    closed again.
    """

    def __init__(self, folder: Path, most: int):
        self.folder = folder
        self.most = most
        self._open: OrderedDict[str, dict[Any, Any]] = OrderedDict()

    def __getstate__(self) -> tuple[Path, int]:
        return self.folder, self.most

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.folder, self.most = state
        self._open = OrderedDict()

    def states(self, name: str) -> dict[Any, Any]:
        """What the file `name` holds. Raises CheckpointError as `open_states` does."""
        found = self._open.pop(name, None)
        if found is None:
            found = open_states(self.folder / name)
        self._open[name] = found
        while len(self._open) > self.most:
            self._open.popitem(last=False)
        return found

    def tensor(self, name: str, keys: Sequence[Any]) -> Tensor:
        """The tensor under nested `keys` of a file. Raises CheckpointError, naming the file, when
        it is not there.
        """
        value: Any = self.states(name)
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                value = None
        if not isinstance(value, Tensor):
            shown = "/".join(map(str, keys))
            raise CheckpointError(
                f"{self.folder / name} lacks {shown}: it is of another checkpoint, or damaged"
            )
        return value


def attributes(value: Any) -> dict[str, Any]:
    """The stored attributes of an inert object, a namespace or a dictionary; empty for anything
    else.
    """
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return dict(getattr(value, "__dict__", {}))


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
