"""The search for bad nodes: rounds it needs, faults that come and go, links, and what no job could
tell.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
from msgspec import to_builtins

from tr11ops.nodes.bench_job import BenchRequest, LocalBench, measure, read_answers, run_bench
from tr11ops.nodes.bench_outliers import (
    FINE,
    SLOW,
    UNKNOWN,
    NodeAnswer,
    NodeSpeed,
    judge_speeds,
    read_answer,
)
from tr11ops.nodes.group_job import GroupRequest, groups_here, run_group
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
from trainer.contract.documents import record_of

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
    run = partial(groups_here, request=GroupRequest((), 'test "$SLURMD_NODENAME" != n02', 10))
    assert [test.outcome for test in run([("n01", "n03"), ("n02", "n04")])] == ["passed", "failed"]


# ---------------------------------------------------------------------------
# Nodes by their measurements: equal ones are never slow, a slow one is, and what no one can
# compare is not judged.


RECORDED = Path(__file__).parents[2] / "data" / "node_bench" / "shared_machine.json"
SAMPLES: dict[str, list[float]] = json.loads(RECORDED.read_text(encoding="utf-8"))["samples"]
REPEATS = 5
Source = Callable[[random.Random], Sequence[float]]  # a node's samples of one measurement


def steady(chance: random.Random) -> list[float]:
    """Nodes of their own: samples 1 % apart, nodes 0.5 %."""
    own = chance.gauss(0, 0.005)
    return [math.exp(own + chance.gauss(0, 0.01)) for _ in range(REPEATS)]


def uneven(chance: random.Random) -> list[float]:
    """Nodes that differ by 2 %, as parts of one type do."""
    own = chance.gauss(0, 0.02)
    return [math.exp(own + chance.gauss(0, 0.01)) for _ in range(REPEATS)]


def disturbed(chance: random.Random) -> list[float]:
    """One sample in twenty is up to 40 % slower: something else ran for a moment."""
    own = chance.gauss(0, 0.01)
    return [
        math.exp(own + chance.gauss(0, 0.02))
        * (1 - 0.4 * chance.random() * (chance.random() < 0.05))
        for _ in range(REPEATS)
    ]


def recorded(name: str) -> Source:
    """Samples in a row of one measurement, on a machine with ten times the work that it has
    processors for.
    """

    def source(chance: random.Random) -> Sequence[float]:
        begin = chance.randrange(len(SAMPLES[name]) - REPEATS)
        return SAMPLES[name][begin : begin + REPEATS]

    source.__name__ = name
    return source


EQUAL = (steady, uneven, disturbed, *map(recorded, sorted(SAMPLES)))


def fleet(source: Source, chance: random.Random, size: int, names: int = 4) -> list[NodeAnswer]:
    return [
        NodeAnswer(
            f"n{number:02d}", "", {f"m{name}": {"": tuple(source(chance))} for name in range(names)}
        )
        for number in range(size)
    ]


def slower(answer: NodeAnswer, name: str, factor: float) -> NodeAnswer:
    samples = {
        **answer.samples,
        name: {"": tuple(value * factor for value in answer.samples[name][""])},
    }
    return NodeAnswer(answer.node, answer.hardware, samples)


def slow(found: Sequence[NodeSpeed]) -> list[str]:
    return [entry.node for entry in found if entry.outcome == SLOW]


# ----------------------------------------------------------------------------- who is slow
@pytest.mark.parametrize("source", EQUAL, ids=lambda source: source.__name__)
def test_at_most_ten_of_1000_fleets_of_equal_nodes_accuse(source: Source) -> None:
    chance = random.Random(11)
    wrong = sum(
        bool(slow(judge_speeds(fleet(source, chance, chance.choice([4, 8, 16])))))
        for _ in range(1000)
    )
    assert wrong <= 10


@pytest.mark.parametrize("size", [4, 8, 16, 52])
def test_a_node_at_80_percent_is_found(size: int) -> None:
    chance = random.Random(5)
    found = 0
    for _ in range(40):
        answers = fleet(steady, chance, size)
        answers[1] = slower(answers[1], "m2", 0.8)
        speeds = judge_speeds(answers)
        assert set(slow(speeds)) <= {"n01"}
        found += speeds[1].slow == ("m2",)
    assert found >= 38


@pytest.mark.parametrize(("repeats", "most"), [(3, 30), (5, 10)])
@pytest.mark.parametrize("source", EQUAL, ids=lambda source: source.__name__)
def test_hardly_a_fleet_of_three_equal_nodes_accuses(
    source: Source, repeats: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000; with three samples of each, on a machine with ten times its work, even a median is
    hardly known.
    """
    monkeypatch.setattr(sys.modules[__name__], "REPEATS", repeats)
    chance = random.Random(11)
    wrong = sum(bool(slow(judge_speeds(fleet(source, chance, 3)))) for _ in range(1000))
    assert wrong <= most


