"""`Record`: the one kind of frozen value, for facts, plans and documents.

    class Node(Record):
        name: str
        jobs: tuple[str, ...] = ()

A record is made, compared, hashed, copied and pickled by its fields. `trainer.contract.documents` reads it from JSON by
its annotations, and writes it; `msgspec.structs` has `replace` and `fields`.
`Finite`, `Amount` and `Count` are numbers whose range is checked as they are read.
A class of msgspec is defined in the thirtieth part of the time of a dataclass, and a command imports hundreds.
A record with a `cached_property` is declared with `dict=True`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, dataclass_transform

import msgspec

# beyond it no count, size or moment is meant, in nanoseconds neither
LARGEST_NUMBER = 1 << 62
# no NaN, no infinity
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
Count = Annotated[int, msgspec.Meta(ge=0)]
RankCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]  # of one node

# what a document is made of: `json.loads` returns it, `trainer.contract.documents.document` makes it
JsonObject: TypeAlias = dict[str, Any]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True):
    """Base of frozen values; see the module."""


class IterationRange(Record, order=True):
    """Iterations `first` to `last`, both included, counted from 1 as the log does."""

    first: int
    last: int

    def __contains__(self, iteration: int) -> bool:
        return self.first <= iteration <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"
