"""A sample as one row of numbers, which is how it is read and sent; and the micro batch that some
rows make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record

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
