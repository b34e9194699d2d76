"""Which rank computes for longer than its peers: stages differ, machines are noisy, and a single
hiccup is nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.training_course import at, findings, only
from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    beats,
    ended,
    pending,
    running,
    slowed,
    snapshot,
    with_facts,
)
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, Node
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.node_progress import node_progress, slow_nodes
from tr11ops.detect.nodes_left import blame_stands
from tr11ops.detect.slow_ranks import slow_ranks, windows_to_last
from tr11ops.observe.observations import Readmission
from tr11ops.observe.snapshot import KillSwitch
from tr11ops.rundir.exclusion import Exclusion
from trainer.contract.compute_record import ComputeTimes, RankPosition
from trainer.contract.metrics_record import StepRecord

PERCENT = 3.0


def records(
    tensor: int, data: int, pipeline: int, noise: float = 0.005, per_node: int = 2, seed: int = 3
) -> list[ComputeTimes]:
    """Ten steps of every rank; the last stage has the loss to compute too, and takes half as long
    again.
    """
    chance, world = random.Random(seed), tensor * data * pipeline
    found = []
    for rank in range(world):
        place = RankPosition.of(rank, world, tensor, pipeline)
        seconds = (1.5 if place.stage == pipeline - 1 else 1.0) * (1 + abs(chance.gauss(0, noise)))
        parts = {"forward": seconds / 3, "backward": seconds / 2, "optimizer": seconds / 6}
        host = f"n{rank // per_node + 1:02d}"
        found.append(
            ComputeTimes(rank, host, 1, 0.0, 200, 10, parts, seconds, place.stage, place.part)
        )
    return found


def changed(
    given: list[ComputeTimes], ranks: set[int], factor: float, steps: int = 10
) -> list[ComputeTimes]:
    """These ranks take so many times as long in so many of the ten steps."""
    mean = (factor * steps + 10 - steps) / 10
    return [
        replace(
            times, seconds={part: seconds * mean for part, seconds in times.seconds.items()},
            longest=times.total * factor,
        ) if times.rank in ranks else times
        for times in given
    ]  # fmt: skip


def named(given: list[ComputeTimes]) -> list[int]:
    return [found.times.rank for found in slow_ranks(given, PERCENT)]


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 1), (1, 8, 1), (4, 8, 12)])
@pytest.mark.parametrize("noise", [0.0, 0.005, 0.1])
def test_ranks_that_differ_as_much_as_others_are_not_slow(
    shape: tuple[int, int, int], noise: float
) -> None:
    for seed in range(20):
        assert named(records(*shape, noise, seed=seed)) == []


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 1), (1, 8, 1), (4, 8, 12)])
@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05])
def test_a_fifth_of_the_speed_is_named_for_part_of_the_time(
    shape: tuple[int, int, int], noise: float
) -> None:
    for rank in (0, shape[0] * shape[1] * shape[2] - 1):
        given = records(*shape, noise)
        assert named(changed(given, {rank}, 5.0)) == [rank]
        assert named(changed(given, {rank}, 5.0, steps=4)) == [rank], (
            "the median step is as quick as ever"
        )
        assert named(changed(given, {rank}, 5.0, steps=1)) == [], "one long step is a hiccup"


def test_the_slow_gpu_of_april_is_named_among_384() -> None:
    assert named(changed(records(4, 8, 12, noise=0.003, per_node=8), {77}, 149.5 / 141.5)) == [77]
    assert named(changed(records(4, 8, 12, noise=0.05, per_node=8), {77}, 149.5 / 141.5)) == [], (
        "not told from noise"
    )


def test_a_whole_node_is_named_where_it_holds_a_replica_of_two() -> None:
    found = slow_ranks(changed(records(2, 2, 1, per_node=2), {2, 3}, 5.0), PERCENT)
    assert [entry.times.rank for entry in found] == [2, 3]
    assert [round(entry.factor, 1) for entry in found] == [5.0, 5.0] and found[0].peers == 2


def test_what_cannot_be_compared_is_not_judged() -> None:
    slow = changed(records(2, 2, 2), {5}, 5.0)
    assert named([replace(times, stage=None) for times in slow]) == [], "an earlier version's"
    assert named([replace(times, steps=4) for times in slow]) == [], (
        "the first steps choose kernels"
    )
    assert named(changed(records(2, 1, 4), {5}, 5.0)) == [], (
        "one replica: no one else does the same work"
    )
    behind = [replace(times, iteration=150) if times.rank == 5 else times for times in slow]
    assert named(behind) == [], "left from another part of the course"
    assert named([replace(times, seconds={}) for times in slow]) == []
    assert named([]) == []


def alone(
    factors: dict[int, float], usual: float | None = 1.0, ranks: int = 4
) -> list[ComputeTimes]:
    """One replica: each rank is a stage of its own, and takes so many times as long as at first."""
    chance, found = random.Random(5), []
    for rank in range(ranks):
        first = (1 + rank) * (usual or 1.0)
        recent = tuple(
            first * factors.get(rank, 1.0) * (1 + abs(chance.gauss(0, 0.01))) for _ in range(20)
        )
        mean, longest = {"forward": sum(recent[-10:]) / 10}, max(recent[-10:])
        given = first if usual is not None else None
        found.append(
            ComputeTimes(
                rank, f"n{rank}", 1, 0.0, 200, 10, mean, longest, rank, 0, None, recent, given
            )
        )
    return found


def test_a_rank_without_peers_is_compared_with_its_own_first_steps() -> None:
    """One replica alone: stages differ, and only how much longer each takes than at first tells one
    from the others.
    """
    assert named(alone({})) == []
    (slow,) = slow_ranks(alone({2: 3.0}), PERCENT)
    assert (slow.times.rank, slow.by_past, slow.peers) == (2, True, 4)
    assert slow.factor == pytest.approx(3.0, rel=0.05) and slow.usual == pytest.approx(
        3.0, rel=0.05
    )
    assert named(alone({1: 3.0}, ranks=2)) == [1]
    assert named(alone(dict.fromkeys(range(4), 2.0))) == [], "all take longer: it is none of them"
    assert named(alone({2: 1.15})) == [], "the work of stages may change unlike by so much"
    assert named(alone({2: 3.0}, usual=None)) == [], "what was usual is not known"


def test_the_node_of_a_slow_rank_is_named_with_its_numbers() -> None:
    course = at(700, begin=401)  # 8 ranks on 2 nodes
    slow = tuple(changed(records(2, 2, 2, per_node=4, noise=0.0), {5, 6}, 5.0))
    finding = only(course.see(compute_times=slow), "slow-node")
    assert (finding.title, finding.subject, finding.fix) == (
        "n02 holds the others back", "n02", "tr11 nodes exclude n02 --reason 'it holds the others back'",
    )  # fmt: skip
    assert finding.severity is Severity.WARNING and finding.evidence == (
        "its rank 5 computes 5.00 times as long as its peers (and 1 more of its ranks)",
        "7.5 s a step, 1.5 s is usual in stage 1 (10 steps up to iteration 200)",
        "it may have cost 16 min since the first step: 6 % of each step",
    )
    assert findings(course.see(compute_times=tuple(records(2, 2, 2, per_node=4)))) == []
    assert findings(course.see(compute_times=Unknown("stale file handle"))) == []
    elsewhere = tuple(replace(times, host="n99") for times in slow)
    assert findings(course.see(compute_times=elsewhere)) == [], "of nodes that are not the job's"


@pytest.mark.parametrize(
    ("first", "change", "severity"),
    [
        (401, None, Severity.CRITICAL),
        (692, None, Severity.WARNING),  # it has not cost what a stop costs
        (401, 697, Severity.WARNING),  # it was quicker before: `slow` says so, and is critical
    ],
)
def test_a_node_that_was_slow_from_the_first_step_on_calls_someone_once_it_costs_more_than_a_stop(
    first: int, change: int | None, severity: Severity
) -> None:
    """No step was quicker, so that nothing else tells what it costs; 97 of the 105 s of each do."""

    def halved(line: StepRecord) -> StepRecord:
        if change is None or line.iteration < change:
            return line
        return replace(line, tflops=line.tflops / 2)

    times = tuple(changed(records(2, 2, 2, per_node=4, noise=0.0), {5}, 65.0))
    course = at(700, begin=first, change=halved)
    found = only(course.see(compute_times=times), "slow-node")
    assert found.severity is severity, found


@pytest.mark.parametrize(
    ("shape", "state", "said"),
    [
        ({}, "none", "None is slow, measured up to step 690."),
        ({"times": 5.0}, "named", "Slow: n02 (5.00 times the usual), measured up to step 690."),
        # the training has been slow for four steps, and the last record is of before
        ({"slow": 697}, "waiting", "slow since iteration 697 (7 min"),
        ({"slow": 697}, "waiting", "tell by which node from iteration 707 on."),
        (
            {"slow": 697, "last": 4.0},
            "suspected",
            "n02 (4.00 times the usual). That is not certain",
        ),
        ({"slow": 697, "times": 5.0}, "named", "Slow since iteration 697 (7 min"),
        ({"last": 4.0}, "none", "None is slow, measured up to step 690"),
        (
            {"slow": 660},
            "none",
            "None is named, measured up to step 690, though the training is slow",
        ),
        ({"steps": 1}, "unknown", "from iteration 700 on they can be compared."),
        ({"ranks": 0}, "unmeasured", "Not known yet: no rank has measured enough steps beside"),
    ],
)
def test_which_node_is_slow_has_one_answer_at_each_moment(
    shape: dict[str, float], state: str, said: str
) -> None:
    """Of records of ten steps up to iteration 690, the training seen after its iteration 700."""

    def change(line: StepRecord) -> StepRecord:
        if line.iteration < shape.get("slow", 999):
            return line
        return replace(line, tflops=line.tflops / 2)

    given = []
    for one in records(2, 2, 2, per_node=4, noise=0.0)[: int(shape.get("ranks", 8))]:
        is_slow = one.rank == 5
        recent = [one.total * (shape.get("times", 1.0) if is_slow else 1.0)] * 10
        recent[7:] = [each * (shape.get("last", 1.0) if is_slow else 1.0) for each in recent[7:]]
        steps = int(shape.get("steps", 10))
        given.append(replace(one, iteration=690, steps=steps, recent=tuple(recent[:steps])))
    seen = at(700, begin=401, change=change).see(compute_times=tuple(given))
    found = slow_nodes(seen, node_progress(seen))
    assert found is not None and (found.state, said in found.text) == (state, True), found
    assert found.nodes == (("n02",) if state in {"named", "suspected"} else ())
    short = {"named": ("slow: n02",), "suspected": ("may be slow: n02",), "unmeasured": ()}
    usual = () if state == "none" else ("slow: not known",)
    assert found.words == short.get(state, usual)
    assert slow_nodes(seen, ()) is None, "where nothing trains there is nothing to say"


def test_a_record_whose_steps_took_no_time_but_one_is_left_out() -> None:
    given = records(1, 4, 1)
    for idle in ({0}, {0, 1}, {0, 1, 2, 3}):
        odd = [
            replace(times, longest=times.total * 10) if times.rank in idle else times
            for times in given
        ]
        assert named(odd) == []


# ------------------------------------------------------------- by the last twenty steps, one by one
Steps = list[list[float]]  # rank, step
Change = Callable[[Steps, random.Random], None]
# tensor, data, pipeline, ranks of a node
SHAPES = ((2, 2, 2, 4), (1, 8, 1, 2), (2, 4, 2, 4), (1, 2, 1, 1))


def healthy(world: int, chance: random.Random, single: float, own: float) -> Steps:
    """Ranks that differ by `own`, steps by `single`, all alike by 5 % (standard deviations of the
    logarithm); one step in 200 is longer, by 30 % in the mean.
    """
    common = [chance.gauss(0, 0.05) for _ in range(20)]
    steps = []
    for _ in range(world):
        rank = chance.gauss(0, own)
        steps.append([
            math.exp(rank + each + chance.gauss(0, single))
            * (1 + chance.expovariate(1 / 0.3) if chance.random() < 0.005 else 1)
            for each in common
        ])  # fmt: skip
    return steps


def recorded(
    steps: Steps, tensor: int, data: int, pipeline: int, per_node: int
) -> list[ComputeTimes]:
    world, found = tensor * data * pipeline, []
    for rank, own in enumerate(steps):
        place, last = RankPosition.of(rank, world, tensor, pipeline), own[-10:]
        found.append(
            ComputeTimes(
                rank, f"n{rank // per_node + 1:02d}", 1, 0.0, 200, 10, {"forward": sum(last) / 10}, max(last),
                place.stage, place.part, None, tuple(own),
            )
        )  # fmt: skip
    return found


def windows(
    shape: tuple[int, int, int, int],
    count: int,
    change: Change | None = None,
    single: float = 0.01,
    own: float = 0.003,
) -> Iterator[list[ComputeTimes]]:
    tensor, data, pipeline, per_node = shape
    chance = random.Random(7)
    for _ in range(count):
        steps = healthy(tensor * data * pipeline, chance, single, own)
        if change is not None:
            change(steps, chance)
        yield recorded(steps, tensor, data, pipeline, per_node)


def alarms(count: int) -> int:
    """False ones, in so many windows of each shape and noise."""
    noises = ((0.005, 0.003), (0.01, 0.003), (0.02, 0.005), (0.1, 0.005))
    return sum(
        bool(named(given))
        for shape in SHAPES
        for single, own in noises
        for given in windows(shape, count, None, single, own)
    )


def test_no_false_alarm_in_2000_healthy_windows() -> None:
    assert alarms(125) == 0  # 4 shapes, 4 noises


@pytest.mark.soak
def test_at_most_one_false_alarm_in_10000_windows() -> None:
    assert alarms(2500) <= 4  # 40,000 windows


def always(steps: Steps, _: random.Random) -> None:
    steps[1] = [each * 1.06 for each in steps[1]]


def for_a_part_of_the_time(steps: Steps, chance: random.Random) -> None:
    """Eight steps of twenty, four of each ten, are 15 % longer: 6 % in the mean, and the median is
    as ever.
    """
    for begin in (0, 10):
        for index in chance.sample(range(begin, begin + 10), 4):
            steps[1][index] *= 1.15


@pytest.mark.parametrize("change", [always, for_a_part_of_the_time])
@pytest.mark.parametrize(
    ("shape", "least"), [((2, 2, 2, 4), 0.5), ((1, 8, 1, 2), 0.5), ((2, 4, 2, 4), 0.5)]
)
def test_six_percent_in_the_mean_is_named(
    shape: tuple[int, int, int, int], least: float, change: Change
) -> None:
    found = [named(given) for given in windows(shape, 100, change)]
    assert all(ranks in ([], [1]) for ranks in found)
    assert sum(ranks == [1] for ranks in found) >= 100 * least


def test_a_burst_of_long_steps_that_is_over_is_not_slow() -> None:
    def burst(steps: Steps, _: random.Random) -> None:
        steps[1][3:6] = [each * 1.5 for each in steps[1][3:6]]

    assert not any(named(given) for given in windows((1, 8, 1, 2), 100, burst))


def test_long_steps_on_all_ranks_accuse_no_one() -> None:
    def everywhere(steps: Steps, chance: random.Random) -> None:
        for own in steps:
            for index in chance.sample(range(20), 4):
                own[index] *= 1.5

    assert not any(named(given) for given in windows((1, 8, 1, 2), 100, everywhere))


def test_steps_without_time_are_compared_with_nothing() -> None:
    given = recorded([[1.0] * 20, [0.0] * 20, [1.0] * 20, [5.0] * 20], 1, 4, 1, 1)
    assert named(given) == [3]
    assert named([replace(times, recent=(0.0,) * 20) for times in given]) == []


def test_a_launch_of_few_steps_is_judged_by_their_median() -> None:
    steps = [[1.0, 1.01, 0.99, 1.0, 1.0, 1.02, 1.0] for _ in range(8)]
    steps[4] = [each * 1.3 for each in steps[4]]
    assert named(recorded(steps, 1, 8, 1, 2)) == [4]


# -------------------------------------------------------------- what lasts, and what comes and goes
def over_time(
    own: Callable[[int, int], float], ranks: int = 8, steps: int = 600, seed: int = 11
) -> list[list[float]]:
    """Steps that scatter by 1 %; `own` says how many times as long a rank takes at a step."""
    chance = random.Random(seed)
    return [
        [own(rank, step) * math.exp(chance.gauss(0, 0.01)) for step in range(steps)]
        for rank in range(ranks)
    ]


def seen_at(course: list[list[float]], step: int) -> list[ComputeTimes]:
    """What the records say after a step: the last twenty steps, and the median of each ten before."""
    found = recorded([own[step - 20 : step] for own in course], 1, len(course), 1, 2)
    windows = [
        tuple(median(own[begin : begin + 10]) for begin in range(max(0, step - 600), step, 10))
        for own in course
    ]
    return [replace(times, windows=kept) for times, kept in zip(found, windows, strict=True)]


def busy_neighbours(seed: int) -> Callable[[int, int], float]:
    """A machine that others use too: now and then a rank is 5 to 8 % slower for one to three
    minutes of 1 s steps.
    """
    chance, slow = random.Random(seed), dict[tuple[int, int], float]()
    for rank in range(8):
        step = chance.randrange(200)
        while step < 600:
            factor, lasts = 1 + chance.uniform(0.05, 0.08), chance.randrange(60, 180)
            slow.update({(rank, each): factor for each in range(step, step + lasts)})
            step += lasts + chance.randrange(120, 400)
    return lambda rank, step: slow.get((rank, step), 1.0)


def test_what_comes_and_goes_on_a_shared_machine_is_no_slow_node() -> None:
    without_windows, named_there = 0, []
    for seed in range(6):
        course = over_time(busy_neighbours(seed), seed=seed)
        for step in range(100, 601, 100):
            given = seen_at(course, step)
            without_windows += bool(named([replace(times, windows=()) for times in given]))
            named_there += [
                found.times.rank for found in slow_ranks(given, PERCENT, windows_to_last(1.0))
            ]
    assert without_windows > 6, "the last twenty steps alone accuse someone"
    assert named_there == []


def test_six_percent_that_last_are_named_and_a_quarter_at_once() -> None:
    lasting = over_time(lambda rank, step: 1.06 if rank == 3 else 1.0)
    needed = windows_to_last(5.0)
    assert needed == 12
    assert [
        found.times.rank for found in slow_ranks(seen_at(lasting, 100), PERCENT, needed)
    ] == [], "not known yet"
    assert [found.times.rank for found in slow_ranks(seen_at(lasting, 120), PERCENT, needed)] == [3]
    sudden = over_time(lambda rank, step: 1.4 if rank == 3 and step >= 80 else 1.0)
    assert [found.times.rank for found in slow_ranks(seen_at(sudden, 100), PERCENT, needed)] == [3]
    over = over_time(lambda rank, step: 1.06 if rank == 3 and step < 500 else 1.0)
    assert [found.times.rank for found in slow_ranks(seen_at(over, 520), PERCENT, needed)] == []


def test_small_slowness_lasts_for_ten_minutes_and_sixty_steps() -> None:
    assert [windows_to_last(pace) for pace in (None, 105.0, 10.0, 5.0, 1.0, 0.01)] == [
        6,
        6,
        6,
        12,
        60,
        60,
    ]


def slow_among(
    count: int, pending_jobs: tuple[Job, ...] = (pending(),), **changes: object
) -> Finding:
    """Node n02 is slow, of a partition of so many nodes; an attempt trains on 46 and has 2 spares."""
    nodes = tuple(
        Node(f"n{number:02d}", frozenset({"allocated"})) for number in range(1, count + 1)
    )
    seen = snapshot(
        jobs=(running(), *pending_jobs), nodes=nodes, compute_times=tuple(changed(records(2, 2, 2, per_node=4, noise=0.0), {5, 6}, 5.0)),
        heartbeats=beats(ranks=8), **changes,
    )  # fmt: skip
    seen = with_facts(seen, nodes=46, allocated_nodes=48)
    (finding,) = [one for one in findings(seen) if one.detector == "slow-node"]
    return finding


def test_a_slow_node_stays_known_after_its_attempt_until_it_is_excluded_or_measured_again() -> None:
    """A person stops the run: nothing else keeps the next attempt off the node."""
    times = known(slowed().training.compute_times, ())
    stop = KillSwitch(Path("/scratch/tr11/kill-switch"), "ana", NOW - 60, "to look")
    over: dict[str, Any] = {"compute_times": (), "compute_before": times}
    off = {
        **over,
        "jobs": (pending(),),
        "attempts": (ended("1007", age=60.0),),
        "kill_switch": stop,
    }

    def told(**changes: Any) -> list[Finding]:
        return [one for one in findings(slowed(**changes)) if one.detector == "slow-node"]

    (stopped,) = told(**off)
    assert stopped.title == "n02 held the others back in the last attempt"
    assert stopped.evidence[-1] == "it is not excluded", (
        "no title is true of an all-clear that says so"
    )
    assert (stopped.severity, stopped.identity) == (Severity.WARNING, told()[0].identity)
    assert stopped.evidence[0] == "its rank 1 computes 3.00 times as long as its peers"
    assert stopped.fix == "tr11 nodes exclude n02 --reason 'it holds the others back'"
    assert stopped.then == ("tr11 resume",)
    without_marker = (replace(ended("1007", age=60.0), end=None),)
    assert told(**{**off, "attempts": without_marker, "compute_times": times, "compute_before": ()})
    first_step = tuple(replace(one, steps=1, recent=one.recent[:1]) for one in times)
    short = {**off, "attempts": without_marker, "compute_times": first_step}
    assert told(**short) == [stopped], "an attempt that was ended at once has measured nothing"
    excluded = (Exclusion(node="n02", since=NOW, owner="ann"),)
    assert told(**off, exclusions=excluded) == []
    assert told(**off, readmissions=(Readmission("n02", NOW + 1),)) == [], (
        "a person let it in again"
    )
    quick = Readmission("n02", NOW + 1, of_speed=True)
    assert told(**off, readmissions=(quick,)) == [], "it was measured to be as quick as others"
    assert told(**off, readmissions=(replace(quick, time=NOW - HOUR),)), "before it was slow"
    hung = slowed(**off, readmissions=(quick,))
    assert blame_stands(hung, "n02", NOW, "it hung"), "its speed answers no other blame"
    assert told(**off, scheduler="local") == []
    (again,) = told(**over)  # it runs on the node, and has not measured it
    assert again.then == told()[0].then and again.severity is Severity.WARNING
    well = tuple(replace(one, seconds={"forward": 1.0}, longest=1.0) for one in times)
    assert told(**{**over, "compute_times": well}) == [], "it was measured again, and is well"
    elsewhere = running(nodes=("n01", "n03", "n04"))
    (left_out,) = told(**over, jobs=(elsewhere,), heartbeats=())
    assert left_out.severity is Severity.INFO


def test_what_is_typed_against_a_slow_node_is_what_the_limit_lets_through() -> None:
    stop, resume = "tr11 kill --wait --reason 'to go on without n02'", "tr11 resume"
    plenty = slow_among(60)
    assert plenty.fix == "tr11 nodes exclude n02 --reason 'it holds the others back'"
    assert plenty.then == (stop, resume)
    forced = "tr11 nodes exclude n02 --force --reason 'it holds the others back'"
    as_many = slow_among(48)
    assert as_many.fix == forced
    fewer = "tr11 launch --replace --set slurm.spare_nodes=1"
    assert as_many.then == (fewer, stop, resume), "47 nodes are left: 46 train, and one is a spare"
    nothing_queued = slow_among(48, ())
    assert nothing_queued.then == (
        stop,
        resume,
        "tr11 launch --array 1-10 --set slurm.spare_nodes=1",
    )


def test_a_slow_node_stays_where_no_other_can_take_its_place() -> None:
    listed = tuple(Exclusion(node=f"n{number}", since=NOW, owner="ann") for number in (47, 48))
    finding = slow_among(48, exclusions=listed)
    assert (finding.fix, finding.then) == ("tr11 nodes check n02", ())
    assert finding.evidence[-1].startswith("no other node is free: 45 other nodes can be used")
    of_queued = tuple(Exclusion(node=node, why="excluded by job 1008") for node in ("n02", "n48"))
    finding = slow_among(48, exclusions=of_queued)  # n02 itself is counted out once
    assert finding.then[0] == "tr11 launch --replace --set slurm.spare_nodes=0"