def uneven_busy(chance: random.Random) -> list[float]:
    """Nodes of a busy machine: they differ by some 10 %, and so do their samples."""
    own = chance.gauss(0, 0.1)
    return [math.exp(own + chance.gauss(0, 0.1)) for _ in range(3)]


@pytest.mark.parametrize("names", [1, 4])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_node_far_below_the_others_is_named_or_doubted_but_never_fine(
    size: int, names: int
) -> None:
    chance = random.Random(7)
    outcomes = []
    for _ in range(100):
        answers = fleet(uneven_busy, chance, size, names)
        for name in answers[1].samples:
            answers[1] = slower(answers[1], name, 0.3)
        found = judge_speeds(answers)
        assert set(slow(found)) <= {"n01"}
        outcomes.append(found[1].outcome)
    assert FINE not in outcomes and outcomes.count(SLOW) >= 90


def test_far_below_by_a_single_sample_or_by_wide_scatter_is_unknown() -> None:
    once = [
        read_answer(f"n{number}", [f"m {value}"]) for number, value in enumerate((100, 130, 30))
    ]
    assert [entry.outcome for entry in judge_speeds(once)] == [FINE, FINE, UNKNOWN]
    wide = [read_answer(f"n{number}", ["m 60", "m 100", "m 170"]) for number in range(3)]
    wide[2] = read_answer("n2", ["m 20", "m 50", "m 90"])
    assert [entry.outcome for entry in judge_speeds(wide)] == [FINE, FINE, UNKNOWN]
    two = [read_answer(f"n{number}", [f"m {value}"] * 3) for number, value in enumerate((100, 30))]
    assert {entry.outcome for entry in judge_speeds(two)} == {UNKNOWN}


def test_nodes_that_scatter_no_wider_than_the_floor_are_equal() -> None:
    same = [NodeAnswer(f"n{number}", "", {"m": {"": (100.0,) * 5}}) for number in range(8)]
    assert {entry.outcome for entry in judge_speeds(same)} == {FINE}
    assert slow(judge_speeds([*same, slower(same[0], "m", 0.97)])) == []
    [entry] = [one for one in judge_speeds([*same[1:], slower(same[0], "m", 0.8)]) if one.slow]
    assert entry.node == "n0" and math.isclose(entry.measured["m"].ratio, 0.8)


def test_one_noisy_sample_accuses_no_one() -> None:
    answers = [
        read_answer(f"n{number}", ["m 100", "m 101", "m 99", "m 100", "m 100.5"])
        for number in range(6)
    ]
    answers[2] = read_answer("n2", ["m 100", "m 20", "m 99", "m 100", "m 101"])
    assert slow(judge_speeds(answers)) == []


