"""The simulated training: what a fault costs, by hand; and the other operations, against each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.rivals import RIVALS, Chain, NoForesight, Oracle, rival_scores
from tr11ops.replay.traces import Fault, FaultSign, Window
from tr11ops.replay.world import Score, World

HOUR = 3600.0
# a step a minute, a save of a minute each hour, no evaluation in the way
TIMES = Parameters(
    step=60.0,
    save=60.0,
    interval=59,
    evaluation=0.0,
    start_up=240.0,
    load=60.0,
    next_task=10.0,
    ends_within=0.0,
    time_limit=100 * HOUR,
    leaves_before=0.0,
)
LAYOUT = Layout(nodes=2, spares=1, held=0)
NODES = ("n001", "n002", "n003")


def played(name: str, hours: float, *faults: Fault) -> Score:
    world = World(Window(NODES, hours * HOUR, faults), LAYOUT, TIMES)
    world.run(RIVALS[name](world))
    return Score.of(world, name)


def fault(node: str, begins: float, ends: float, kind: FaultSign = FaultSign.HARDWARE) -> Fault:
    return Fault(node, begins * HOUR, ends * HOUR, kind)


@pytest.mark.parametrize(
    ("seconds", "done", "saved"),
    [(59.0, 0, 0), (60.0, 1, 0), (3540.0, 59, 0), (3599.0, 59, 0), (3600.0, 59, 59), (7260.0, 119, 118)],
)  # fmt: skip
def test_a_save_counts_when_it_is_whole(seconds: float, done: int, saved: int) -> None:
    world = World(Window(NODES, HOUR, ()), LAYOUT, TIMES)
    course = world.course(0, seconds)
    assert (course.done, course.saved) == (done, saved)


def test_a_save_in_the_background_counts_once_it_is_written() -> None:
    times = replace(TIMES, save=6.0, written=120.0)
    world = World(Window(NODES, HOUR, ()), LAYOUT, times)
    # it begins after 59 steps, 3540 s; the steps go on 6 s later
    assert world.course(0, 3659.0).saved == 0
    course = world.course(0, 3660.0)
    assert (course.done, course.saved, list(course.saves)) == (60, 59, [59])


def test_saves_come_between_those_of_the_interval() -> None:
    world = World(Window(NODES, HOUR, ()), LAYOUT, TIMES)
    # each save stops the steps for a minute; the next begins 20 minutes after the last has begun
    course = world.course(0, 3 * HOUR, save_seconds=1200.0)
    assert list(course.saves) == [20, 39, 58, 59, 78, 97, 116, 118, 137, 156]


def test_an_evaluation_needs_no_save() -> None:
    times = replace(TIMES, evaluation=30.0, evaluation_interval=50)
    world = World(Window(NODES, HOUR, ()), LAYOUT, times)
    course = world.course(0, 2 * HOUR)
    assert (list(course.saves), list(course.evaluations)) == ([59, 118], [50, 100])


def test_a_bad_node_burns_task_after_task() -> None:
    score = played("sbatch array", 10.0, fault("n001", 5.0, 9.0))
    # Slurm offers the node for 5 more minutes: each next task dies on it at once, until the array of
    # ten is used up, and someone submits another two hours later.
    assert (score.burned, score.tasks, score.acts) == (9, 11, 1)
    assert score.effective == score.iterations * TIMES.step / (10 * HOUR)


def test_a_node_that_is_excluded_burns_no_second_task() -> None:
    score = played("exclude at first failure", 10.0, fault("n001", 5.0, 9.0))
    assert (score.burned, score.tasks, score.excluded, score.innocent) == (0, 2, 1, 0)
    # 4 h 55 min of training until it: four saves, and 55 iterations that are lost; then, after ten
    # seconds and a start, four more saves and 54 iterations
    assert score.iterations == 4 * 59 + 4 * 59 + 54


def test_what_goes_on_with_a_fault_ends_nothing() -> None:
    score = played("sbatch array", 10.0, fault("n001", 5.0, 9.0, FaultSign.DEGRADED))
    assert (score.tasks, score.launches) == (1, 1)


def test_a_training_waits_where_too_few_nodes_are_left() -> None:
    lost = (fault("n001", 2.0, 8.0, FaultSign.LOSS), fault("n002", 2.0, 6.0, FaultSign.LOSS))
    score = played("exclude at first failure", 10.0, *lost)
    assert 3.0 < score.waited_hours < 4.0


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_no_one_is_better_than_the_oracle(name: str) -> None:
    faults = (
        fault("n001", 1.0, 2.0),
        fault("n002", 3.3, 3.4, FaultSign.CRASH),
        fault("n001", 5.5, 7.0, FaultSign.NETWORK),
        fault("n003", 6.0, 6.5, FaultSign.LOSS),
    )
    assert played(name, 20.0, *faults).effective <= played("oracle", 20.0, *faults).effective


def test_one_who_foresees_nothing_is_no_better_than_the_oracle() -> None:
    faults = (fault("n001", 2.3, 3.0), fault("n002", 5.7, 6.0), fault("n003", 8.2, 8.5))
    window = Window(NODES, 20 * HOUR, faults)
    found = {score.operation: score for score in rival_scores(window, LAYOUT)}
    best, oracle = found[NoForesight.name], found[Oracle.name]
    assert best.effective < oracle.effective
    # it can choose its interval when all is over, which an array of jobs cannot
    assert best.lost_percent["redone"] < found[Chain.name].lost_percent["redone"]


def test_the_account_closes() -> None:
    world = World(Window(NODES, 10 * HOUR, (fault("n001", 5.0, 9.0),)), LAYOUT, TIMES)
    world.run(Chain(world))
    held = world.account.held / LAYOUT.nodes
    assert held + world.account.waited == pytest.approx(10 * HOUR)
    assert world.now == world.end


def test_the_oracle_takes_the_node_that_stays_well() -> None:
    world = World(Window(NODES, 10 * HOUR, (fault("n001", 5.0, 9.0),)), LAYOUT, TIMES)
    world.run(Oracle(world))
    assert (world.account.launches, world.account.burned) == (1, 0)


# ----------------------------------------------------------------------------- where the time went
BAD_DAY = (
    fault("n001", 1.0, 2.0),
    fault("n002", 3.3, 3.4, FaultSign.CRASH),
    fault("n001", 5.5, 7.0, FaultSign.NETWORK),
    fault("n003", 6.0, 6.5, FaultSign.LOSS),
)


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_all_time_trained_or_was_lost_by_something(name: str) -> None:
    score = played(name, 20.0, *BAD_DAY)
    assert score.percent + sum(score.lost_percent.values()) == pytest.approx(100.0)
    assert min(score.lost_percent.values()) >= 0.0


def test_what_a_fault_has_cost_is_said_by_hand() -> None:
    score = played("exclude at first failure", 10.0, fault("n001", 5.0, 9.0))
    lost = {name: share * 10 * 36 for name, share in score.lost_percent.items()}  # seconds
    # 55 steps since the fourth save, and 50 s of one at the window's end; eight saves; two starts of
    # five minutes and ten seconds between
    assert lost["redone"] == pytest.approx(55 * 60.0 + 50.0)
    assert lost["saves"] == pytest.approx(8 * 60.0)
    assert lost["starts"] == pytest.approx(2 * 300.0 + 10.0)
    assert (lost["broken"], lost["kept_out"], lost["held"]) == (0.0, 0.0, 0.0)


def test_waiting_is_for_nodes_that_are_broken_or_for_someone() -> None:
    lost = (fault("n001", 2.0, 8.0, FaultSign.LOSS), fault("n002", 2.0, 6.0, FaultSign.LOSS))
    score = played("oracle", 10.0, *lost)
    assert score.lost_percent["broken"] == pytest.approx(40.0, abs=2.0)
    # ten tasks die on a node that no one takes out in time: two hours until someone queues more
    score = played("sbatch array", 10.0, fault("n001", 5.0, 9.0))
    assert score.lost_percent["held"] == pytest.approx(20.0)
