"""The nodes of any job: how many GPUs they shall have, and which of them are good."""

from __future__ import annotations

import pytest

from tr11ops.health.base import CheckOutcome, CheckResult
from tr11ops.nodes.check import NodeCheck
from tr11ops.nodes.job_check import JobNodes, gpus_of_job, judged

FINE, BAD, UNKNOWN = CheckOutcome.FINE, CheckOutcome.BAD, CheckOutcome.UNKNOWN


def node(name: str, **checks: CheckOutcome) -> NodeCheck:
    """A node's answer; its result is what `judged` has to find."""
    return NodeCheck(
        name, BAD, "?", tuple(CheckResult(each, result, "why") for each, result in checks.items())
    )


def of(*answers: NodeCheck, are_machines: bool = True) -> JobNodes:
    return JobNodes(judged(answers, are_machines))


@pytest.mark.parametrize(
    "environment,count",
    [
        ({}, 0),
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": "8"}, 4),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1", "SLURM_GPUS_ON_NODE": "3"}, 3),
        ({"SLURM_GPUS_PER_NODE": "many"}, 0),
    ],
)
def test_the_gpus_are_those_that_slurm_names(environment: dict[str, str], count: int) -> None:
    assert gpus_of_job(environment) == count


def test_a_check_that_no_node_could_make_keeps_none_out() -> None:
    """As before a launch; the words say how many there were."""
    found = of(*(node(name, xid=UNKNOWN, memory=FINE) for name in "abc"))
    assert found.good == ("a", "b", "c") and not found.bad + found.unknown
    assert found.results[0].why == "1 check fine, 1 unknown (xid)"


def test_a_node_that_cannot_be_asked_what_the_others_answer_is_unknown() -> None:
    """A driver that hangs is no proof, and no good node either."""
    found = of(node("a", gpu=FINE), node("b", gpu=UNKNOWN, memory=FINE), node("c", gpu=FINE))
    assert (found.good, found.bad, found.unknown) == (("a", "c"), (), ("b",))
    assert found.results[1].why == "gpu, which other nodes answered: why"
    silent = NodeCheck("d", UNKNOWN, "no answer within 3 s")
    assert of(node("a", gpu=FINE), silent).unknown == ("d",)


def test_what_fails_on_all_nodes_is_not_known_to_be_the_nodes() -> None:
    found = of(*(node(name, fans=BAD, memory=FINE) for name in "ab"), node("c", xid=BAD, fans=BAD))
    assert (found.good, found.bad, found.unknown) == ((), ("c",), ("a", "b"))
    assert of(node("a", fans=BAD, memory=FINE)).bad == ("a",), (
        "there is no other to compare it with"
    )
    alike = of(*(node(name, fans=BAD) for name in "ab"), are_machines=False)
    assert alike.bad == ("a", "b"), "one machine that plays both"