def test_only_nodes_of_one_hardware_are_compared() -> None:
    old = [NodeAnswer(f"old{number}", "8 x V100", {"m": {"": (50.0,) * 5}}) for number in range(3)]
    new = [NodeAnswer(f"new{number}", "8 x A100", {"m": {"": (100.0,) * 5}}) for number in range(3)]
    odd = NodeAnswer("odd", "7 x A100", {"m": {"": (100.0,) * 5}})
    found = {entry.node: entry.outcome for entry in judge_speeds([*old, *new, odd])}
    assert found.pop("odd") == UNKNOWN and set(found.values()) == {FINE}
    assert {entry.outcome for entry in judge_speeds(old[:2])} == {UNKNOWN}, (
        "of two no one knows which is usual"
    )


def test_the_slowest_gpu_and_the_best_partner_count() -> None:
    lines = ["gpu-copy@0 100", "gpu-copy@1 70", "all-reduce@3 5", "all-reduce@6 50"]
    answer = read_answer("n1", lines)
    assert (answer.value("gpu-copy"), answer.value("all-reduce"), answer.value("disk-write")) == (
        70,
        50,
        None,
    )


# ----------------------------------------------------------------------------- what a node says
def test_lines_that_are_no_samples_are_skipped() -> None:
    lines = [
        "hardware 2 x A",
        "cpu-fp32 1e9 FLOP/s",
        "cpu-fp32 nan FLOP/s",
        "m -1",
        "m 0",
        "m inf",
        "Loading",
        "a b c d",
    ]
    answer = read_answer("n1", lines)
    assert answer == NodeAnswer("n1", "2 x A", {"cpu-fp32": {"": (1e9,)}}, {"cpu-fp32": "FLOP/s"})
    assert record_of(NodeAnswer, json.loads(json.dumps(to_builtins(answer)))) == answer


@pytest.mark.parametrize(
    ("command", "why", "samples"),
    [
        ("echo tokens 12 /s", "", 3),
        ("echo tokens 12; echo the fan is off; exit 3", "exit status 3: the fan is off", 1),
        ("echo nothing to see here", "it printed no sample: nothing to see here", 0),
        ("echo tokens 12; kill -9 $$", "exit status 137", 1),
    ],
)
def test_how_a_command_ends_bench(command: str, why: str, samples: int) -> None:
    answer = measure(BenchRequest(("n01",), "", 3, command=command, seconds=300, on_slurm=False), 0)
    assert answer.why.removesuffix(": Killed") == why
    assert sum(len(values) for values in answer.samples.get("tokens", {}).values()) == samples


def test_a_node_that_does_not_end_is_given_up() -> None:
    asked = BenchRequest(
        ("n01",), "", 1, command="echo tokens 12; sleep 600 & wait", seconds=2, on_slurm=False
    )
    assert measure(asked, 0).why == "did not end within 2 s"


def test_answers_are_there_as_soon_as_each_node_has_ended(tmp_path: Path) -> None:
    request = BenchRequest(
        ("n01", "n02", "n03"), str(tmp_path), 1, on_slurm=False,
        command='test "$SLURMD_NODENAME" != n02 || exit 4; echo tokens 12',
    )  # fmt: skip
    assert list(read_answers(tmp_path)) == []
    assert run_bench(json.loads(json.dumps(to_builtins(request)))) == 3
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"node": "n0')  # it is being written
    found = {answer.node: answer.why for answer in read_answers(tmp_path)}
    assert found == {"n01": "", "n02": "exit status 4", "n03": ""}


def test_one_machine_measures_one_node_after_the_other() -> None:
    seen: list[str] = []
    request = BenchRequest(("n01", "n02"), "", 2, command="echo tokens 12")
    answers = LocalBench(request)(lambda answer: seen.append(answer.node))
    assert seen == ["n01", "n02"] and [answer.why for answer in answers] == ["", ""]


def test_the_step_of_a_node_names_it_and_its_rank() -> None:
    words = BenchRequest(("n01", "n02"), "/shared", disk="/tmp").words(1)
    assert words[0] == "srun" and "--nodelist=n02" in words
    assert {"--rank=1", "--size=2", "--meet=/shared", "--disk=/tmp"} <= set(words)
