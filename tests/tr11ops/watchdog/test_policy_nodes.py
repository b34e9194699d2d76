"""Which nodes and queued jobs the watchdog takes out of use, and which it gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.launch.run_inputs import write_card
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    idle,
    pending,
    running,
    snapshot,
    with_facts,
)
from tests.tr11ops.watchdog.decisions import (
    BLAME,
    SCENE,
    SENT,
    SPARE,
    decide,
    planned,
    words,
)
from tests.tr11ops.watchdog.site_events import without_restart
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.observe.observations import Readmission
from tr11ops.runcard.card import load_card
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.runcard.watching import WatchSection
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.watchdog.actions import (
    Include,
    Resubmit,
)
from tr11ops.watchdog.repairs import out_of_service


def test_a_node_that_was_surely_at_fault_is_excluded_once() -> None:
    found = decide(snapshot(nodes=SPARE), scene=replace(SCENE, blames=(BLAME,)))
    assert words(found) == [("exclude", "n07")] and found.actions[0].evidence == BLAME.evidence
    listed = (Exclusion("n07", "bad", "tr11", since=NOW),)
    assert decide(
        snapshot(nodes=SPARE, exclusions=listed), scene=replace(SCENE, blames=(BLAME,))
    ).is_empty


@pytest.mark.parametrize(
    "changes",
    [{"confidence": 0.75}, {"time": NOW - 2 * DAY}],
)
def test_a_guess_or_an_old_story_excludes_nothing(changes: dict[str, Any]) -> None:
    assert decide(
        snapshot(nodes=SPARE), scene=replace(SCENE, blames=(replace(BLAME, **changes),))
    ).is_empty


def test_a_node_that_a_person_put_back_stays_in() -> None:
    scene = replace(SCENE, blames=(BLAME,))
    assert decide(
        snapshot(nodes=SPARE, readmissions=(Readmission("n07", NOW - 60),)), scene=scene
    ).is_empty
    before = snapshot(nodes=SPARE, readmissions=(Readmission("n07", NOW - DAY),))
    assert planned(before, scene=scene) == [("exclude", "n07")]


def test_a_node_that_was_lost_to_the_scheduler_is_looked_at_now() -> None:
    """What was true at the launch's end is no verdict on a node that works again; what came back
    is.
    """
    lost = replace(BLAME, why="n07: lost to the scheduler")
    down = tuple(
        replace(node, states=frozenset({"down"})) if node.name == "n07" else node for node in SPARE
    )
    assert planned(snapshot(nodes=down), scene=replace(SCENE, blames=(lost,))) == [
        ("exclude", "n07")
    ]
    (action,) = decide(snapshot(nodes=down), scene=replace(SCENE, blames=(lost,))).actions
    assert action.words() == "exclude n07: lost to the scheduler", "its name is said once"
    healed = decide(snapshot(nodes=SPARE), scene=replace(SCENE, blames=(lost,)))
    assert healed.is_empty and not healed.withheld
    twice = replace(lost, why="the second time on n07: n07: lost to the scheduler")
    assert planned(snapshot(nodes=SPARE), scene=replace(SCENE, blames=(twice,))) == [
        ("exclude", "n07")
    ]


def test_the_cap_holds_and_never_cuts_into_what_the_run_needs() -> None:
    blames = tuple(replace(BLAME, node=f"n{number:02d}") for number in range(1, 9))
    scene = replace(SCENE, blames=blames)
    assert len(decide(snapshot(nodes=SPARE), scene=scene).actions) == 4  # the day's budget
    wide = WatchSection(exclusions_per_day=100)
    assert len(decide(snapshot(nodes=SPARE), scene=scene, watch=wide).actions) == 6  # a tenth of 60
    tight = decide(snapshot(nodes=SPARE[:49]), scene=scene, watch=wide)
    assert len(tight.actions) == 1 and len(tight.withheld) == 7  # 48 of 49 are needed


def test_what_is_only_avoided_is_used_again_where_an_attempt_would_wait(tmp_path: Path) -> None:
    """48 are needed: with 47 others free one comes back, the first that was avoided; with 48, or
    while it runs, none.
    """
    listed = tuple(
        Exclusion(f"n{number:02d}", "it died", "tr11", since=NOW - number, state=state)
        for number, state in ((1, "avoid"), (2, "avoid"), (3, "exclude"), (4, "suspect"))
    )
    waits = {"jobs": (pending(),), "submissions": (SENT,), "exclusions": listed}

    def free(count: int) -> tuple[Node, ...]:
        return tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, count + 1))

    assert planned(idle(nodes=free(51), **waits)) == [("include", "n02")]
    assert planned(idle(nodes=free(50), **waits)) == [("include", "n02"), ("include", "n01")]
    for count in (49, 52):  # both would be too few; enough others are free
        assert planned(idle(nodes=free(count), **waits)) == []
    busy = (
        Node("n05", frozenset({"allocated"})),
        *(node for node in free(51) if node.name != "n05"),
    )
    assert planned(idle(nodes=busy, **waits)) == [("include", "n02"), ("include", "n01")]
    card = load_card(write_card(tmp_path), ['slurm.exclude=["n02"]'], {})
    by_card = with_facts(idle(nodes=free(52), **waits), source=card)
    assert planned(by_card) == []  # 48 others are free, and it would not be given n02
    by_card = with_facts(idle(nodes=free(51), **waits), source=card)
    assert planned(by_card) == [("include", "n01")]
    for asked, back in (
        (46, []),
        (47, ["n02"]),
        (48, ["n02", "n01"]),
    ):  # by what is queued, not by the card
        waits["jobs"] = (pending(node_count=asked),)
        assert planned(idle(nodes=free(50), **waits)) == [("include", node) for node in back]
    waits["jobs"] = (
        pending(node_count=46),
        pending((1,), array_id="2000", raw_id="2000", dependency="afterany:1000"),
    )
    # the second one comes after the first
    assert planned(idle(nodes=free(50), **waits)) == []


@pytest.mark.parametrize(
    ("changes", "state", "back"),
    [
        ({}, "idle", True),
        ({"state": "avoid"}, "allocated", True),  # by another's job: Slurm gives it to ours later
        ({}, "drain", False),
        ({}, "unknown", False),
        ({"out": None}, "idle", False),  # no one has touched it since
        ({"owner": "ana"}, "idle", False),
        ({"state": "suspect"}, "idle", False),  # left out for one try
        ({"returns": 1}, "idle", False),  # it came back so before, and has failed again
    ],
)
def test_a_node_that_the_site_took_and_put_back_is_used_again(
    changes: dict[str, Any], state: str, back: bool
) -> None:
    entry = Exclusion("n07", "ECC", "tr11", since=NOW - DAY, out=NOW - HOUR)
    nodes = tuple(
        replace(node, states=frozenset({state})) if node.name == "n07" else node for node in SPARE
    )
    seen = snapshot(nodes=nodes, exclusions=(replace(entry, **changes),))
    assert planned(seen) == ([("include", "n07")] if back else [])
    for action in decide(seen).actions:
        assert isinstance(action, Include) and action.then is NodeStanding.RETURNED
        assert "has put it back" in action.why


@pytest.mark.parametrize(
    ("changes", "back"),
    [
        ({}, True),
        ({"since": NOW - HOUR / 2}, False),  # it has not rested
        ({"owner": "ana"}, False),
        ({"returns": 1}, False),  # it came back before and failed again: a day
        ({"returns": 1, "since": NOW - DAY}, True),
        ({"returns": 2, "since": NOW - 9 * DAY}, False),  # a person
    ],
)
def test_what_was_excluded_a_while_ago_is_used_where_an_attempt_would_wait(
    changes: dict[str, Any], back: bool
) -> None:
    """48 are needed, 47 others are free. What is only avoided comes first."""
    entry = replace(Exclusion("n01", "ECC", "tr11", since=NOW - HOUR), **changes)
    free = tuple(Node(f"n{number:02d}", frozenset({"idle"})) for number in range(1, 49))
    waits = {"jobs": (pending(),), "submissions": (SENT,), "nodes": free}
    seen = idle(exclusions=(entry,), **waits)
    assert planned(seen) == ([("include", "n01")] if back else [])
    assert all(action.then is NodeStanding.RETURNED for action in decide(seen).actions)
    avoided = Exclusion("n02", "it died", "tr11", since=NOW, state="avoid")
    waits["nodes"] = (*free, Node("n49", frozenset({"idle"})))
    assert planned(idle(exclusions=(entry, avoided), **waits)) == [("include", "n02")]


@pytest.mark.parametrize(
    ("changes", "state", "noted"),
    [
        ({}, "drain", True),
        ({}, "down", True),
        ({}, "idle", False),
        ({}, "unknown", False),
        ({"owner": "ana"}, "drain", False),
        ({"out": NOW}, "drain", False),
    ],
)
def test_what_the_site_has_out_of_service_is_noted_once(
    changes: dict[str, Any], state: str, noted: bool
) -> None:
    entry = replace(Exclusion("n07", "ECC", "tr11", since=NOW - DAY), **changes)
    seen = snapshot(nodes=(Node("n07", frozenset({state})),), exclusions=(entry,))
    assert out_of_service(seen) == (frozenset({"n07"}) if noted else frozenset())


def test_queued_jobs_that_an_attempt_did_not_hold_are_held() -> None:
    ending = without_restart("1006", NOW - 60, "the data is gone", hold_failed=True)
    waiting = idle(jobs=(pending(),), submissions=(SENT,))
    assert planned(waiting, scene=replace(SCENE, endings=(ending,))) == [("hold", "1000")]
    beside = idle(jobs=(pending((8,), reason="JobHeldUser"), pending((9, 10))), submissions=(SENT,))
    assert planned(beside, scene=replace(SCENE, endings=(ending,))) == [("hold", "1000_[9-10]")]
    fresh = idle(jobs=(pending(submit_time=NOW - 30),), submissions=(SENT,))
    assert decide(fresh, scene=replace(SCENE, endings=(ending,))).is_empty


def test_tasks_that_end_before_they_begin_have_the_others_held() -> None:
    """Slurm itself ends a task whose output it cannot open: nothing of tr11 runs that would count
    it.
    """

    def burned(task: int, **changes: Any) -> Job:
        state = {
            "state": JobState.FAILED,
            "reason": "JobLaunchFailure",
            "start_time": NOW - 20,
            "end_time": NOW - 10,
        }
        return running(
            job_id=f"1000_{task}", raw_id=f"10{task:02d}", task_id=task, **{**state, **changes}
        )

    found = decide(idle(jobs=(burned(8), burned(9), pending((10, 11))), submissions=(SENT,)))
    assert words(found) == [("hold", "1000")]
    assert (
        "2 tasks ended before they began to work (FAILED JobLaunchFailure)" in found.actions[0].why
    )
    for few in (
        (burned(9),), (burned(8), burned(9, state=JobState.CANCELLED)), (burned(8), burned(9, state=JobState.COMPLETED)),
        (burned(8), burned(9), running(job_id="1000_10", raw_id="1010", task_id=10)), (burned(8), burned(9, start_time=NOW - 2 * DAY, end_time=NOW - DAY)),
    ):  # fmt: skip
        assert not decide(idle(jobs=(*few, pending((11, 12))), submissions=(SENT,))).actions, few
    three = with_facts(
        idle(jobs=(burned(8), burned(9), pending((10,))), submissions=(SENT,)),
        resilience=ResilienceSection(most_tasks_per_fault=3),
    )
    assert not decide(three).actions


def test_what_is_launched_again_never_waits_for_a_dead_job() -> None:
    """Of two dead jobs the day's budget lets one be cancelled: the other one would keep the new one
    from starting.
    """
    dead = [
        pending((), job_id=number, raw_id=number, array_id=None, reason="DependencyNeverSatisfied")
        for number in ("2001", "2002")
    ]
    found = decide(
        idle(jobs=tuple(dead), submissions=(SENT,)), watch=WatchSection(cancellations_per_day=1)
    )
    assert words(found) == [("cancel", "2001"), ("resubmit", "1-1")]
    assert [action.after for action in found.actions if isinstance(action, Resubmit)] == [None]


def test_another_variants_jobs_are_left_to_its_own_watchdog() -> None:
    other = replace(SENT, variant="ablation")
    found = decide(idle(jobs=(pending(reason="DependencyNeverSatisfied"),), submissions=(other,)))
    assert not found.actions and found.withheld == (
        "nothing is done: job 1000_[8-10%1] trains variant ablation of this run, whose own watchdog"
        " sees to it",
    )


def test_only_a_hold_whose_reason_is_gone_is_released() -> None:
    held = idle(jobs=(pending(reason="JobHeldUser"),), submissions=(SENT,))
    assert planned(held, scene=replace(SCENE, releasable=frozenset({"1000"}))) == [
        ("release", "1000")
    ]
    assert decide(held).is_empty  # for a fault, or by hand
    part = replace(SCENE, releasable=frozenset({"1000_[9-10]"}))
    assert planned(held, scene=part) == [("release", "1000_[9-10]")]
    barred = decide(idle(jobs=(pending(reason="JobHeldAdmin"),), submissions=(SENT,)), scene=part)
    assert not barred.actions and barred.withheld[0].startswith("release 1000_[9-10]: ")
