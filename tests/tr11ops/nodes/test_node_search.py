"""The search for bad nodes: rounds it needs, faults that come and go, links, and what no job could
tell.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from msgspec import to_builtins

from tr11ops.nodes.group_job import GroupRequest, LocalGroups, run_group
from tr11ops.nodes.search import (
    COMMAND,
    LINK,
    NOTHING,
    ONE,
    TWO,
    FaultModel,
    GroupOutcome,
    GroupTest,
    SearchResult,
    Suspicion,
    entropy,
    found_bad,
    node_chances,
    result_of,
    search,
)

NODES = tuple(f"n{number:02d}" for number in range(16))


def searched(
    truth: Suspicion, model: FaultModel, *, least: int = 2, rounds: int = 10, seed: int = 0
) -> SearchResult:
    """The search where `truth` holds and the fault shows as often as the model says."""
    chance = random.Random(seed + 1)

    def run(groups: Sequence[tuple[str, ...]]) -> list[GroupTest]:
        return [
            GroupTest(
                frozenset(group),
                GroupOutcome.FAILED if fails(frozenset(group)) else GroupOutcome.PASSED,
            )
            for group in groups
        ]

    def fails(group: frozenset[str]) -> bool:
        shows = model.detection >= 0.95 or chance.random() < model.detection
        return truth.touches(group) and shows

    return result_of(list(search(NODES, run, model, least=least, most_rounds=rounds, seed=seed)))


@pytest.mark.parametrize("least", [2, 4])
def test_each_single_node_within_six_rounds(least: int) -> None:
    for node in NODES:
        result = searched(Suspicion(ONE, frozenset({node})), FaultModel(), least=least)
        assert found_bad(result) == (node,)
        assert len(result.rounds) <= math.log2(len(NODES)) + 2


def test_pairs_of_bad_nodes() -> None:
    for pair in list(combinations(NODES, 2))[::12]:
        result = searched(Suspicion(TWO, frozenset(pair)), FaultModel())
        assert found_bad(result) == pair
        assert len(result.rounds) <= math.log2(len(NODES)) + 2


@pytest.mark.soak
def test_every_pair_of_bad_nodes() -> None:
    for pair in combinations(NODES, 2):
        assert found_bad(searched(Suspicion(TWO, frozenset(pair)), FaultModel())) == pair


def test_a_fault_that_comes_and_goes() -> None:
    model = FaultModel(detection=0.5)
    results = {
        node: searched(Suspicion(ONE, frozenset({node})), model, rounds=20) for node in NODES[::5]
    }
    assert {node: found_bad(result) for node, result in results.items()} == {
        node: (node,) for node in results
    }


def test_a_link_between_two_good_nodes() -> None:
    pair = (NODES[3], NODES[11])
    result = searched(Suspicion(LINK, frozenset(pair)), FaultModel(), least=2, rounds=30)
    assert (result.suspicion.kind, found_bad(result)) == (LINK, pair)


def test_nothing_bad_is_said() -> None:
    result = searched(Suspicion(NOTHING, frozenset()), FaultModel())
    assert result.is_sure and result.suspicion.kind == NOTHING and found_bad(result) == ()


def test_a_command_that_fails_everywhere_accuses_no_node() -> None:
    result = searched(Suspicion(COMMAND, frozenset()), FaultModel())
    assert result.suspicion.kind == COMMAND and result.is_sure and found_bad(result) == ()


def test_jobs_that_cannot_run_accuse_no_one() -> None:
    def refuse(groups: Sequence[tuple[str, ...]]) -> list[GroupTest]:
        return [
            GroupTest(frozenset(group), GroupOutcome.UNKNOWN, "no job could be started")
            for group in groups
        ]

    rounds = list(search(NODES, refuse, FaultModel(), least=2))
    result = result_of(rounds)
    assert len(rounds) == 1 and not result.is_seen and found_bad(result) == ()


def test_beliefs_are_probabilities() -> None:
    model = FaultModel()
    before = model.suspicions(NODES)
    after = model.after(before, [GroupTest(frozenset(NODES[:2]), GroupOutcome.FAILED)])
    assert math.isclose(math.fsum(before.values()), 1.0) and math.isclose(
        math.fsum(after.values()), 1.0
    )
    assert list(node_chances(after))[:2] == list(NODES[:2])
    assert entropy(after.values()) < entropy(before.values())


# ----------------------------------------------------------------------------- what a group runs
@pytest.mark.parametrize(
    ("command", "outcome", "why"),
    [
        ("exit 0", "passed", ""),
        ("echo the fan is off; exit 3", "failed", "exit status 3: the fan is off"),
        ("sleep 60", "failed", "did not end within 0.5 s"),
    ],
)
def test_how_a_command_ends(command: str, outcome: str, why: str) -> None:
    request = GroupRequest(("n01",), command, 0.5, on_slurm=False)
    assert run_group(to_builtins(request)) == {"outcome": outcome, "why": why}


def test_without_slurm_each_node_is_named() -> None:
    run = LocalGroups(GroupRequest((), 'test "$SLURMD_NODENAME" != n02', 10))
    assert [test.outcome for test in run([("n01", "n03"), ("n02", "n04")])] == ["passed", "failed"]
