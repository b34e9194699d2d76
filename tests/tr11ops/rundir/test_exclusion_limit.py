"""How many nodes may be excluded: one pure rule, and the same answer for everyone who asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tr11ops.agent.queues import Queue
from tests.tr11ops.detect.operation_table import operated
from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.status_cases import pending, running
from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.node_exclusions import NodeExclusions
from tr11ops.agent.step import LineTee
from tr11ops.cli.nodes_check import NodesContext
from tr11ops.cluster.base import Job, Node, Partition
from tr11ops.cluster.local import LocalScheduler
from tr11ops.detect.nodes_left import exclusion_limit
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.runcard.card import load_card
from tr11ops.rundir.exclusion import (
    ExclusionLimit,
    most_exclusions,
    partition_nodes,
    percent_for,
)
from tr11ops.rundir.paths import RunDirectory


@given(st.integers(0, 400), st.integers(0, 400), st.none() | st.floats(0, 100, allow_nan=False))
def test_the_limit_never_reaches_into_what_is_needed(
    partition: int, needed: int, percent: float | None
) -> None:
    most = most_exclusions(partition, needed, percent)
    assert most >= 0 and (most == 0 or partition - most >= needed)
    if percent is not None:
        assert most <= partition * percent / 100 + 1


@pytest.mark.parametrize(
    ("partition", "needed", "percent", "most"),
    [
        (52, 48, 10, 4), (500, 48, 10, 50), (6, 2, 10, 1), (48, 48, 10, 0), (5, 2, 10, 1), (8, 4, 0, 0),
        (8, 4, None, 2),  # two bad nodes do not stop a run of four
        (8, 7, None, 1), (8, 1, None, 1), (6, 2, None, 2), (5, 5, None, 0), (52, 48, None, 4), (500, 48, None, 50),
    ],
)  # fmt: skip
def test_the_limit(partition: int, needed: int, percent: float | None, most: int) -> None:
    assert most_exclusions(partition, needed, percent) == most


def test_what_is_outside_the_partition_does_not_count() -> None:
    limit = ExclusionLimit.of(("n1", "n2", "n3", "n4"), 2, 25)
    assert (limit.most, limit.counted({"n1", "gone", "cpu1"})) == (1, 1)
    assert (
        limit.forbids(["n2"], {"n1"})
        and not limit.forbids(["n2"], {"gone"})
        and not limit.forbids(["n1"], {"n1"})
    )
    assert not limit.forbids(["cpu1"], {"n1"}), "it takes nothing from the run"
    assert limit.forbids(["n1", "n2"], ()) and not limit.forbids(["n1", "cpu1"], ())
    assert not limit.forbids(["n1", "cpu1"], {"n1", "n2"}), (
        "what is beyond the limit already may stay"
    )
    assert ExclusionLimit(1).forbids(["n2"], {"anything"}), (
        "where the partition is not known, all count"
    )


CLUSTER = (
    *(Node(f"n{number}", frozenset({"idle"}), partitions=("gpu_p5",)) for number in range(1, 9)),
    *(Node(f"m{number}", frozenset({"idle"}), partitions=("gpu_p6",)) for number in range(1, 6)),
)


@pytest.mark.parametrize(
    ("of_card", "job", "most", "needed"),
    [
        ("gpu_p5", pending(partition="gpu_p5", node_count=4), 2, 4), ("gpu_p6", None, 1, 4),
        # a person has moved the job: it starts there
        ("gpu_p6", pending(partition="gpu_p5", node_count=4), 2, 4),
        # what follows it goes where the card says
        ("gpu_p6", running(partition="gpu_p5", node_count=4), 1, 4),
        # the cluster's default one is another
        ("", pending(partition="gpu_p6", node_count=4), 1, 4),
        ("", pending(partition="gpu_p5,gpu_p6", node_count=4), 4, 4),  # the job may go to either
        # it was queued as the card was before
        ("gpu_p5", pending(partition="gpu_p5", node_count=7), 1, 7),
        ("gpu_p5", pending(partition="gpu_p5", node_count=8), 0, 8),
        ("gpu_p5", pending(partition="gpu_p5", node_count=2, reason="JobHeldUser", priority=0), 2, 2),
        # what can never start there needs nothing
        ("gpu_p5", pending(partition="gpu_p6", node_count=6), 2, 4),
        ("gpu_p5", pending(partition="gpu_p5", node_count=8, reason="BadConstraints"), 2, 4),
        ("gpu_p5", running(partition="gpu_p5", node_count=7), 2, 4),  # it has its nodes
    ],
)  # fmt: skip
def test_everyone_who_asks_gets_the_same_answer(
    tmp_path: Path, of_card: str, job: Job | None, most: int, needed: int
) -> None:
    """Command, job, watchdog and detectors: what is queued counts, before the card, spares and one
    partition.
    """
    named = [f"slurm.partition={of_card}"] if of_card else []
    card = load_card(write_card(tmp_path), ["slurm.spare_nodes=2", *named], {}, directory=tmp_path)
    directory = RunDirectory(card.paths, card.kill_switch)
    jobs = (
        ()
        if job is None
        else (replace(job, comment=directory.comment("20260101-000000-00000000")),)
    )
    of_slurm = {"partition": of_card or "", "allocated_nodes": card.slurm.allocated_nodes}
    seen = exclusion_limit(operated(facts=of_slurm, nodes=CLUSTER, jobs=jobs))

    names = tuple(node.name for node in CLUSTER if "gpu_p5" in node.partitions)
    default = Partition("gpu_p5", None, names, is_default=True)
    desk = NodesContext(card, directory, LocalScheduler(), "me", CLUSTER, default, jobs, ())
    assert desk.limit == seen

    scheduler = LocalScheduler()
    scheduler.nodes = lambda: CLUSTER  # type: ignore[method-assign]
    queue = PendingJobs(Queue(*jobs), directory, None, lambda _: None, pause=lambda _: None)  # type: ignore[arg-type]
    environment = {"SLURM_JOB_PARTITION": job.partition if job is not None else ""}
    allocation = Allocation("slurm", "11", None, None, ())
    context = AttemptContext(card, allocation, environment, "", scheduler)
    exclusions = NodeExclusions(context, queue, LineTee(tmp_path / "log"))
    exclusions.prepare()
    exclusions.wait()
    assert exclusions._limit == seen
    assert seen is not None and (seen.most, seen.needed) == (most, needed)


def test_the_default_partition_counts_where_none_is_named() -> None:
    assert len(partition_nodes(CLUSTER, "", None, "gpu_p6")) == 5
    assert len(partition_nodes(CLUSTER, "closed", "")) == 13, (
        "a partition that no node has says nothing"
    )


@pytest.mark.parametrize("partition", [1, 3, 7, 44, 433])
def test_the_percentage_that_lets_so_many_be_excluded_is_the_least_one(partition: int) -> None:
    for count in range(1, partition):
        percent = percent_for(partition, 1, count)
        assert percent is not None and most_exclusions(partition, 1, percent) >= count
        assert most_exclusions(partition, 1, percent - 1) < count
    assert percent_for(partition, 1, partition) is None  # an attempt needs one
