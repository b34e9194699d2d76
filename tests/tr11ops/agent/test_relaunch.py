"""What follows a failed launch: cases by name, and properties over whole histories."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.agent import relaunch
from tr11ops.agent.recurrence import Repetition
from tr11ops.agent.relaunch import (
    AllocationState,
    Decision,
    EndTask,
    Relaunch,
    Stop,
    first_nodes,
    named_twice,
)
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.signature import Restart
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.attempts import LaunchRecord

ALL = tuple(f"x{number}" for number in range(1, 7))


def budget(launches: int, without_progress: int) -> ResilienceSection:
    return ResilienceSection(
        launches_per_attempt=launches, launches_without_progress=without_progress
    )


BUDGET = budget(20, 3)
SITUATION = AllocationState(usable=ALL, needed=4, seconds_left=3600.0)
FIRST = ALL[:4]


def failed(
    nodes: tuple[str, ...], cause: Kind, progress: bool = False, **fields: object
) -> LaunchRecord:
    return LaunchRecord(1, nodes, 0.0, cause=cause.value, iteration_after=int(progress), **fields)  # type: ignore[arg-type]


def bad(node: str, nodes: tuple[str, ...] = FIRST, **fields: object) -> LaunchRecord:
    return failed(nodes, Kind.NODE, **{"blamed": (node,), "fault": f"died at {node}", **fields})  # type: ignore[arg-type]


def unknown(nodes: tuple[str, ...] = FIRST, **fields: object) -> LaunchRecord:
    return failed(nodes, Kind.UNKNOWN, fault="error at 3", **fields)  # type: ignore[arg-type]


def decide(
    history: list[LaunchRecord],
    situation: AllocationState,
    resilience: ResilienceSection,
    began_at: tuple[int | None, ...] = (None,),
) -> Decision:
    """`began_at`: of the launches in a row that the last one's fault has ended, newest first."""
    return relaunch.decide(history, Repetition(began_at), situation, resilience)


def relaunched(decision: Decision) -> tuple[str, ...]:
    assert isinstance(decision, Relaunch), decision
    return decision.nodes


def test_a_spare_takes_the_bad_nodes_place_and_the_others_stay():
    assert first_nodes(SITUATION) == FIRST
    for node in FIRST:
        nodes = relaunched(decide([bad(node)], SITUATION, BUDGET))
        assert nodes == tuple(sorted({*FIRST, "x5"} - {node}))


def suspect(node: str, nodes: tuple[str, ...] = FIRST, **fields: object) -> LaunchRecord:
    return bad(node, nodes, blamed=(), suspects=(node,), **fields)


def test_a_suspect_is_swapped_and_comes_back_when_no_other_is_left():
    first = decide([suspect("x2")], SITUATION, BUDGET)
    assert relaunched(first) == ("x1", "x3", "x4", "x5")
    assert first.why == "x5 takes the place of x2, which is only suspected"
    course = [
        suspect("x2"),
        suspect("x3", ("x1", "x3", "x4", "x5")),
        suspect("x6", ("x1", "x4", "x5", "x6")),
    ]
    third = decide(course, SITUATION, budget(20, 9))
    # one that was suspected earlier, not the last one
    assert relaunched(third) == ("x1", "x2", "x4", "x5")
    alone = decide([suspect("x2")], replace(SITUATION, usable=FIRST), BUDGET)
    assert relaunched(alone) == FIRST
    assert alone.why == "no spare node is left for x2, which is only suspected"


def test_the_words_say_which_nodes_change_and_never_that_none_does_where_one_does():
    """Also where the nodes are one machine's, and for a fault that points to no node."""
    laptop = replace(SITUATION, may_reuse=True)
    swapped = decide([suspect("x2")], laptop, BUDGET)
    assert relaunched(swapped) == ("x1", "x3", "x4", "x5")
    assert swapped.why == "x5 takes the place of x2, which is only suspected"
    assert decide([bad("x2")], laptop, BUDGET).why == "on the same nodes"
    assert decide([bad("x2")], SITUATION, BUDGET).why == "without x2; x5 takes its place"
    # the site wants x1 back by now: it is not the same nodes
    wanted = replace(SITUATION, reluctant=frozenset({"x1"}))
    again = decide([unknown()], wanted, BUDGET)
    assert (relaunched(again), again.why) == (
        ("x2", "x3", "x4", "x5"),
        "the cause is unknown: once more; x5 takes the place of x1",
    )
    elsewhere = decide([unknown(), unknown()], SITUATION, BUDGET)
    assert elsewhere.why == "it failed again: on other nodes; x[5-6] take the place of x[3-4]"
    # of two suspects one stays, for there is one spare alone
    both = bad("x2", blamed=(), suspects=("x2", "x3"))
    one = decide([both], replace(SITUATION, usable=ALL[:5]), BUDGET)
    assert one.why == (
        "no spare node is left for x2, which is only suspected; x5 takes the place of x3"
    )


