"""What is queued may ask for more nodes, or for fewer, than the card says now: it is the queue that
counts. Real Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun
from tr11ops.cli.main import execute
from tr11ops.nodes.queue_exclusions import RunQueue, exclude_nodes, known_names
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, read_version
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

NODES = tuple(f"jean-zay-iam0{number}" for number in range(1, 7))
# of six: three that train, and two spares, where the card has one
FIVE = ("--set", "slurm.spare_nodes=2")


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    plan = TwinPlan(
        name="queued-need",
        nodes=6,
        gpus=0,
        cpu_nodes=0,
        slurmd_timeout_seconds=6,
        message_timeout_seconds=5,
    )
    with Twin.up(plan, twin_home) as made:
        yield made


def listed(stage: SmallRun) -> set[str]:
    return {entry.node for entry in read_version(stage.directory.exclusions).exclusions}


def avoid(stage: SmallRun, *nodes: str) -> None:
    """As an attempt does with nodes that died twice."""
    queue = RunQueue(stage.slurm, stage.living, lambda: known_names(stage.slurm), kept=())
    state = NodeStanding.AVOID.value
    asked = [Exclusion(node, "it died twice", AUTOMATIC_OWNER, state=state) for node in nodes]
    done = exclude_nodes(stage.directory, asked, queue, days=14)
    assert done.nodes == nodes and not done.failures


def test_no_more_is_excluded_than_what_is_queued_can_do_without(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the card, of four nodes, two of six may be excluded; the array that waits asks for five."""
    inject(stage.twin, "partition-down")
    stage.launch(3)
    assert execute(["launch", "--replace", *FIVE, "--yes"]) == 0
    assert stage.queued().node_count == 5
    capsys.readouterr()
    assert (
        execute(["nodes", "exclude", f"{NODES[4]},{NODES[5]}", "--reason", "doubt", "--yes"]) == 1
    )
    assert "at most 1 may be excluded, for an attempt needs 5" in " ".join(
        capsys.readouterr().err.split()
    )
    assert execute(["nodes", "exclude", NODES[5], "--reason", "doubt", "--yes"]) == 0
    heal(stage.twin, kind="partition-down")
    stage.train()


def test_an_agent_excludes_as_many_as_what_is_queued_now_can_do_without(stage: SmallRun) -> None:
    """It began with five nodes of six, and one is excluded; what follows it asks for three."""
    stage.launch(3, FIVE[1])
    attempt = stage.train()
    assert execute(["nodes", "exclude", NODES[5], "--reason", "doubt", "--yes"]) == 0
    assert execute(["launch", "--replace", "--set", "slurm.spare_nodes=0", "--yes"]) == 0
    assert stage.queued().node_count == 3
    inject(stage.twin, "node-dead", node=NODES[1])
    stage.wait(
        lambda: len(stage.launches(attempt)) == 2 or stage.queued().reason.startswith("JobHeld"),
        "a launch",
    )
    stage.wait(lambda: listed(stage) == {NODES[1], NODES[5]}, "the exclusion of the dead node")
    stage.wait(lambda: set(stage.queued().excluded) == {NODES[1], NODES[5]}, "the queue")


def test_an_attempt_starts_without_the_spares_that_are_not_there(stage: SmallRun) -> None:
    """Two of six nodes are drained: three train, of two spares one is there; the next task has both."""
    for node in NODES[4:]:
        inject(stage.twin, "drain", node=node)
    stage.launch(2, FIVE[1], "slurm.least_spare_nodes=0")
    attempt = stage.train()
    assert stage.running().nodes == NODES[:4]
    assert stage.queued().node_count == 3
    heal(stage.twin, kind="drain")
    stage.wait(lambda: all(node.is_usable for node in stage.slurm.nodes()), "six nodes")
    stage.slurm.signal(attempt, "USR1")
    stage.train(1)
    assert stage.running().nodes == NODES[:5]


def test_an_avoided_node_is_used_again_where_what_is_queued_needs_it(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four others are free: enough for the card, one too few for the array, which would wait for
    ever.
    """
    inject(stage.twin, "partition-down")
    stage.launch(3)
    assert execute(["launch", "--replace", *FIVE, "--yes"]) == 0
    avoid(stage, *NODES[4:])
    execute(["pulse", "--act"])
    assert listed(stage) == {NODES[5]}, capsys.readouterr().out
    heal(stage.twin, kind="partition-down")
    stage.train()


def test_an_avoided_node_is_left_alone_where_what_is_queued_needs_fewer(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three others are free: what the array asks for, one fewer than the card."""
    inject(stage.twin, "partition-down")
    stage.launch(3)
    assert execute(["launch", "--replace", "--set", "slurm.spare_nodes=0", "--yes"]) == 0
    avoid(stage, *NODES[3:])
    execute(["pulse", "--act"])
    assert listed(stage) == set(NODES[3:]), capsys.readouterr().out
    heal(stage.twin, kind="partition-down")
    attempt = stage.train()
    assert set(stage.launches(attempt)[0]["nodes"]) == set(NODES[:3])
