"""How tensors of ours are written as those of an architecture that has query, key and value apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.checkpoints import CheckpointError


@dataclass(frozen=True)
class FusedRows:
    """The rows of one of query, key and value (`part` 0, 1, 2) in ours, which are [heads, `parts`, head size]."""

    heads: int
    part: int
    parts: int = 3

    def blocks(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes in our tensor, a head at a time, of theirs of `shape`."""
        size, rest = shape[0] // self.heads, shape[1:]
        for head in range(self.heads):
            yield ((self.parts * head + self.part) * size, *(0 for _ in rest)), (size, *rest)


@dataclass(frozen=True)
class MappedTensor:
    """Where a tensor of theirs comes from: our name, and which of the `parts` that are one in ours.

    `leading`: dimensions of size 1 that theirs has in front.
    """

    key: str
    part: int | None = None
    parts: int = 3
    leading: int = 0

    def rows(self, heads: int) -> FusedRows | None:
        """Of which rows of ours it is made; None for all."""
        return None if self.part is None else FusedRows(heads, self.part, self.parts)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, but for `leading`, from that of ours."""
        return ours if self.part is None else (ours[0] // self.parts, *ours[1:])


def needed_fact(facts: Mapping[str, Any], key: str) -> Any:
    """What a model's facts say. Raises CheckpointError where they do not."""
    if key not in facts:
        raise CheckpointError(f"{key} is not known from the checkpoint: name its run card with --run")
    return facts[key]


def only(facts: Mapping[str, Any], key: str, value: Any, architecture: str) -> None:
    """Raises CheckpointError where the model has another value than the one that the architecture can have."""
    if facts.get(key, value) != value:
        raise CheckpointError(
            f"{key} = {facts[key]}: the {architecture} architecture of Hugging Face has only {value}, "
            "so this model cannot be written as one"
        )
