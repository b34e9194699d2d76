"""From innocent to excluded, and back: one rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tr11ops.rundir.exclusion import (
    GOOD_SECONDS,
    Exclusion,
    NodeStanding,
    after_attribution,
    after_good_use,
    family,
    is_broad,
    what_comes_next,
)

SEGV, KILL = "died: the worker was ended by sigsegv", "died: the worker was ended by sigkill"
SUSPECT, AVOID, EXCLUDE, RETURNED = (
    NodeStanding.SUSPECT, NodeStanding.AVOID, NodeStanding.EXCLUDE, NodeStanding.RETURNED,
)  # fmt: skip


def known(state: NodeStanding, fault: str = SEGV) -> Exclusion:
    return Exclusion("x1", "it died", "tr11", state=state.value, fault=fault)


def test_one_two_three():
    assert after_attribution(f"{SEGV} at 3", [], None, ()) is SUSPECT
    assert after_attribution(f"{SEGV} at 3", [f"{SEGV} at 5"], known(SUSPECT), ()) is AVOID
    assert after_attribution(f"{SEGV} at 3", [f"{SEGV} at 5"] * 2, known(AVOID), ()) is EXCLUDE
    assert after_attribution(f"{SEGV} at 3", [], known(AVOID), ()) is EXCLUDE


def test_a_third_of_another_family_excludes_no_one():
    assert after_attribution(KILL, [SEGV, SEGV], known(AVOID), ()) is AVOID
    assert after_attribution(SEGV, [SEGV, KILL], None, ()) is AVOID


def test_a_broad_set_of_suspects_makes_suspects_alone():
    assert (
        after_attribution(SEGV, [SEGV, SEGV], known(AVOID), (known(AVOID),), of_broad_set=True)
        is SUSPECT
    )
    assert is_broad(2, 4) and not is_broad(1, 2) and not is_broad(2, 48) and is_broad(13, 48)


@pytest.mark.parametrize(
    ("elsewhere", "state"),
    [((SUSPECT,), AVOID), ((SUSPECT, SUSPECT), EXCLUDE), ((EXCLUDE,), EXCLUDE), ((), SUSPECT)],
)
def test_what_other_runs_suspect_counts(elsewhere: tuple[NodeStanding, ...], state: NodeStanding):
    assert after_attribution(SEGV, [], None, map(known, elsewhere)) is state


def test_a_node_that_came_back_is_avoided_at_once():
    assert after_attribution(SEGV, [], known(RETURNED), ()) is AVOID


def test_a_suspicion_of_our_own_counts_once():
    """It is in the launches' records and on the list; another node in between has begun the count
    again.
    """
    assert after_attribution(SEGV, [], known(SUSPECT), ()) is SUSPECT


def test_good_training_takes_a_node_one_step_back():
    assert after_good_use(known(SUSPECT), GOOD_SECONDS) is None
    assert after_good_use(known(RETURNED), GOOD_SECONDS) is None
    assert after_good_use(known(AVOID), GOOD_SECONDS) == replace(known(AVOID), state="suspect")
    assert after_good_use(known(EXCLUDE), 10 * GOOD_SECONDS) == known(EXCLUDE)
    half = after_good_use(known(SUSPECT), GOOD_SECONDS / 2)
    assert half is not None and half.good_seconds == GOOD_SECONDS / 2
    assert after_good_use(half, GOOD_SECONDS / 2) is None


@given(
    st.sampled_from([SEGV, KILL]),
    st.lists(st.sampled_from([SEGV, KILL]), max_size=4),
    st.none() | st.sampled_from(list(NodeStanding)).map(known),
    st.lists(st.sampled_from(list(NodeStanding)).map(known), max_size=3),
)
def test_who_is_excluded_has_three_attributions_of_one_family(
    fault: str, before: list[str], own: Exclusion | None, others: list[Exclusion]
):
    state = after_attribution(fault, before, own, others)
    if not before and not others and own is None:
        assert state is SUSPECT
    if state is EXCLUDE:
        assert set(before) <= {fault}
        assert len(before) + len(others) + (own is not None) >= 1
    assert after_attribution(fault, before, own, others, of_broad_set=True) is SUSPECT


def test_a_family_is_a_fault_without_its_rank():
    assert family(f"{SEGV} at 3") == family(f"{SEGV} at several") == family(SEGV) == SEGV
    assert family("runtimeerror: at several places") == "runtimeerror: at several places"


def test_each_standing_says_what_comes_next():
    for state in NodeStanding:
        assert what_comes_next(known(state)) and len(what_comes_next(known(state))) < 140
