"""What a rule finds in a course of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from tr11ops.curves.steps import LoggedStep
from trainer.contract.record import Record

AnomalyKind = Literal[
    "spike",
    "divergence",
    "throughput-fall",
    "restart",
    "repeated-norm",
    "missing-loss",
    "dropped-steps",
    "gap",
]


class NumberAnomaly(Record):
    """One thing that looks wrong, or, where `is_wrong` is False, that a reader wants to know.

    `first` and `last` are iterations, `line` is where in the log the first one stands.
    """

    kind: AnomalyKind
    first: int
    last: int
    line: int
    text: str
    is_wrong: bool = True
    evidence: tuple[str, ...] = ()


class NumberRule(Protocol):
    """A rule sees every step once, in the order of the log, and says at the end what it found."""

    def take(self, step: LoggedStep) -> None: ...

    def anomalies(self) -> Iterable[NumberAnomaly]: ...


def span(first: int, last: int) -> str:
    """`at iteration 7` or `in iterations 7 to 9`."""
    if first == last:
        return f"at iteration {first:,}"
    return f"in iterations {first:,} to {last:,}"
