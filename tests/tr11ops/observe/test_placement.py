"""Whether a queued job can be placed where it is queued: partitions that are shut, and those without its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tr11ops.status_cases import pending, running, snapshot
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.observe import derived
from tr11ops.observe.placement import is_shut, misplaced

GPU = tuple(Node(f"n{k}", frozenset({"idle", "drain"}), gpus=8, partitions=("gpu",)) for k in range(48))
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
def test_what_the_nodes_say_of_a_queued_job(nodes: Any, job: dict[str, Any], shut: bool, words: str) -> None:
    queued = pending(**job)
    seen = snapshot(jobs=(running(), queued), nodes=nodes)
    assert (is_shut(seen, queued), misplaced(seen, queued)) == (shut, words)
    assert bool(derived.startable_jobs(seen)) is (words == "")
    assert bool(derived.sure_jobs(seen)) is (words == "" and not shut)


def test_what_waits_behind_a_misplaced_job_is_no_cover_either() -> None:
    first = pending(partition="cpu")
    behind = replace(first, job_id="2000", raw_id="2000", array_id=None, partition="gpu", dependency="afterany:1000")
    seen = snapshot(jobs=(running(), first, behind), nodes=GPU + CPU)
    assert derived.startable_jobs(seen) == ()
