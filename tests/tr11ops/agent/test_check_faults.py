"""A health check that fails on node after node tells nothing of the nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tr11ops.agent.recurrence import Repetition, acquitted, failing_everywhere, with_checks
from tr11ops.agent.relaunch import (
    AllocationState,
    EndTask,
    Relaunch,
    blamed_nodes,
    decide,
)
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Evidence, Kind, NodeReport
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusion import Exclusion

FANS = "script:fans.sh"


def launch(start: float, failed: str = "", passed: str = "", name: str = FANS) -> LaunchRecord:
    """A launch at `start` in which these nodes (one letter each) failed or passed one check."""
    checks = {"failed_checks": {name: [*failed]}, "passed_checks": {name: [*passed]}}
    return LaunchRecord(1, (), start, checked=True, **(checks if failed else {}))  # type: ignore[arg-type]


UNTOLD = LaunchRecord(1, (), 2.5)
WITHOUT = LaunchRecord(1, (), 2.5, checked=True, left_out_checks=(FANS,))


@pytest.mark.parametrize(
    ("last", "before", "nodes"),
    [
        # within a launch
        (launch(9, "abc"), [], "abc"),
        (launch(9, "ab"), [], "ab"),
        (launch(9, "a"), [], ""),  # one node alone may be bad
        (launch(9, "a", "bc"), [], ""),
        (launch(9, "ab", "c"), [], ""),  # two may be bad side by side
        (launch(9, "abc", "d"), [], "abc"),  # three of four hardly are
        (launch(9, "abc", "defg"), [], ""),
        # over launches, of one attempt or of several
        (launch(9, "b"), [launch(8, "a")], "ab"),
        (launch(9, "a"), [launch(8, "a")], ""),  # the same node twice
        (launch(9, "c", "bd"), [launch(8, "a", "bc")], ""),  # b and d pass it
        (launch(9, "b"), [UNTOLD, launch(2, "a")], "ab"),
        (launch(9, "b"), [WITHOUT, launch(2, "a")], "ab"),
        (launch(9, "b"), [launch(8), launch(2, "a")], ""),  # it was sound in between
        (launch(9, "b"), [launch(8, "a", name="gpu-count")], ""),  # another check
        (launch(9, "b", "a"), [launch(8, "a")], ""),  # a has passed it since
    ],
)
def test_where_a_check_fails_everywhere(
    last: LaunchRecord, before: list[LaunchRecord], nodes: str
) -> None:
    found = failing_everywhere(last, before)
    assert [one.nodes for one in found] == ([tuple(nodes)] if nodes else [])
    if found:
        assert found[0].name == FANS and found[0].since == min(
            one.start
            for one in (last, *before)
            if FANS in one.failed_checks and set(one.failed_checks[FANS]) & set(nodes)
        )


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef"))
        ),
        min_size=1,
    )
)
def test_one_node_is_never_enough(launches: list[tuple[set[str], set[str]]]) -> None:
    seen = [
        launch(9.0 - place, "".join(bad), "".join(good - bad))
        for place, (bad, good) in enumerate(launches)
    ]
    for found in failing_everywhere(seen[0], seen[1:]):
        assert len(found.nodes) >= (3 if found.passed else 2) and len(found.nodes) > len(
            found.passed
        )
        assert not set(found.nodes) & set(found.passed)


def excluded(node: str, *evidence: str, owner: str = "tr11", since: float = 5.0) -> Exclusion:
    return Exclusion(node, "why", owner, None, evidence, since, "7")


def test_what_was_excluded_for_such_a_check_alone_is_taken_back() -> None:
    [fails] = failing_everywhere(launch(9, "b"), [launch(4, "a")])
    listed = (
        excluded("a", f"a: health check {FANS}: fan 3 is slow"),
        excluded(
            "b", f"b: health check {FANS}: fan: 3 is slow", f"c: health check {FANS}: no answer"
        ),
        excluded("c", f"c: health check {FANS}: fan 3", "c: health check gpu-count: 7 of 8"),
        excluded("d", f"d: health check {FANS}: fan 3", "srun: error: d: task 1: Killed"),
        excluded("e", f"e: health check {FANS}: fan 3", owner="ana"),
        excluded("f", f"f: health check {FANS}: fan 3", since=3.0),  # while others passed it
        excluded("g"),
    )
    assert [entry.node for entry in acquitted(listed, "tr11", [fails])] == ["a", "b"]


def test_reports_tell_who_failed_and_who_passed() -> None:
    reports = (
        NodeReport("a", 75, (f"{FANS}: fan: 3", "memory: full")), NodeReport("b", 0, (), passed_checks=(FANS, "memory")),
        NodeReport("c", None),
    )  # fmt: skip
    found = with_checks(WITHOUT, reports)
    assert found.failed_checks == {FANS: ["a"], "memory": ["a"]}
    assert found.passed_checks == {FANS: ["b"], "memory": ["b"]}
    assert found.checked and found.left_out_checks == (FANS,)
    assert not with_checks(WITHOUT, (NodeReport("c"),)).checked


def evidence(*reports: NodeReport, **failing: str) -> Evidence:
    return Evidence(("a", "b"), 75, reports=reports, failing_checks=failing)


def test_a_check_that_fails_everywhere_blames_no_node() -> None:
    both = (NodeReport("a", 75, ("fans: 3",)), NodeReport("b", 75, ("fans: 1",)))
    found = attribute(evidence(*both, fans="health check fans failed on a,b"))
    assert (found.kind, found.blamed, found.suspects) == (Kind.HEALTH_CHECK, (), ())
    assert found.summary == "health check fans failed on a,b: it is not the nodes"
    unheard = attribute(evidence(*both))
    assert (unheard.blamed, unheard.suspects) == ((), ("a", "b"))
    heard = NodeReport("a", 75, ("fans: 3",), passed_checks=("gpu-count",))
    worse = (heard, NodeReport("b", 75, ("fans: 1", "gpu-count: 7 of 8")))
    found = attribute(evidence(*worse, fans="..."))
    assert (found.kind, found.blamed, found.evidence) == (
        Kind.NODE,
        ("b",),
        ("b: health check gpu-count: 7 of 8",),
    )
    # a launch without the check fails for another reason
    later = (NodeReport("a", 1, passed_checks=("memory",)),)
    assert attribute(evidence(*later, fans="...")).kind is Kind.UNKNOWN


BUDGET = ResilienceSection()


def allocation(nodes: str, needed: int = 2) -> AllocationState:
    return AllocationState(tuple(nodes), needed, None)


ONCE = Repetition((None,))


def failed(nodes: str, cause: Kind, blamed: str = "", **fields: object) -> LaunchRecord:
    return LaunchRecord(1, tuple(nodes), 0.0, cause=cause.value, blamed=tuple(blamed), **fields)  # type: ignore[arg-type]


def test_the_next_launch_goes_without_the_check_on_the_same_nodes() -> None:
    last = failed("ab", Kind.HEALTH_CHECK, fault="checks: fans", failing_checks=("fans",))
    decision = decide([last], ONCE, allocation("ab"), BUDGET)
    assert decision == Relaunch(("a", "b"), "without health check fans, which fails everywhere")
    both = failed("ab", Kind.NODE, "a", failing_checks=("fans",))
    decision = decide([both], ONCE, allocation("abc"), BUDGET)
    assert decision == Relaunch(
        ("b", "c"), "without a, and without health check fans, which fails everywhere"
    )
    # within the budget, as any other
    assert isinstance(decide([last] * 3, ONCE, allocation("ab"), BUDGET), EndTask)


def test_a_node_that_was_blamed_for_such_a_check_is_used_again() -> None:
    first = failed(
        "ab", Kind.NODE, "a", evidence=("a: health check fans: 3",), failed_checks={"fans": ["a"]}
    )
    other = failed(
        "bc",
        Kind.NODE,
        "c",
        evidence=("c: health check fans: 3", "c: health check memory: full"),
        failed_checks={"fans": ["c"], "memory": ["c"]},
    )
    last = failed("bd", Kind.HEALTH_CHECK, failing_checks=("fans",))
    assert blamed_nodes([first, other]) == ("a", "c")
    assert blamed_nodes([first, other, last]) == ("c",)
    # blamed for another reason, whatever the check says
    died = replace(first, evidence=("srun: error: a: task 1: Killed",))
    assert blamed_nodes([died, last]) == ("a",)
    decision = decide([first, last], ONCE, allocation("ab"), BUDGET)
    assert isinstance(decision, Relaunch) and decision.nodes == ("a", "b")
