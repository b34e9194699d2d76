"""A fault that follows the training from node to node is no node fault, nor is a health check that fails
everywhere: one launch at a time, and over whole histories.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.agent.recurrence import (
    NodeFault,
    Repetition,
    acquitted,
    failing_everywhere,
    held_because,
    innocent,
    is_everywhere,
    may_try_older,
    of_one_family,
    of_software,
    of_standing,
    of_trial,
    repetition,
    same_elsewhere,
    suspected_before,
    suspects_to_try_without,
    with_checks,
    without_recurring,
)
from tr11ops.agent.relaunch import (
    AllocationState,
    EndTask,
    Relaunch,
    blamed_nodes,
    decide,
)
from tr11ops.agent.traces import read_faults
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Attribution, Evidence, Kind, NodeReport
from tr11ops.launch.margins import read_launches
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusion import Exclusion, NodeStanding

FIRST = NodeFault(
    "11",
    1,
    "died: the worker was ended by sigsegv at 3",
    7,
    ("x2",),
    "rank 3 on x2: ended by SIGSEGV",
)
LAST = replace(FIRST, job_id="12", nodes=("x5",), summary="rank 3 on x5: ended by SIGSEGV")


def test_the_same_fault_on_another_node_clears_both():
    assert same_elsewhere(LAST, [FIRST]) == (FIRST,)
    # in the same task
    assert same_elsewhere(replace(LAST, job_id="11", launch=2), [FIRST]) == (FIRST,)
    assert same_elsewhere(replace(LAST, reached=8), [FIRST])  # its step was just logged


def test_another_fault_or_the_same_node_clears_no_one():
    for other in (
        replace(LAST, fault="died: the worker was ended by sigsegv at 2"), replace(LAST, reached=90),
        replace(LAST, fault="died: the worker was ended by sigbus at 3"), replace(LAST, nodes=("x2",)),
        replace(LAST, reached=None), replace(LAST, fault=""), replace(LAST, nodes=()),
    ):  # fmt: skip
        assert same_elsewhere(other, [FIRST]) == ()


def test_no_suspicion_rests_on_a_fault_that_is_the_softwares_whichever_rank_had_it():
    other_rank = replace(
        FIRST, launch=2, fault="died: the worker was ended by sigsegv at 5", nodes=("x4",)
    )
    elsewhere = replace(other_rank, job_id="3", reached=200)
    assert of_one_family(LAST, [FIRST, other_rank, elsewhere]) == (FIRST, other_rank)
    assert (
        of_one_family(LAST, [replace(FIRST, fault="died: the worker was ended by sigbus at 3")])
        == ()
    )


def test_before_a_first_step_three_nodes_are_needed():
    early, last = replace(FIRST, reached=None), replace(LAST, reached=None)
    assert same_elsewhere(last, [early]) == ()
    # the same node twice
    assert same_elsewhere(last, [early, replace(early, nodes=("x2", "x4"))]) == ()
    third = replace(early, nodes=("x9",))
    assert same_elsewhere(last, [early, third]) == (early, third)


def test_what_saved_and_died_is_at_one_place_with_those_that_begin_there():
    """A bad sample just after a save: one launch logs a step and dies, those after it begin there
    and log none.
    """
    first = replace(FIRST, reached=2205, began_at=2190, is_suspicion=True)
    early = [
        replace(first, job_id="12", launch=number, reached=None, began_at=2205, nodes=(node,))
        for number, node in enumerate(("x5", "x9"), start=1)
    ]
    assert same_elsewhere(early[0], [first]) == (), "two may die alike"
    assert same_elsewhere(early[1], [early[0], first]) == (early[0], first)
    assert without_recurring([early[1], early[0], first]) == ()
    other = replace(
        first, job_id="13", fault="died: the worker was ended by sigkill at 2", reached=2215
    )
    assert suspected_before(other, [*reversed(early), first]) == (), (
        "the first one was the software's"
    )
    apart = replace(first, reached=2190)
    assert same_elsewhere(early[1], [early[0], apart]) == ()
    assert repetition(replace(first, reached=2206), early).times == 1


def test_before_a_first_step_a_new_checkpoint_is_a_new_fault():
    # three bad nodes weeks apart: the run trained in between
    faults = [
        replace(FIRST, reached=None, nodes=(f"x{step}",), began_at=step)
        for step in (1000, 9000, 30_000)
    ]
    assert same_elsewhere(faults[-1], faults[:-1]) == () and without_recurring(faults) == tuple(
        faults
    )


def test_the_conclusion_says_where_and_blames_no_one():
    found = Attribution(
        Kind.NODE, LAST.summary, 0.85, ("x5",), evidence=("srun: x5",), fault=LAST.fault
    )
    told = of_software(found, LAST, (FIRST,))
    assert (told.kind, told.blamed, told.suspects, told.fault) == (
        Kind.SOFTWARE,
        (),
        ("x5",),
        LAST.fault,
    )
    assert told.summary == (
        "software or data, not the nodes: after iteration 7 again, as on x2: "
        "rank 3 on x5: ended by SIGSEGV"
    )
    assert told.evidence == ("attempt 11, launch 1: rank 3 on x2: ended by SIGSEGV", "srun: x5")
    assert held_because("from an older checkpoint too", told.summary) == told.summary
    assert held_because("asked for", found.summary) == f"asked for: {found.summary}"
    of_array = of_software(found, LAST, (replace(FIRST, label="9_2"),))
    assert of_array.evidence[0].startswith("attempt 9_2, launch 1: ")


def test_a_second_suspicion_of_one_node_counts():
    first = replace(FIRST, is_suspicion=True)
    again = replace(first, job_id="12", reached=40, fault="a device-side assert at 3")
    assert suspected_before(again, [first]) == (first,)
    assert suspected_before(again, [replace(first, is_suspicion=False)]) == ()
    assert suspected_before(again, []) == ()
    other = replace(first, nodes=("x9",), reached=20, fault="died: sigkill at 1")
    assert suspected_before(again, [other, first]) == ()  # another node is not fine
    assert suspected_before(again, [first, other]) == (first,)
    began = first.start + 1
    well = LaunchRecord(1, ("x2", "x9"), began, began + 90_000.0, iteration_after=7)
    assert suspected_before(again, [first], [well]) == ()  # it has trained well since
    for one in (
        replace(well, end=began + 3600.0),
        replace(well, nodes=("x9",)),
        replace(well, iteration_before=7),
        replace(well, suspects=("x2",)),
        replace(well, end=None),
    ):
        assert suspected_before(again, [first], [one]) == (first,)
    found = Attribution(
        Kind.NODE, "rank 3 on x2: died", 0.78, suspects=("x2",), evidence=("srun",), fault="f"
    )
    told = of_standing(found, again, [first], NodeStanding.EXCLUDE, ())
    assert (told.kind, told.blamed, told.suspects, told.fault) == (Kind.NODE, ("x2",), (), "f")
    wary = of_standing(found, again, [first], NodeStanding.AVOID, ())
    assert (wary.kind, wary.blamed, wary.suspects, wary.avoided) == (
        Kind.NODE,
        (),
        ("x2",),
        ("x2",),
    )
    assert told.summary == "the second time on x2: rank 3 on x2: died"
    assert told.evidence == ("srun", "attempt 11, launch 1: rank 3 on x2: ended by SIGSEGV")


def test_a_suspicion_that_the_software_had_does_not_count():
    first = replace(FIRST, is_suspicion=True)
    cleared = replace(LAST, is_suspicion=False)  # the same fault on another node: cause software
    later = replace(first, job_id="13", reached=90, fault="died: sigkill at 1")
    assert suspected_before(later, [cleared, first]) == ()


def test_whom_the_next_task_does_without():
    one = NodeFault("11", 1, "died: sigabrt", None, (), may_be=("x1", "x2"))
    assert suspects_to_try_without([one, replace(one, job_id="12", may_be=("x2",))], one.fault) == (
        "x1",
        "x2",
    )
    # once without any node
    assert suspects_to_try_without([one, replace(one, may_be=())], one.fault) == ()
    assert suspects_to_try_without([one, replace(one, may_be=(), fault="refused")], one.fault) == (
        "x1",
        "x2",
    )
    assert suspects_to_try_without(
        [replace(one, fault="died: sigabrt at 3")], "died: sigabrt at 7"
    ) == ("x1", "x2")


def test_what_came_without_the_suspects_too_is_the_softwares():
    left_out = [
        Exclusion(node, "", "tr11", evidence=("rank 1 died",), state="suspect")
        for node in ("x1", "x2")
    ]
    found = Attribution(
        Kind.UNKNOWN, "ended by SIGABRT", 0.6, suspects=("x5",), fault="died: sigabrt"
    )
    told = of_trial(found, ("x4", "x5"), left_out)
    assert (told.kind, told.blamed, told.suspects) == (Kind.SOFTWARE, (), ())
    assert told.summary.startswith(
        "software or data, not the nodes: the same fault came back without x1, x2"
    )


def test_only_automatic_exclusions_are_taken_back():
    mine = Exclusion("x2", FIRST.summary, "tr11", job_id="11")
    others = (
        replace(mine, owner="ana"), replace(mine, why="Xid 79"), replace(mine, job_id="9"), replace(mine, node="x3"),
    )  # fmt: skip
    assert innocent((mine, *others), "tr11", (FIRST,)) == (mine,)


def test_a_launch_tells_the_nodes_of_its_fault():
    launch = LaunchRecord(
        2, (), 0.0, cause="node", fault="f", blamed=("x1",), suspects=("x7",), reached=4
    )
    fault = NodeFault.of("11", launch)
    assert fault == NodeFault("11", 2, "f", 4, ("x1",), "", may_be=("x1",))
    software = NodeFault.of("11", replace(launch, cause="software"))
    assert software == NodeFault("11", 2, "f", 4, ("x7",), "")
    suspicion = NodeFault.of("11", replace(launch, blamed=()))
    assert suspicion == NodeFault("11", 2, "f", 4, ("x7",), "", is_suspicion=True, may_be=("x7",))
    unknown = NodeFault.of("11", replace(launch, cause="unknown"))
    assert (unknown.nodes, unknown.may_be) == ((), ("x1",))


def test_faults_are_those_that_no_one_asked_for(tmp_path: Path) -> None:
    """Newest first; what is no record is left out."""
    for number, cause in enumerate(("node", "operator", "", "unknown"), start=1):
        LaunchRecord(number, ("x1",), 0.0, cause=cause).write(tmp_path / "11")
    (tmp_path / "11" / "launches" / "5.json").write_text('{"launch": 5, "cause": 7}')
    assert [fault.launch for fault in read_faults([tmp_path / "11"])] == [4, 1]
    assert [launch.launch for launch in read_launches([tmp_path / "11"])] == [4, 3, 2, 1]


faults = st.builds(
    NodeFault,
    job_id=st.sampled_from(["1", "2"]), launch=st.integers(1, 3), fault=st.sampled_from(["", "a at 3", "b at 3"]),
    reached=st.none() | st.integers(5, 9), nodes=st.lists(st.sampled_from("uvw"), max_size=2).map(tuple),
)  # fmt: skip


@given(st.lists(faults, max_size=6), faults)
def test_what_clears_a_node_is_the_same_fault_on_other_nodes(
    before: list[NodeFault], last: NodeFault
):
    found = same_elsewhere(last, before)
    nodes = [node for one in (last, *found) for node in set(one.nodes)]
    assert len(set(nodes)) == len(nodes)
    assert all(one in before and one.fault == last.fault and one.nodes for one in found)
    assert len(found) != 1 or last.reached is not None
    assert len({*without_recurring([last])}) == 1  # a fault alone is always its nodes'


# ---------------------------------------------------------------------------- one fault at one step
def launch(
    number: int, began_at: int | None, reached: int | None = 23, fault: str = "nan"
) -> NodeFault:
    return NodeFault("11", number, fault, reached, (), began_at=began_at)


def test_launches_that_end_at_one_step_are_counted_in_a_row():
    last = launch(4, 20)
    assert repetition(last, []).times == 1
    assert repetition(last, [launch(3, 20, 24), launch(2, 20, 22)]).began_at == (20, 20, 20)
    # another step in between
    assert repetition(last, [launch(3, 20, 90), launch(2, 20)]).times == 1
    assert repetition(last, [launch(3, 20, fault="other"), launch(2, 20)]).times == 1
    early = launch(4, 20, None)
    # before a first step: no step to come back to
    assert repetition(early, [launch(3, 20, None)]).times == 1


def test_an_older_checkpoint_is_worth_one_try():
    for kind in Kind:
        worth = may_try_older(kind, Repetition((20, 20)))
        assert worth == (kind in {Kind.UNKNOWN, Kind.NUMERICS, Kind.SOFTWARE}), kind
    assert not may_try_older(Kind.UNKNOWN, Repetition((20,)))  # once is no sign
    assert not may_try_older(Kind.UNKNOWN, Repetition((None, None)))  # there is none
    assert may_try_older(Kind.UNKNOWN, Repetition((20, 10)))  # the first saved 20 itself
    tried = Repetition((10, 20, 20))
    assert (tried.tried_older, tried.newest_tried, tried.times) == (True, 20, 3)
    assert not may_try_older(Kind.UNKNOWN, tried)


@pytest.mark.parametrize(
    ("rule", "fault", "suspects", "everywhere"),
    [
        ("death-everywhere", "died", (), True),  # all of them
        ("death-everywhere", "died", ("n1", "n2", "n3"), True),
        ("death-everywhere", "died", ("n1", "n2"), False),  # it may be those two's
        ("death", "died at 1", ("n1",), False),
        ("error-everywhere", "runtimeerror at several", (), True),
        ("error-unknown", "runtimeerror at several", (), True),
        ("error-unknown", "runtimeerror at several", ("n1",), False),  # several ranks of one node
        ("error-unknown", "runtimeerror at 3", ("n1",), False),
    ],
)
def test_what_several_nodes_met_at_once_is_no_one_nodes(
    rule: str, fault: str, suspects: tuple[str, ...], *, everywhere: bool
):
    """A node on which alone it had come before stayed under suspicion, though the array was held
    for software.
    """
    found = Attribution(
        Kind.UNKNOWN, "the worker has ended", 0.5, suspects=suspects, fault=fault, rule=rule
    )
    assert is_everywhere(found, ("n1", "n2", "n3", "n4")) is everywhere


FANS = "script:fans.sh"


def checked(start: float, failed: str = "", passed: str = "", name: str = FANS) -> LaunchRecord:
    """A launch at `start` in which these nodes (one letter each) failed or passed one check."""
    checks = {"failed_checks": {name: [*failed]}, "passed_checks": {name: [*passed]}}
    return LaunchRecord(1, (), start, checked=True, **(checks if failed else {}))  # type: ignore[arg-type]


UNTOLD = LaunchRecord(1, (), 2.5)
WITHOUT = LaunchRecord(1, (), 2.5, checked=True, left_out_checks=(FANS,))


@pytest.mark.parametrize(
    ("last", "before", "nodes"),
    [
        # within a launch
        (checked(9, "abc"), [], "abc"),
        (checked(9, "ab"), [], "ab"),
        (checked(9, "a"), [], ""),  # one node alone may be bad
        (checked(9, "a", "bc"), [], ""),
        (checked(9, "ab", "c"), [], ""),  # two may be bad side by side
        (checked(9, "abc", "d"), [], "abc"),  # three of four hardly are
        (checked(9, "abc", "defg"), [], ""),
        # over launches, of one attempt or of several
        (checked(9, "b"), [checked(8, "a")], "ab"),
        (checked(9, "a"), [checked(8, "a")], ""),  # the same node twice
        (checked(9, "c", "bd"), [checked(8, "a", "bc")], ""),  # b and d pass it
        (checked(9, "b"), [UNTOLD, checked(2, "a")], "ab"),
        (checked(9, "b"), [WITHOUT, checked(2, "a")], "ab"),
        (checked(9, "b"), [checked(8), checked(2, "a")], ""),  # it was sound in between
        (checked(9, "b"), [checked(8, "a", name="gpu-count")], ""),  # another check
        (checked(9, "b", "a"), [checked(8, "a")], ""),  # a has passed it since
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
        checked(9.0 - place, "".join(bad), "".join(good - bad))
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
    [fails] = failing_everywhere(checked(9, "b"), [checked(4, "a")])
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
        ("b", "c"),
        "without a; c takes its place; without health check fans, which fails everywhere",
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
