"""Samples by number: of one data set, or of a weighted mixture of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainer.data.index import IndexMaps
from trainer.data.index_cache import Arrays
from trainer.data.indexed import IndexedDataset
from trainer.data.rows import NextTokenRow, RowFormat


class SampleSource(Protocol):
    """Samples by number, each a row of int64. `row` says what it holds: a GPT's, tokens that follow
    each other.
    """

    @property
    def row(self) -> RowFormat: ...

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` into `out` [row.length]."""


@runtime_checkable
class DocumentSource(Protocol):
    """Samples of one data set, each of which knows where it is from."""

    prefix: str
    tokens: IndexedDataset

    def documents_of(self, index: int) -> list[int]:
        """Numbers of what a split shares out, that sample `index` takes tokens from, in order."""


def read_rows(source: SampleSource, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Samples by number: int64 [numbers, row.length]."""
    rows = np.empty((len(numbers), source.row.length), dtype=np.int64)
    for row, number in zip(rows, numbers.tolist(), strict=True):
        source.read(number, row)
    return rows


@dataclass
class GPTDataset:
    """Samples of one data set, or of a range of its documents, in shuffled order. See
    `trainer.data.index`.
    """

    tokens: IndexedDataset
    maps: IndexMaps
    sequence_length: int
    samples: int

    def __post_init__(self) -> None:
        self.prefix = self.tokens.prefix
        self.row: RowFormat = NextTokenRow(self.sequence_length)

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` into `out` [sequence_length + 1], joining as many documents as it
        spans.
        """
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        row = int(self.maps.shuffle[index])
        (position, offset), (last, last_offset) = (
            self.maps.samples[row].tolist(),
            self.maps.samples[row + 1].tolist(),
        )
        filled = 0
        while position < last:
            part = self.tokens.get(int(self.maps.documents[position]), offset)
            out[filled : filled + len(part)] = part
            filled += len(part)
            position, offset = position + 1, 0
        out[filled:] = self.tokens.get(
            int(self.maps.documents[last]), offset, last_offset - offset + 1
        )

    def documents_of(self, index: int) -> list[int]:
        """Numbers of the sequences of the data set that sample `index` takes tokens from, in order."""
        row = int(self.maps.shuffle[index])
        first, last = int(self.maps.samples[row][0]), int(self.maps.samples[row + 1][0])
        return [int(number) for number in self.maps.documents[first : last + 1]]

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return one_row(self, index)


class BlendedDataset:
    """A weighted mixture of sample sources, in the greedy order of
    `trainer.data.blend.build_blend`.
    """

    def __init__(self, members: Sequence[SampleSource], order: Arrays) -> None:
        self.members = tuple(members)
        self.row = members[0].row
        self.sets, self.numbers = order

    def __len__(self) -> int:
        return len(self.sets)

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` of the mixture into `out` [row.length]."""
        if not 0 <= index < len(self.sets):
            raise IndexError(f"sample {index} of {len(self.sets)}")
        self.members[int(self.sets[index])].read(int(self.numbers[index]), out)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return one_row(self, index)


def one_row(source: SampleSource, index: int) -> npt.NDArray[np.int64]:
    """Sample `index` of a source."""
    out = np.empty(source.row.length, dtype=np.int64)
    source.read(index, out)
    return out
