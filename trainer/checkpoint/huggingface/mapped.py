"""How tensors of ours are written as those of an architecture that has query, key and value apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record

Blocks = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]


class FusedRows(Record):
    """The rows of one of several matrices in ours, whose rows are [groups, `parts`, head size].

    Of each group it has `count` parts from `part` on: a query, key or value one, a group's queries
    several.
    """

    groups: int
    part: int
    parts: int = 3
    count: int = 1

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """Offsets and sizes in our tensor, a group at a time, of theirs of `shape`."""
        size, rest = shape[0] // (self.groups * self.count), shape[1:]
        for group in range(self.groups):
            yield (
                ((self.parts * group + self.part) * size, *(0 for _ in rest)),
                (self.count * size, *rest),
            )


class StackedMatrix(Record):
    """One of several matrices that lie one behind the other in ours, [matrices, rows, columns]."""

    index: int

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """As for `FusedRows`: all of theirs at once."""
        yield (self.index, *(0 for _ in shape)), (1, *shape)


class MappedTensor(Record):
    """Where a tensor of theirs comes from: our name, and which of the `parts` that are one in ours.

    `leading`: dimensions of size 1 that theirs has in front. `count`: so many parts of each group,
    see `FusedRows`. `is_stacked`: the parts are matrices of their own in ours.
    """

    key: str
    part: int | None = None
    parts: int = 3
    leading: int = 0
    count: int = 1
    is_stacked: bool = False

    def rows(self, groups: int) -> FusedRows | StackedMatrix | None:
        """Of which rows of ours it is made; None for all. `groups`: heads of keys and values."""
        if self.part is None:
            return None
        if self.is_stacked:
            return StackedMatrix(self.part)
        return FusedRows(groups, self.part, self.parts, self.count)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, but for `leading`, from that of ours."""
        if self.part is None:
            return ours
        if self.is_stacked:
            return ours[1:]
        return (ours[0] * self.count // self.parts, *ours[1:])


def needed_fact(facts: Mapping[str, Any], key: str) -> Any:
    """What a model's facts say. Raises CheckpointError where they do not."""
    if key not in facts:
        raise CheckpointError(
            f"{key} is not known from the checkpoint: name its run card with --run"
        )
    return facts[key]


def only(facts: Mapping[str, Any], key: str, value: Any, architecture: str) -> None:
    """Raises CheckpointError where the model has another value than the one that the architecture
    can have.
    """
    if facts.get(key, value) != value:
        raise CheckpointError(
            f"{key} = {facts[key]}: the {architecture} architecture of Hugging Face has only {value}, "
            "so this model cannot be written as one"
        )
