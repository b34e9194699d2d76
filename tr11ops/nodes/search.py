"""The search for bad nodes: which groups to test next, and when it is over. Pure but for what runs
the jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Literal

from trainer.contract.record import Record

# ----------------------------------------------------------------------------- who is suspect
# From jobs on groups of nodes that passed or failed: Bayes over few hypotheses.
#
# A hypothesis is that no node is bad, that one or two are, that two work alone but not together (a
# link between them), or that the command itself fails wherever it runs.
# A job on a group that a hypothesis touches fails with probability `detection`, which is below one for a fault that
# comes and goes; another fails with probability `false_alarm`.

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


SURE = 0.95
SAMPLES = 12  # outcomes that a plan is judged by
SHUFFLES = 3  # plans of one group size that are tried
MOST_WEIGHED = 150  # hypotheses that a plan is judged by: the likeliest
BITS_A_JOB = 0.01  # a plan with one more job has to learn so much more

Group = tuple[str, ...]


class SearchRound(Record):
    """One round: disjoint groups whose jobs run at once, what came of them, and what is believed
    then.
    """

    tests: tuple[GroupTest, ...]
    weights: Mapping[Suspicion, float]


class SearchResult(Record):
    """`suspicion` is the likeliest, `chance` its probability; `is_sure`: the search ended because
    of it.
    """

    rounds: tuple[SearchRound, ...]
    suspicion: Suspicion
    chance: float
    is_sure: bool

    @property
    def jobs(self) -> int:
        return sum(len(one.tests) for one in self.rounds)

    @property
    def is_seen(self) -> bool:
        """Whether any job told something."""
        return any(
            test.outcome is not GroupOutcome.UNKNOWN for one in self.rounds for test in one.tests
        )


def search(
    nodes: Sequence[str],
    run: Callable[[Sequence[Group]], Sequence[GroupTest]],
    model: FaultModel,
    *,
    least: int = 1,
    most_rounds: int = 8,
    seed: int = 0,
) -> Iterator[SearchRound]:
    """Run rounds until one hypothesis is sure, or `most_rounds` have been run; each round as it
    ends.

    `least`: nodes of the smallest group. A job that could not be run says nothing; a round of none
    but such ends it.
    """
    weights = model.suspicions(nodes)
    chance = random.Random(seed)
    for _ in range(most_rounds):
        tests = tuple(run(plan_round(nodes, weights, model=model, least=least, chance=chance)))
        weights = model.after(weights, tests)
        yield SearchRound(tests, weights)
        if best(weights)[1] >= SURE or all(test.outcome is GroupOutcome.UNKNOWN for test in tests):
            return


def result_of(rounds: Sequence[SearchRound]) -> SearchResult:
    """What the rounds came to. At least one must have been run."""
    suspicion, chance = best(rounds[-1].weights)
    return SearchResult(tuple(rounds), suspicion, chance, chance >= SURE)


def found_bad(result: SearchResult) -> tuple[str, ...]:
    """The nodes that the search names; none where it is not sure, or no node is bad."""
    if result.is_sure:
        return tuple(sorted(result.suspicion.nodes))
    return ()


# ----------------------------------------------------------------------------- the next round
def plan_round(
    nodes: Sequence[str],
    weights: Mapping[Suspicion, float],
    model: FaultModel,
    least: int,
    chance: random.Random,
) -> tuple[Group, ...]:
    """Disjoint groups that promise to teach the most: halves, smaller groups, suspects beside
    trusted nodes.
    """
    heavy = dict(sorted(likely(weights).items(), key=lambda item: -item[1])[:MOST_WEIGHED])
    total = math.fsum(heavy.values())
    heavy = {suspicion: weight / total for suspicion, weight in heavy.items()}
    samples = chance.choices(list(heavy), list(heavy.values()), k=SAMPLES)
    draws = [chance.random() for _ in range(SAMPLES * len(nodes))]

    def worth(groups: tuple[Group, ...]) -> float:
        return (
            entropy(heavy.values())
            - _left(groups, heavy, model=model, samples=samples, draws=draws)
            - BITS_A_JOB * len(groups)
        )

    return max(_candidates(nodes, weights, least, chance), key=worth)


def _candidates(
    nodes: Sequence[str], weights: Mapping[Suspicion, float], least: int, chance: random.Random
) -> Iterator[tuple[Group, ...]]:
    suspected = node_chances(weights)
    by_suspicion = sorted(nodes, key=lambda node: -suspected.get(node, 0.0))
    size = max(least, 1)
    while True:
        count = max(1, len(nodes) // size)
        yield _dealt(by_suspicion, count)
        for _ in range(SHUFFLES):
            mixed = list(nodes)
            chance.shuffle(mixed)
            yield _dealt(mixed, count)
        if size >= len(nodes):
            return
        size = min(len(nodes), size * 2)


def _dealt(nodes: Sequence[str], count: int) -> tuple[Group, ...]:
    """The nodes dealt out one by one, back and forth, so that the most suspected are in groups of
    their own.
    """
    groups: list[list[str]] = [[] for _ in range(count)]
    for index, node in enumerate(nodes):
        turn, place = divmod(index, count)
        groups[place if turn % 2 == 0 else count - 1 - place].append(node)
    return tuple(tuple(sorted(group)) for group in groups)


def _left(
    groups: tuple[Group, ...],
    heavy: Mapping[Suspicion, float],
    model: FaultModel,
    samples: Sequence[Suspicion],
    draws: Sequence[float],
) -> float:
    """Bits that are still missing after these groups, on average over sampled outcomes."""
    sets = [frozenset(group) for group in groups]
    chances = {suspicion: [model.chance(suspicion, group) for group in sets] for suspicion in heavy}
    total = 0.0
    known: dict[tuple[bool, ...], float] = {}
    for index, truth in enumerate(samples):
        drawn = draws[index * len(sets) : (index + 1) * len(sets)]
        outcome = tuple(draw < own for draw, own in zip(drawn, chances[truth], strict=False))
        if outcome not in known:
            known[outcome] = _entropy_after(outcome, heavy, chances)
        total += known[outcome]
    return total / len(samples)


def _entropy_after(
    outcome: tuple[bool, ...],
    heavy: Mapping[Suspicion, float],
    chances: Mapping[Suspicion, Sequence[float]],
) -> float:
    weights = []
    for suspicion, weight in heavy.items():
        own = weight
        for failed, one in zip(outcome, chances[suspicion], strict=True):
            own *= one if failed else 1.0 - one
        weights.append(own)
    total = math.fsum(weights)
    if total > 0:
        return entropy(weight / total for weight in weights)
    return 0.0