def test_whom_two_launches_in_a_row_named_for_an_unknown_cause():
    named = unknown(suspects=("x2",))
    assert named_twice([named, named]) == ("x2",)
    assert named_twice([named]) == named_twice([named, unknown(suspects=("x3",))]) == ()
    assert named_twice([named, bad("x2"), named]) == ()
    half = unknown(suspects=("x2", "x3"))
    assert named_twice([half, half]) == ()  # a broad set tells nothing of any one


def hung(*suspects: str, nodes: tuple[str, ...] = FIRST) -> LaunchRecord:
    return failed(nodes, Kind.UNKNOWN, fault="lost: no word", suspects=suspects)


def test_after_a_hang_a_spare_takes_the_place_of_the_one_that_was_waited_for():
    """A second hang on the same nodes would cost as much as the first."""
    first = decide([hung("x2")], SITUATION, BUDGET)
    assert relaunched(first) == ("x1", "x3", "x4", "x5")
    assert "waited for x2, which is only suspected: x5 takes its place" in first.why
    alone = decide([hung("x2")], replace(SITUATION, usable=FIRST), BUDGET)
    assert relaunched(alone) == FIRST and alone.why.endswith("and no spare node is left")
    for no_one in (hung(), hung("x2", "x3"), unknown(suspects=("x2",))):
        again = decide([no_one], SITUATION, BUDGET)
        assert relaunched(again) == FIRST
        assert again.why == "the cause is unknown: once more on the same nodes"
    # it followed the rank to the spare: a third hang would tell nothing more
    again = hung("x5", nodes=("x1", "x3", "x4", "x5"))
    assert isinstance(decide([hung("x2"), again], SITUATION, BUDGET), Stop)


def test_the_last_suspect_comes_after_all_that_are_to_be_used_last():
    course = [
        suspect("x4"),
        suspect("x5", ("x1", "x2", "x3", "x5")),
        suspect("x1", ("x1", "x2", "x3", "x6")),
    ]
    third = decide(course, SITUATION, budget(20, 9))
    assert relaunched(third) == ("x2", "x3", "x4", "x6")
    watched = replace(SITUATION, reluctant=frozenset({"x5", "x6"}))
    assert relaunched(decide([suspect("x2")], watched, BUDGET)) == ("x1", "x3", "x4", "x5")
    known = replace(watched, suspected=("x5",))
    assert relaunched(decide([suspect("x2")], known, BUDGET)) == ("x1", "x3", "x4", "x6")


def test_of_those_on_record_the_one_that_was_suspected_last_comes_last():
    """Not the first in the allocation's order: the task before has waited for it in vain."""
    known = replace(
        SITUATION, suspected=("x5", "x4", "x1"), reluctant=frozenset({"x1", "x4", "x5"})
    )
    assert first_nodes(known) == ("x2", "x3", "x5", "x6")
    hung = [unknown(("x2", "x3", "x5", "x6"), suspects=("x5",))] * 2
    assert relaunched(decide(hung, known, BUDGET)) == ("x2", "x3", "x4", "x6")


def test_more_bad_nodes_than_spares_end_the_task():
    history = [bad("x1"), bad("x2", ("x2", "x3", "x4", "x5"))]
    assert relaunched(decide(history, SITUATION, BUDGET)) == ("x3", "x4", "x5", "x6")
    history.append(bad("x6", ("x3", "x4", "x5", "x6"), progress=True))
    assert isinstance(decide(history, SITUATION, BUDGET), EndTask)


@pytest.mark.parametrize("kind", [Kind.CONFIGURATION, Kind.STORAGE, Kind.NUMERICS])
def test_what_other_nodes_would_meet_too_burns_no_launch(kind):
    last = failed(FIRST, kind, progress=True, restart=Restart.CHANGE)
    assert isinstance(decide([last], SITUATION, BUDGET), Stop)


def test_storage_that_comes_back_by_itself_is_tried_again():
    passing = failed(FIRST, Kind.STORAGE, fault="evicted", progress=True, restart=Restart.PLAIN)
    again = decide([passing], SITUATION, BUDGET)
    assert (relaunched(again), again.why) == (FIRST, "storage: once more on the same nodes")
    came_back = replace(passing, restart=Restart.CHANGE)
    assert isinstance(decide([passing, came_back], SITUATION, BUDGET, (None, None)), Stop)


