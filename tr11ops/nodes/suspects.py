"""Which of many nodes is bad, from jobs on groups of them that passed or failed: Bayes over few
hypotheses. Pure.

A hypothesis is that no node is bad, that one or two are, that two work alone but not together (a link between them), or
that the command itself fails wherever it runs.
A job on a group that a hypothesis touches fails with probability `detection`, which is below one for a fault that
comes and goes; another fails with probability `false_alarm`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Literal

from trainer.contract.record import Record

SuspicionKind = Literal["none", "node", "two nodes", "link", "command"]
NOTHING: SuspicionKind = "none"
ONE: SuspicionKind = "node"
TWO: SuspicionKind = "two nodes"
LINK: SuspicionKind = "link"
COMMAND: SuspicionKind = "command"
NEGLIGIBLE = 1e-9  # of the likeliest: such a hypothesis plays no part in a plan


class GroupOutcome(StrEnum):
    """How the job of a group ended. UNKNOWN: it could not be run, which says nothing of its nodes."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class GroupTest(Record):
    """One job on a group of nodes, and what came of it."""

    nodes: frozenset[str]
    outcome: GroupOutcome
    why: str = ""


class Suspicion(Record):
    """One hypothesis: which nodes are bad, and how."""

    kind: SuspicionKind
    nodes: frozenset[str]

    def touches(self, group: frozenset[str]) -> bool:
        """Whether a job on the group meets the fault."""
        if self.kind == COMMAND:
            return True
        if self.kind == LINK:
            return self.nodes <= group
        return not self.nodes.isdisjoint(group)


class FaultModel(Record):
    """What is believed before any job, and how surely a fault shows. A prior is of all hypotheses
    of its kind.
    """

    detection: float = 0.95
    false_alarm: float = 0.01
    nothing: float = 0.25
    one: float = 0.5
    two: float = 0.15
    link: float = 0.05
    command: float = 0.05

    def suspicions(self, nodes: Sequence[str]) -> dict[Suspicion, float]:
        """Every hypothesis with its prior probability."""
        pairs = [frozenset(pair) for pair in combinations(nodes, 2)]
        weights = {
            Suspicion(NOTHING, frozenset()): self.nothing,
            Suspicion(COMMAND, frozenset()): self.command,
        }
        weights |= {Suspicion(ONE, frozenset({node})): self.one / len(nodes) for node in nodes}
        weights |= {Suspicion(TWO, pair): self.two / len(pairs) for pair in pairs}
        weights |= {Suspicion(LINK, pair): self.link / len(pairs) for pair in pairs}
        return _normal(weights)

    def chance(self, suspicion: Suspicion, group: frozenset[str]) -> float:
        """Probability that a job on the group fails."""
        if suspicion.touches(group):
            return self.detection
        return self.false_alarm

    def after(
        self, weights: Mapping[Suspicion, float], tests: Iterable[GroupTest]
    ) -> dict[Suspicion, float]:
        """The probabilities once these jobs have ended."""
        found = dict(weights)
        for test in tests:
            if test.outcome is GroupOutcome.UNKNOWN:
                continue
            for suspicion in found:
                chance = self.chance(suspicion, test.nodes)
                found[suspicion] *= chance if test.outcome is GroupOutcome.FAILED else 1.0 - chance
        return _normal(found)


def _normal(weights: Mapping[Suspicion, float]) -> dict[Suspicion, float]:
    total = math.fsum(weights.values())
    return {suspicion: weight / total for suspicion, weight in weights.items()}


def likely(weights: Mapping[Suspicion, float]) -> dict[Suspicion, float]:
    """The hypotheses that play a part."""
    least = NEGLIGIBLE * max(weights.values())
    return _normal({suspicion: weight for suspicion, weight in weights.items() if weight > least})


def best(weights: Mapping[Suspicion, float]) -> tuple[Suspicion, float]:
    """The likeliest hypothesis with its probability."""
    return max(weights.items(), key=lambda item: item[1])


def node_chances(weights: Mapping[Suspicion, float]) -> dict[str, float]:
    """How likely each node has a part in the fault, the likeliest first."""
    found: dict[str, float] = {}
    for suspicion, weight in weights.items():
        for node in suspicion.nodes:
            found[node] = found.get(node, 0.0) + weight
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def entropy(weights: Iterable[float]) -> float:
    """Bits that are still missing."""
    return -math.fsum(weight * math.log2(weight) for weight in weights if weight > 0)
