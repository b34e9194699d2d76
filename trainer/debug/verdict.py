"""The words in which a diff answers: kinds of fault, one finding, and all of them together."""

from __future__ import annotations

from typing import Any, Literal

from trainer.contract.record import Record
from trainer.debug.compare import Delta
from trainer.debug.record import RankCoordinates

FaultKind = Literal[
    "model",
    "missing",
    "optimizer-step",
    "schedule",
    "data-order",
    "random-state",
    "counters",
    "tied-copy",
    "tensor-duplicate",
    "data-replica",
    "weight",
    "master-weight",
    "moment",
]
# Causes before consequences: a wrong optimizer step explains weights that differ later, not the
# other way round.
KINDS: tuple[FaultKind, ...] = (
    "model",
    "missing",
    "optimizer-step",
    "schedule",
    "data-order",
    "random-state",
    "counters",
    "tied-copy",
    "tensor-duplicate",
    "data-replica",
    "weight",
    "master-weight",
    "moment",
)


class DiffFinding(Record):
    """One kind of fault where it is first seen. `names`: all tensors (or facts) of this kind there,
    the first first.

    `between`: titles of the two states, or of the one state whose own copies disagree. `place`: who
    holds the first, `places`: all who hold it so. `detail`: sentences on what was seen. `later`:
    further places in time of this kind.
    """

    kind: FaultKind
    between: tuple[str, ...]
    names: tuple[str, ...]
    detail: tuple[str, ...] = ()
    place: RankCoordinates | None = None
    places: tuple[RankCoordinates, ...] = ()
    delta: Delta | None = None
    later: int = 0


class DiffVerdict(Record):
    """What a diff found, in the order of time and then of causes.

    `compared`: titles of the pairs of states; `numbers`: how many were compared; `remarks`: lines
    that are no fault.
    """

    findings: tuple[DiffFinding, ...]
    compared: tuple[tuple[str, str], ...]
    numbers: int
    remarks: tuple[str, ...]

    @property
    def first_tensor(self) -> DiffFinding | None:
        """The finding that names the first divergence in time, and there in the order of the model;
        None without.
        """
        return next((finding for finding in self.findings if finding.delta is not None), None)


def show_value(value: Any) -> str:
    """A fact for people: whole numbers in full, others with all the digits that tell them apart."""
    if isinstance(value, float):
        return f"{value!r}"
    return str(value)