def test_an_unknown_cause_is_tried_on_the_nodes_then_on_others():
    history = [unknown()]
    assert relaunched(decide(history, SITUATION, BUDGET)) == FIRST
    history.append(unknown())
    nodes = relaunched(decide(history, SITUATION, BUDGET))
    assert nodes == ("x1", "x2", "x5", "x6")
    suspected = [unknown(suspects=("x1",)), unknown(suspects=("x1",))]
    nodes = relaunched(decide(suspected, SITUATION, BUDGET))
    assert "x1" not in nodes and {"x2", "x3", "x4"} <= set(nodes)
    assert isinstance(decide(history, replace(SITUATION, usable=FIRST), BUDGET), EndTask)
    progressed = [unknown(), unknown(progress=True)]
    assert relaunched(decide(progressed, SITUATION, BUDGET)) == FIRST


def test_a_fault_that_follows_the_rank_is_not_the_nodes():
    other = ("x2", "x3", "x4", "x5")
    history = [
        unknown(suspects=("x1",)),
        unknown(suspects=("x1",)),
        unknown(other, suspects=("x5",)),
    ]
    assert isinstance(decide(history, SITUATION, BUDGET), Stop)
    # Two nodes may die alike; a third time it is something else, though the budget would allow one
    # more.
    same = [bad("x1", fault="abort"), bad("x2", other, fault="abort")]
    assert isinstance(decide(same, SITUATION, BUDGET), Relaunch)
    same.append(bad("x3", ("x3", "x4", "x5", "x6"), fault="abort"))
    assert isinstance(decide(same, SITUATION, budget(20, 9)), Stop)


def test_a_taken_port_is_cured_by_another_or_by_another_node():
    def taken(nodes: tuple[str, ...] = FIRST, suspects: tuple[str, ...] = ()) -> LaunchRecord:
        return failed(nodes, Kind.PORT, suspects=suspects, fault="port taken")

    free = decide([taken()], SITUATION, BUDGET)
    assert (relaunched(free), free.why) == (FIRST, "with another port")
    assert isinstance(decide([taken()] * 3, SITUATION, BUDGET), EndTask)  # bounded
    fixed = decide([taken(suspects=("x1",))], SITUATION, BUDGET)
    assert (relaunched(fixed), fixed.why) == (
        ("x2", "x3", "x4", "x5"),
        "the card fixes the port: with rank 0 on another node; x5 takes the place of x1",
    )
    elsewhere = [taken(suspects=("x1",)), taken(("x2", "x3", "x4", "x5"), ("x2",))]
    assert isinstance(decide(elsewhere, SITUATION, BUDGET), Stop)  # someone holds it on every node
    alone = replace(SITUATION, usable=FIRST)
    # who holds it may have gone
    assert relaunched(decide([taken(suspects=("x1",))], alone, BUDGET)) == FIRST
    assert isinstance(decide([taken(suspects=("x1",))] * 2, alone, BUDGET), EndTask)


def test_a_fault_that_comes_back_at_one_step_is_bounded_and_tries_an_older_checkpoint():
    first, again = unknown(checkpoint_before=20, progress=True), unknown(checkpoint_before=20)
    # on other nodes
    assert relaunched(decide([first, again], SITUATION, BUDGET, (20, 20)))
    third = [first, again, replace(again, restart=Restart.CHANGE)]
    assert "3 times" in decide(third, SITUATION, budget(20, 9), (20, 20, 20)).why
    for kind in (Kind.UNKNOWN, Kind.NUMERICS, Kind.SOFTWARE):
        older = replace(again, cause=kind.value, older_checkpoint=10, suspects=("x2",))
        tried = decide([older], SITUATION, BUDGET, (20, 20))
        assert (relaunched(tried), tried.why) == (
            ("x1", "x3", "x4", "x5"),
            "from the older checkpoint of step 10; x5 takes the place of x2",
        )
        late = decide([older], replace(SITUATION, seconds_left=5.0), BUDGET, (20, 20))
        assert isinstance(late, EndTask)  # the next task does
        in_vain = replace(again, cause=kind.value, checkpoint_before=10)
        decision = decide([in_vain], SITUATION, budget(20, 9), (10, 20, 20))
        assert "from an older checkpoint too" in decision.why


