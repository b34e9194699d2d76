"""Samples by number, each one row of numbers: of one data set, or of a weighted mixture of several;
and the micro batch that rows make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.data.index import IndexMaps
from trainer.data.index_cache import Arrays
from trainer.data.indexed import IndexedDataset

if TYPE_CHECKING:
    from torch import Tensor  # which the workers do without

Row: TypeAlias = npt.NDArray[np.int64]
MicroBatch: TypeAlias = tuple["Tensor", ...] | dict[str, "Tensor"]
"""A GPT's (tokens, labels), or fields by name."""


class RowFormat(Protocol):
    """What a row [length] of int64 holds. Small, and can be sent between processes."""

    @property
    def length(self) -> int:
        """Numbers of a row."""

    def micro_batch(self, rows: Tensor) -> MicroBatch:
        """The micro batch of rows [samples, length]."""

    def tokens(self, row: Row) -> Row:
        """The tokens of one row that people read."""


class NextTokenRow(Record):
    """Rows of tokens that follow each other: (tokens, labels) [samples, sequence_length], labels
    one token further.
    """

    sequence_length: int

    @property
    def length(self) -> int:
        """One token more than the model sees at once."""
        return self.sequence_length + 1

    def micro_batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """All but the last token, and all but the first."""
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def tokens(self, row: Row) -> Row:
        """All of them."""
        return row


class NamedFields(Record):
    """Rows of named fields, one behind the other.

    fields: name and numbers of each; 0 for one number that has no axis of its own. `mask`: which of
    them says how many of the numbers of the first are tokens. `weights`: those that become float32;
    the others stay int64.
    """

    fields: tuple[tuple[str, int], ...]
    mask: str
    weights: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Of all fields together."""
        return sum(max(1, size) for _, size in self.fields)

    def slices(self) -> dict[str, slice | int]:
        """Where each field is in a row."""
        found: dict[str, slice | int] = {}
        at = 0
        for name, size in self.fields:
            if size:
                found[name] = slice(at, at + size)
            else:
                found[name] = at
            at += max(1, size)
        return found

    def micro_batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Fields by name, [samples, numbers] or [samples]."""
        return {
            name: rows[:, place].float() if name in self.weights else rows[:, place].contiguous()
            for name, place in self.slices().items()
        }

    def tokens(self, row: Row) -> Row:
        """The first field, without padding."""
        places = self.slices()
        text: Row = row[places[self.fields[0][0]]]
        return text[: int(row[places[self.mask]].sum())]


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
        first = int(self.maps.samples[row][0])
        last = int(self.maps.samples[row + 1][0])
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
