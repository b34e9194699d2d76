"""How nodes are checked, and what the results say of them."""

from __future__ import annotations

import json

import pytest
from msgspec import to_builtins

from tests.tr11ops.nodes.queued import job
from tr11ops.cluster.base import JobState, Node
from tr11ops.health.base import CheckOutcome, CheckResult
from tr11ops.nodes.check import (
    DIED,
    NodeCheck,
    check_nodes,
    judge,
    told,
    ways,
    without_failing_checks,
)
from tr11ops.nodes.health_job import HealthRequest, results_of


def test_a_node_is_fine_when_all_its_checks_were_made() -> None:
    def of(*results: CheckOutcome) -> NodeCheck:
        return told(
            "n1",
            tuple(CheckResult(f"check-{n}", result, "why") for n, result in enumerate(results)),
        )

    fine, warning, bad, unknown = (
        CheckOutcome.FINE,
        CheckOutcome.WARNING,
        CheckOutcome.BAD,
        CheckOutcome.UNKNOWN,
    )
    for checks, result, is_judged in (
        ((fine, fine), fine, True),
        ((fine, warning), warning, True),
        ((fine, unknown, unknown), unknown, False),
        ((warning, unknown), warning, False),
        ((bad, unknown), bad, True),
        ((unknown,), unknown, False),
    ):
        assert (of(*checks).result, of(*checks).is_judged) == (result, is_judged), checks
    assert (
        of(fine, unknown, unknown).why == "2 of 3 checks could not be made (check-1, check-2): why"
    )


def test_how_a_node_can_be_checked() -> None:
    idle, down = frozenset({"idle"}), frozenset({"idle", "drain"})
    cluster = [Node("a", idle), Node("b", down, reason="fan"), Node("c", idle), Node("d", idle)]
    jobs = [
        job(JobState.RUNNING, nodes=("c",)),
        job(JobState.RUNNING, nodes=("d",), user="other"),
        job(JobState.PENDING),
    ]
    found = {way.node: way for way in ways(["a", "b", "c", "d", "e"], cluster, jobs, "me")}
    assert (found["a"].inside, found["a"].never) == ("", "")
    assert found["c"].inside == "5"
    assert "drain" in found["b"].never and "fan" in found["b"].never
    assert "busy with job 5 of other" in found["d"].never and "does not know" in found["e"].never


def test_a_dead_job_speaks_against_a_node_only_if_others_ran() -> None:
    died = NodeCheck("a", CheckOutcome.UNKNOWN, f"{DIED}: FAILED")
    silent = NodeCheck("b", CheckOutcome.UNKNOWN, "no answer within 3 s")
    fine = told("c", (CheckResult("memory", CheckOutcome.FINE, "yes"),))
    assert [entry.result for entry in judge((died, silent))] == ["unknown", "unknown"]
    assert [entry.result for entry in judge((died, silent, fine))] == ["bad", "unknown", "fine"]


def test_a_check_that_fails_everywhere_speaks_against_no_node() -> None:
    """Neither is one of them prolonged on the list by it, nor is one let back in."""
    fans, memory = (
        ("script:fans.sh", CheckOutcome.BAD, "fan: 3"),
        ("memory", CheckOutcome.FINE, "yes"),
    )
    bad = [told(name, (CheckResult(*fans), CheckResult(*memory))) for name in "abc"]
    found = without_failing_checks(tuple(bad))
    assert [entry.result for entry in found] == ["unknown"] * 3 and not any(
        entry.is_judged for entry in found
    )
    assert (
        "script:fans.sh): it failed on 3 nodes, so that it is not the nodes: fan: 3" in found[0].why
    )
    fine = tuple(
        told(name, (CheckResult("script:fans.sh", CheckOutcome.FINE, ""),)) for name in "defg"
    )
    assert without_failing_checks((*bad, *fine)) == (*bad, *fine)  # more nodes pass it
    worse = told("a", (CheckResult(*fans), CheckResult("xid", CheckOutcome.BAD, "79")))
    assert [entry.result for entry in without_failing_checks((worse, *bad[1:]))] == [
        "bad",
        "unknown",
        "unknown",
    ]
    assert without_failing_checks((bad[0],)) == (bad[0],)


def test_what_is_under_way_is_ended_when_the_person_has_enough() -> None:
    class Endless:
        stopped = False

        def answer(self) -> None:
            raise KeyboardInterrupt

        def stop(self) -> None:
            self.stopped = True

    check = Endless()
    planned = ways(["a"], [Node("a", frozenset({"idle"}))], (), "me")
    with pytest.raises(KeyboardInterrupt):
        check_nodes(planned, lambda way: check, 5.0, lambda entry: None)
    assert check.stopped


def test_a_request_travels_as_json() -> None:
    request = HealthRequest("a", inside="5", gpus=8, folder="/x", scripts=("/s",), skip=("memory",))
    travelled = {**to_builtins(request), "scripts": ["/s"], "skip": ["memory"]}
    assert json.loads(json.dumps(to_builtins(request))) == travelled
    with pytest.raises(ValueError):
        results_of([{"name": "x"}])
    with pytest.raises(ValueError):
        results_of([{"name": "x", "result": "splendid", "why": ""}])
