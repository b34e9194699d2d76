"""Whether a queued job can be placed where it is queued: partitions that are shut, and those
without its nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import pending, running, snapshot
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.observe import derived
from tr11ops.observe.placement import is_shut, misplaced, too_few_usable, with_reasons_of_now
from tr11ops.rundir.exclusion import Exclusion

GPU = tuple(Node(f"n{k}", frozenset({"idle"}), gpus=8, partitions=("gpu",)) for k in range(48))
CPU = (Node("c1", frozenset({"idle"}), partitions=("cpu",)),)
SHUT = tuple(replace(node, shut_partitions=("gpu",)) for node in GPU)


@pytest.mark.parametrize(
    ("nodes", "job", "shut", "words"),
    [
        (GPU, {"partition": "gpu", "gpus_per_node": 8}, False, ""),
        (SHUT, {"partition": "gpu", "gpus_per_node": 8}, True, ""),
        (SHUT + CPU, {"partition": "gpu,cpu"}, False, ""),  # the other one is open
        (CPU, {"partition": "cpu"}, False, "it asks for 48 nodes, partition cpu has 1"),
        (CPU, {"partition": "cpu", "node_count": 1, "gpus_per_node": 8}, False,
         "it asks for 1 node with 8 GPUs, partition cpu has 0"),
        (GPU + CPU, {"partition": "cpu,gpu"}, False, ""),
        (GPU, {"partition": "elsewhere"}, False, ""),  # of which nothing is known
        (GPU, {"partition": ""}, False, ""),
        (Unknown("away"), {"partition": "gpu"}, False, ""),
    ],
)  # fmt: skip
def test_what_the_nodes_say_of_a_queued_job(
    nodes: Any, job: dict[str, Any], shut: bool, words: str
) -> None:
    queued = pending(**job)
    seen = snapshot(jobs=(running(), queued), nodes=nodes)
    assert (is_shut(seen, queued), misplaced(seen, queued)) == (shut, words)
    assert bool(derived.startable_jobs(seen)) is (words == "")
    assert bool(derived.sure_jobs(seen)) is (words == "" and not shut)


@pytest.mark.parametrize(
    ("reason", "nodes", "partition", "now"),
    [
        ("PartitionInactive", GPU, "gpu", "None"),
        ("PartitionDown", GPU, "gpu", "None"),
        ("PartitionDown", SHUT + CPU, "gpu,cpu", "None"),
        ("PartitionDown", SHUT, "gpu", "PartitionDown"),
        ("PartitionDown", (), "gpu", "PartitionDown"),  # nothing is known of it
        ("PartitionDown", CPU, "gpu", "PartitionDown"),
        ("PartitionDown", GPU, "", "PartitionDown"),
        ("JobHeldUser", GPU, "gpu", "JobHeldUser"),
    ],
)
def test_a_partition_that_is_open_again_keeps_no_job_waiting_for_the_site(
    reason: str, nodes: tuple[Node, ...], partition: str, now: str
) -> None:
    """Slurm says why its last attempt to start a job failed, until the next one."""
    (job,) = with_reasons_of_now((pending(reason=reason, partition=partition),), nodes)
    assert job.reason == now


def short(*states: str) -> tuple[Node, ...]:
    return (replace(GPU[0], states=frozenset(states)), *GPU[1:])


@pytest.mark.parametrize(
    ("nodes", "job", "words"),
    [
        (GPU, {}, ""),
        (short("down"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("idle", "not_responding"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("mixed", "drain"), {}, "47 of 48 nodes of gpu can be used, it asks for 48"),
        (short("allocated"), {}, ""),  # free when its work ends
        (short("unknown"), {}, ""),  # the controller has just begun
        (short("down"), {"node_count": 47}, ""),
        (short("down"), {"partition": "gpu,all"}, ""),  # of the other one nothing is known
        (GPU, {"excluded": ("n3",)}, "47 of 48 nodes of gpu can be used, it asks for 48"),
    ],
)
def test_what_has_too_few_nodes_now_is_queued_and_covers_nothing(
    nodes: Any, job: dict[str, Any], words: str
) -> None:
    queued = pending(**{"partition": "gpu", "gpus_per_node": 8, **job})
    seen = snapshot(jobs=(running(), queued), nodes=nodes)
    assert too_few_usable(seen, queued) == words
    assert derived.startable_jobs(seen) == (queued,), "it starts when the nodes are back"
    assert bool(derived.sure_jobs(seen)) is (words == "")
    assert derived.some_wait_for_nodes(seen) is (words != "")
    assert not derived.some_wait_for_site(seen)


def test_what_the_run_excludes_cannot_be_used() -> None:
    queued = pending(partition="gpu")
    listed = snapshot(jobs=(queued,), nodes=GPU, exclusions=(Exclusion("n3", "Xid 79", "tr11"),))
    assert too_few_usable(listed, queued)


def test_what_waits_behind_a_misplaced_job_is_no_cover_either() -> None:
    first = pending(partition="cpu")
    behind = replace(
        first,
        job_id="2000",
        raw_id="2000",
        array_id=None,
        partition="gpu",
        dependency="afterany:1000",
    )
    seen = snapshot(jobs=(running(), first, behind), nodes=GPU + CPU)
    assert derived.startable_jobs(seen) == ()
