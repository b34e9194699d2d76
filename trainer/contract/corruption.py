"""Silent corruption: which worker computes something else than the others do, decided from what
each has computed.

A processor that is wrong now and then says nothing of it: the loss gets a little worse, on every
worker. So all compute the same micro batch (`trainer.spikes.corruption_check`), and what they found
is judged here. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from trainer.contract.record import Record

How = Literal["repeat", "minority", "undecided"]
WORDS: dict[How, str] = {
    "repeat": "computed the same micro batch twice, with different results",
    "minority": "has another result than the other replicas, which agree",
    "undecided": "and another replica have different results, and no third decides",
}


class WorkerDigests(Record):
    """What one worker computed, as digests in the order in which it did: `first` and `second` time.

    `stage`, `replica` and `part` are its pipeline, data and tensor coordinates. `fault`: why it
    could not compute.
    """

    rank: int
    stage: int
    replica: int
    part: int
    host: str
    gpu: str
    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    fault: str = ""


class Suspect(Record):
    """A worker whose results cannot be trusted, and how that shows."""

    rank: int
    host: str
    gpu: str
    how: How

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.gpu}) {WORDS[self.how]}"


def judge(outcomes: Sequence[WorkerDigests]) -> tuple[Suspect, ...]:
    """The suspects, by rank; none where all results agree, or where nothing could be compared.

    A worker that differs from itself is one, whatever the others say, and its replica is not asked
    about others. Else the most replicas that agree are right: no two go wrong in the same bits.
    Where no number of them is the largest (two replicas, two results), all that differ are
    suspects. Tensor ranks share their sums, so that one wrong worker changes the results of all: of
    them only those are suspects whose results differ first.
    """
    able = [outcome for outcome in outcomes if not outcome.fault]
    found: list[tuple[WorkerDigests, int, How]] = []
    for outcome in able:
        place = _first_difference(outcome.first, outcome.second)
        if place is not None:
            found.append((outcome, place, "repeat"))
    unsure = {(outcome.stage, outcome.replica) for outcome, _, _ in found}
    steady = [outcome for outcome in able if (outcome.stage, outcome.replica) not in unsure]
    for seat in sorted({(outcome.stage, outcome.part) for outcome in steady}):
        found += _compared([outcome for outcome in steady if (outcome.stage, outcome.part) == seat])
    return tuple(
        Suspect(outcome.rank, outcome.host, outcome.gpu, how)
        for outcome, _, how in sorted(_earliest(found), key=lambda entry: entry[0].rank)
    )


def _compared(replicas: Sequence[WorkerDigests]) -> list[tuple[WorkerDigests, int, How]]:
    """Those of the same place in their replicas that do not agree with the most of them, and where
    they differ.
    """
    counts = Counter(outcome.first for outcome in replicas).most_common()
    if len(counts) < 2:
        return []
    reference, votes = counts[0]
    how: How = "undecided"
    if votes > counts[1][1]:
        how = "minority"
    found: list[tuple[WorkerDigests, int, How]] = []
    for outcome in replicas:
        if how == "minority":
            others = [reference]
        else:
            others = [first for first, _ in counts]
        places = [
            place
            for first in others
            if (place := _first_difference(outcome.first, first)) is not None
        ]
        if places:
            found.append((outcome, min(places), how))
    return found


def _earliest(
    found: Iterable[tuple[WorkerDigests, int, How]],
) -> list[tuple[WorkerDigests, int, How]]:
    """Of the tensor ranks of one stage and replica, those that differ first."""
    groups: dict[tuple[int, int], list[tuple[WorkerDigests, int, How]]] = {}
    for entry in found:
        groups.setdefault((entry[0].stage, entry[0].replica), []).append(entry)
    return [
        entry
        for group in groups.values()
        for entry in group
        if entry[1] == min(place for _, place, _ in group)
    ]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if len(one) != len(other):
        return min(len(one), len(other))
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None
    )
