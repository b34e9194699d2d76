"""The search for bad nodes: which groups to test next, and when it is over. Pure but for what runs
the jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from tr11ops.nodes.suspects import (
    FaultModel,
    GroupOutcome,
    GroupTest,
    Suspicion,
    best,
    entropy,
    likely,
    node_chances,
)
from trainer.contract.record import Record

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
    sure: float = SURE,
    seed: int = 0,
) -> Iterator[SearchRound]:
    """Run rounds until one hypothesis is `sure`, or `most_rounds` have been run; each round as it
    ends.

    `least`: nodes of the smallest group. A job that could not be run says nothing; a round of none
    but such ends it.
    """
    weights = model.suspicions(nodes)
    chance = random.Random(seed)
    for _ in range(most_rounds):
        tests = tuple(run(plan_round(nodes, weights, model, least, chance)))
        weights = model.after(weights, tests)
        yield SearchRound(tests, weights)
        if best(weights)[1] >= sure or all(test.outcome is GroupOutcome.UNKNOWN for test in tests):
            return


def result_of(rounds: Sequence[SearchRound], sure: float = SURE) -> SearchResult:
    """What the rounds came to. At least one must have been run."""
    suspicion, chance = best(rounds[-1].weights)
    return SearchResult(tuple(rounds), suspicion, chance, chance >= sure)


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
            - _left(groups, heavy, model, samples, draws)
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