def test_numbers_that_are_not_finite_get_a_second_try_after_a_checkpoint_alone():
    first = failed(FIRST, Kind.NUMERICS, fault="nan", progress=True, restart=Restart.CHANGE)
    assert isinstance(decide([first], SITUATION, BUDGET), Stop)
    resumed = replace(first, checkpoint_before=20)
    assert relaunched(decide([resumed], SITUATION, BUDGET, (20,))) == FIRST
    assert isinstance(decide([resumed], SITUATION, BUDGET, (20, 20)), Stop)


def test_budgets_of_launches_progress_and_time():
    fruitful = [unknown(progress=True) for _ in range(20)]
    assert isinstance(decide(fruitful, SITUATION, BUDGET), EndTask)
    assert isinstance(decide(fruitful[:19], SITUATION, BUDGET), Relaunch)
    fruitless = [bad("x1"), bad("x2", ALL[1:5]), bad("x3", ALL[2:6])]
    assert "3 launches in a row" in decide(fruitless, SITUATION, BUDGET).why
    assert isinstance(decide([bad("x1")], replace(SITUATION, seconds_left=59.0), BUDGET), EndTask)
    assert isinstance(decide([bad("x1")], replace(SITUATION, seconds_left=None), BUDGET), Relaunch)


def test_one_machine_playing_all_nodes_starts_again_on_them():
    here = AllocationState(usable=FIRST, needed=4, seconds_left=None, may_reuse=True)
    assert relaunched(decide([bad("x2")], here, BUDGET)) == FIRST
    assert relaunched(decide([bad("x2"), bad("x2")], here, BUDGET)) == FIRST
    assert isinstance(decide([bad("x2")] * 3, here, BUDGET), EndTask)
    assert isinstance(decide([unknown(), unknown()], here, BUDGET), EndTask)


def test_a_node_that_someone_drains_is_used_only_when_needed():
    draining = replace(SITUATION, reluctant=frozenset({"x2", "x5"}))
    assert relaunched(decide([bad("x1")], draining, BUDGET)) == ("x2", "x3", "x4", "x6")
    assert first_nodes(draining) == ("x1", "x3", "x4", "x6")


def test_who_is_named_twice_gives_way_to_spares_that_are_only_to_be_used_last():
    named = unknown(suspects=("x2",))
    watched = replace(SITUATION, reluctant=frozenset({"x5", "x6"}))
    assert relaunched(decide([named, named], watched, BUDGET)) == ("x1", "x3", "x4", "x5")
    assert isinstance(decide([unknown(), unknown()], watched, BUDGET), EndTask)  # no one is named


def test_too_few_nodes_at_the_start():
    assert first_nodes(replace(SITUATION, usable=ALL[:3])) is None


kinds = st.sampled_from([Kind.NODE, Kind.NODE, Kind.UNKNOWN, Kind.UNKNOWN, Kind.OPERATOR, *Kind])
events = st.tuples(kinds, st.integers(0, 3), st.booleans(), st.sampled_from(["a", "b", ""]))


@given(
    st.integers(1, 6), st.integers(0, 4), st.integers(1, 8), st.integers(1, 5), st.booleans(),
    st.lists(events, min_size=60, max_size=60),
)  # fmt: skip
def test_it_ends_within_its_budget_and_no_blamed_node_returns(
    needed, spares, launches, fruitless, one_machine, course
):
    resilience = budget(launches, fruitless)
    usable = tuple(f"n{number}" for number in range(needed + spares))
    situation = AllocationState(usable, needed, None, may_reuse=one_machine)
    nodes = first_nodes(situation)
    history: list[LaunchRecord] = []
    blamed: set[str] = set()
    for kind, place, progress, fault in course:
        assert nodes is not None
        assert len(set(nodes)) == needed and set(nodes) <= set(usable)
        assert list(nodes) == sorted(nodes, key=usable.index)  # rank 0 is where Slurm puts it
        assert one_machine or not blamed & set(nodes)
        guilty = (nodes[place % needed],) if kind in (Kind.NODE, Kind.UNKNOWN) else ()
        is_node = kind is Kind.NODE
        history.append(
            failed(
                nodes,
                kind,
                progress,
                blamed=guilty if is_node else (),
                suspects=() if is_node else guilty,
                fault=fault and f"{fault} at {place}",
            )
        )
        blamed.update(history[-1].blamed)
        decision = decide(history, situation, resilience)
        if not isinstance(decision, Relaunch):
            break
        nodes = decision.nodes
    assert not isinstance(decision, Relaunch)
    assert len(history) <= launches
    tail = [outcome.has_progress for outcome in history][-fruitless - 1 :]
    assert len(tail) <= fruitless or any(tail)
