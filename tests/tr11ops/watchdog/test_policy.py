"""What the watchdog would do: the right thing to each trouble, once; and nothing on what is unknown
or not its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    checkpoints,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    wordless,
)
from tests.tr11ops.watchdog.decisions import (
    BLAME,
    SCENE,
    SENT,
    SPARE,
    SWITCH,
    decide,
    down,
    planned,
    record,
    words,
    zombie,
)
from tests.tr11ops.watchdog.site_events import without_restart
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.detect.registry import detect_all
from tr11ops.observe.lease import LeaseHolder
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.watching import WatchSection
from tr11ops.rundir.action_log import ActionHistory, ActionRecord, ProgressRecord, Result
from tr11ops.rundir.attempts import KeptStacks
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.watchdog.actions import (
    Action,
    Blame,
    Cancel,
    Exclude,
    Plan,
    PolicyContext,
    Resubmit,
)
from tr11ops.watchdog.policy import POWERS
from tr11ops.watchdog.rules import progress
from tr11ops.watchdog.stacks import hanging_jobs

# ----------------------------------------------------------------------------- resubmission
AGAIN = [("resubmit", "1-3")]  # the array of the card


def test_a_healthy_run_needs_nothing() -> None:
    assert decide(snapshot()).is_empty


def test_what_is_gone_is_launched_again_with_evidence() -> None:
    found = decide(down())
    assert words(found) == AGAIN and not found.withheld
    (action,) = found.actions
    assert (
        action.why
        and action.evidence == ("the last exit record says exit-duration at iteration 30800",)
        and action.undo
    )
    assert isinstance(action, Resubmit) and action.after is None


@pytest.mark.parametrize(
    ("seen", "scene", "why"),
    [
        (down(submissions=()), SCENE, "the first launch is a person's"),
        (
            down(attempts=(ended("1007", reason="refused", message="no data", restart=False),)),
            SCENE,
            "refused to start, and the next one would again: no data",
        ),
        (down(attempts=(ended("1007", reason="error", restart=False),)), SCENE, "is not to go on"),
        (
            down(attempts=(wordless("1007"), wordless("1006", 2 * HOUR))),
            SCENE,
            "two attempts in a row",
        ),
        (
            down(attempts=(wordless("1007"),)),
            replace(SCENE, endings=(without_restart("1007", NOW, "the same fault twice"),)),
            "asked for a person: the same fault twice",
        ),
    ],
)
def test_a_launch_that_would_fail_is_left_to_a_person(
    seen: Snapshot, scene: PolicyContext, why: str
) -> None:
    found = decide(seen, scene=scene)
    assert found.actions == () and len(found.withheld) == 1 and why in found.withheld[0]


def test_one_crash_is_launched_again() -> None:
    assert planned(down(attempts=(wordless("1007"),))) == AGAIN


def test_it_is_not_done_twice_without_progress() -> None:
    (action,) = decide(down()).actions
    again = decide(down(), ActionHistory((record(action),)))
    assert again.actions == () and "nothing has come of it" in again.withheld[0]
    assert planned(down(), ActionHistory((record(action, Result.REFUSED),))) == AGAIN
    assert decide(down(), ActionHistory((record(action, Result.OPEN),))).actions == ()
    further = ProgressRecord(31218, 31200)
    assert planned(down(), ActionHistory((record(action, reached=further),))) == AGAIN
    assert planned(down(checkpoints=checkpoints(31300)), ActionHistory((record(action),))) == AGAIN


def test_a_days_budget_ends() -> None:
    (action,) = decide(down()).actions
    spent = ActionHistory(
        tuple(
            replace(record(action, age=HOUR * n, reached=ProgressRecord()), number=str(n))
            for n in range(1, 5)
        )
    )
    assert decide(down(), spent).actions == ()
    assert "4 of 4 in 24 hours are spent" in decide(down(), spent).withheld[0]
    assert planned(down(), spent, watch=WatchSection(resubmissions_per_day=5)) == AGAIN
    later = ActionHistory(tuple(replace(one, time=one.time - DAY) for one in spent.records))
    assert planned(down(), later) == AGAIN
    # the clock was set back
    ahead = ActionHistory(tuple(replace(one, time=NOW + DAY) for one in spent.records))
    assert decide(down(), ahead).actions == ()
    assert decide(down(), watch=WatchSection(resubmissions_per_day=0)).actions == ()


# -------------------------------------------------------------------------- zombies and dead chains
def test_a_zombie_ends_and_its_host_is_excluded_first() -> None:
    found = decide(zombie(jobs=(running(), pending())))
    assert words(found) == [("exclude", "n01"), ("cancel", "1000_7")]
    assert isinstance(found.actions[0], Exclude) and found.actions[0].limit.most == 6


@pytest.mark.parametrize(
    ("may_act", "words"),
    [(True, "it is given up when"), (False, "`pulse --act`), else it would be given up when")],
)
def test_a_silent_host_is_not_given_up_before_it_is_known_to_be_lost(
    may_act: bool, words: str
) -> None:
    silent = zombie(
        jobs=(running(), pending()),
        nodes=(Node("n01", frozenset({"mixed", "not_responding"})),),
        heartbeats=beats(),
    )
    found = decide(silent, scene=replace(SCENE, may_act=may_act))
    assert words in found.withheld[0] and found.actions == ()
    assert found.withheld[0].startswith(
        "cancel 1000_7: its batch host n01 does not answer the scheduler; not done: whether it is"
        " lost is not known yet, and nothing is to be typed before it is"
    )


def test_what_a_person_may_do_in_its_place_is_known_of_each_act() -> None:
    found = decide(zombie(jobs=(running(), pending())))
    assert {action.by_hand for action in found.actions} == {"tr11 launch --repair"}


def test_a_zombie_with_an_empty_queue_is_followed_by_a_launch() -> None:
    found = decide(zombie(jobs=(running(),)))
    assert words(found) == [("exclude", "n01"), ("cancel", "1000_7"), ("resubmit", "1-3")]
    last = found.actions[-1]
    assert isinstance(last, Resubmit) and last.after == "1007"


def test_another_users_zombie_is_told_and_not_touched() -> None:
    found = decide(zombie(jobs=(running(user="bob"), pending(user="bob"))))
    assert words(found) == [("exclude", "n01")] and "belongs to bob" in found.withheld[0]
    assert ("cancel", "1000_7") in planned(
        zombie(jobs=(running(user="bob"), pending())), scene=replace(SCENE, is_root=True)
    )


def test_a_dead_chain_is_replaced_behind_the_live_job() -> None:
    dead = [
        pending((), job_id=n, raw_id=n, array_id=None, reason="DependencyNeverSatisfied")
        for n in ("2001", "2002")
    ]
    found = decide(snapshot(jobs=(running(), *dead), submissions=(SENT,)))
    assert words(found) == [("cancel", "2001"), ("cancel", "2002"), ("resubmit", "1-2")]
    assert isinstance(found.actions[-1], Resubmit) and found.actions[-1].after == "1000"


def test_the_dead_rest_of_an_array_goes_and_its_live_task_stays() -> None:
    rest = pending((8, 9), reason="DependencyNeverSatisfied")
    found = decide(snapshot(jobs=(running(), rest), submissions=(SENT,)))
    assert words(found) == [("cancel", "1000_[8-9%1]"), ("resubmit", "1-2")]


@pytest.mark.parametrize("reason", ["BadConstraints", "InvalidAccount", "AssocMaxNodePerJobLimit"])
def test_what_another_launch_would_not_cure_is_left_alone(reason: str) -> None:
    found = decide(snapshot(jobs=(running(), pending((8, 9), reason=reason)), submissions=(SENT,)))
    assert found.actions == () and "another launch would meet the same" in found.withheld[0]


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionDown",
        "PartitionInactive",
        "AssocGrpCPUMinutesLimit",
        "Reservation r1 was deleted",
        "PartitionTimeLimit",
    ],
)
def test_queued_jobs_for_the_site_or_a_person_keeps_its_place(reason: str) -> None:
    """A partition that is down for maintenance comes back, and the place in the queue with it."""
    for jobs in ((running(), pending((8, 9), reason=reason)), (pending((8, 9), reason=reason),)):
        found = decide(idle(jobs=jobs, submissions=(SENT,)))
        assert found.actions == ()


def test_what_a_killed_pass_cancelled_is_still_owed_a_launch() -> None:
    cancelled = ActionRecord(
        "1", "cancel", "2001", "cancel:2001", NOW - HOUR, owes=2, result=Result.DONE
    )
    found = decide(snapshot(jobs=(running(),), submissions=(SENT,)), ActionHistory((cancelled,)))
    assert words(found) == [("resubmit", "1-2")]
    launched = replace(SENT, tag="20220501-110000-00000001", time=NOW - 60)
    assert decide(
        snapshot(jobs=(running(),), submissions=(launched, SENT)), ActionHistory((cancelled,))
    ).is_empty
    # and not the card's array besides
    assert planned(down(), ActionHistory((cancelled,))) == [("resubmit", "1-2")]


# ----------------------------------------------------------------------------- two at once, hung
def test_of_two_running_jobs_the_holder_of_the_lease_stays() -> None:
    both = snapshot(
        jobs=(running(), running(job_id="2000", raw_id="2000", array_id=None, start_time=NOW - 60))
    )
    found = decide(both, scene=replace(SCENE, holder=LeaseHolder("1007", "", "job 1007")))
    assert words(found) == [("cancel", "2000")]
    nobody = decide(both)
    assert nobody.actions == () and "neither holds the lease" in nobody.withheld[0]


HUNG = snapshot(heartbeats=beats(age=9 * HOUR), steps=steps(age=9 * HOUR))
STACKS = KeptStacks(
    "1007", NOW - 60, "rank 1 on node n01 is stopped (SIGSTOP)", (1,), ("n01",), True
)


def test_a_hung_job_ends_beyond_the_bound_with_its_stacks_kept() -> None:
    first = decide(HUNG)
    assert words(first) == [("stacks", "1000_7"), ("cancel", "1000_7")]
    last = first.actions[-1]
    assert (
        isinstance(last, Cancel)
        and last.only_after == first.actions[0].incident
        and first.actions[0].evidence
    )
    assert planned(changed(HUNG, stacks=(STACKS,))) == [("cancel", "1000_7")]
    of_another_hang = changed(HUNG, stacks=(replace(STACKS, time=NOW - 10 * HOUR),))
    assert planned(of_another_hang) == [("stacks", "1000_7"), ("cancel", "1000_7")]
    unread = changed(HUNG, stacks=Unknown("no rights"))
    assert planned(unread) == [("stacks", "1000_7"), ("cancel", "1000_7")]
    sooner = snapshot(heartbeats=beats(age=1500), steps=steps(age=1500), stacks=(STACKS,))
    assert decide(sooner).actions == ()
    assert "is given up after" in decide(sooner).withheld[0]


FREE = tuple(
    Node(f"n{number:02d}", frozenset({"allocated"} if number <= 48 else {"idle"}))
    for number in range(1, 61)
)


def after_hang(stacks: KeptStacks = STACKS, **scene: Any) -> Exclude:
    first, last = decide(
        changed(HUNG, stacks=(stacks,), nodes=FREE), scene=replace(SCENE, **scene)
    ).actions
    assert isinstance(first, Exclude) and isinstance(last, Cancel)
    return first


def test_the_one_node_that_holds_a_job_up_is_left_out_of_the_next_start() -> None:
    """A second hang costs what the first did; to exclude it takes three."""
    first = after_hang()
    assert (first.subject, first.state, first.fault) == ("n01", "suspect", "hang")
    assert first.words().startswith(
        "start once without n01: job 1000_7 hung: rank 1 on node n01 is"
    )
    before = Exclusion("n01", state="suspect", fault="hang")
    assert after_hang(suspects=(before,)).state == "avoid"
    assert after_hang(suspects=(replace(before, state="avoid"),)).state == "exclude"
    other = replace(before, state="avoid", fault="died: the worker was ended by sigkill")
    assert after_hang(suspects=(other,)).state == "avoid"


ON_ITS_WAY = replace(
    STACKS, time=NOW - 300, sentence="rank 1 on node n01 computes", is_certain=False
).after(None)


@pytest.mark.parametrize(
    ("again", "left_out"),
    [
        (None, []),
        (replace(ON_ITS_WAY, time=NOW - 290), []),  # a look of the same moment
        (replace(ON_ITS_WAY, time=NOW - 60, ranks=(2,), nodes=("n02",)), []),
        (replace(ON_ITS_WAY, time=NOW - 60), [("exclude", "n01")]),
    ],
)
def test_a_rank_that_may_be_on_its_way_condemns_its_node_in_a_second_look_alone(
    again: KeptStacks | None, left_out: list[tuple[str, str]]
) -> None:
    kept = ON_ITS_WAY if again is None else again.after(ON_ITS_WAY)
    found = changed(HUNG, stacks=(kept,), nodes=FREE)
    assert planned(found) == [*left_out, ("cancel", "1000_7")]
    assert bool(hanging_jobs(found, detect_all(found))) == (not left_out)  # until one confirms it
    of_another_hang = replace(kept, named=NOW - 10 * HOUR)
    assert planned(changed(found, stacks=(of_another_hang,))) == [("cancel", "1000_7")]


def test_no_node_is_left_out_where_several_are_named_none_is_free_or_none_is_known() -> None:
    several = replace(STACKS, nodes=("n01", "n02"), ranks=(1, 9))
    no_one = replace(STACKS, nodes=(), ranks=(), sentence="all 96 ranks wait in all-reduce")
    for stacks in (several, no_one):
        found = decide(changed(HUNG, stacks=(stacks,), nodes=FREE))
        assert (words(found), found.withheld) == ([("cancel", "1000_7")], ())
    for nodes, why in (
        (FREE[:48], "at most 0 may be excluded, for an attempt needs 48"),
        (SPARE, "only 47 others are free, an attempt needs 48"),
    ):
        found = decide(changed(HUNG, stacks=(STACKS,), nodes=nodes))
        assert words(found) == [("cancel", "1000_7")]
        assert found.withheld[0].startswith("start once without n01: ") and why in found.withheld[0]
    local = changed(HUNG, stacks=(STACKS,), nodes=FREE, scheduler="local")
    assert words(decide(local)) == [("cancel", "1000_7")]


def test_a_watchdog_that_may_not_act_promises_nothing() -> None:
    """A mail said "given up after 6 min of silence" though no one would."""
    sooner = snapshot(heartbeats=beats(age=1500), steps=steps(age=1500))
    living = zombie(heartbeats=beats(age=10), steps=steps(age=10))
    for seen, when in ((sooner, "of silence"), (living, "when no trainer shows life for")):
        (acting,) = decide(seen).withheld
        assert "it is given up" in acting and when in acting
        (telling,) = decide(seen, scene=replace(SCENE, may_act=False)).withheld
        assert (
            "not done: tr11 may not act (`watch.act`, `pulse --act`), else it would" in telling
            and when in telling
        )


# ---------------------------------------------------------------- what people are told of the rules
def test_people_are_told_of_every_action_that_the_watchdog_has() -> None:
    assert {action for power in POWERS for action in power.actions} == set(Action.__subclasses__())


def test_the_page_of_the_watchdog_has_the_rules_of_its_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "pulse.md").read_text(encoding="utf-8")
    rows = [f"| {power.trouble} | {power.does} | {power.way_back} |" for power in POWERS]
    assert (
        "\n".join(rows) + "\n\n"
        in page.partition("| trouble | action | how to undo it |\n|---|---|---|\n")[2]
    )


# ----------------------------------------------------------------------------- never
TROUBLES = [
    down(),
    zombie(jobs=(running(),)),
    HUNG,
    idle(jobs=(pending(reason="DependencyNeverSatisfied"),)),
]
READY = replace(SCENE, blames=(BLAME,), releasable=frozenset({"1000"}))
GONE = Unknown("it could not be read")


@pytest.mark.parametrize("seen", TROUBLES)
@pytest.mark.parametrize(
    "hidden", ["jobs", "nodes", "attempts", "kill_switch", "exclusions", "submissions", "steps", "heartbeats", "checkpoints", "pause", "holder", "endings", "blames"]
)  # fmt: skip
def test_nothing_follows_from_what_is_not_known(seen: Snapshot, hidden: str) -> None:
    on_scene = hidden in {"pause", "holder", "endings", "blames"}
    scene = replace(READY, **{hidden: GONE}) if on_scene else READY  # type: ignore[arg-type]
    found = decide(seen if on_scene else changed(seen, **{hidden: GONE}), scene=scene)  # type: ignore[arg-type]
    assert found.actions == ()


@pytest.mark.parametrize("seen", TROUBLES)
def test_nothing_is_done_against_a_person_or_a_stranger(seen: Snapshot) -> None:
    assert decide(replace(seen, kill_switch=SWITCH), scene=READY) == Plan()
    assert decide(seen, scene=replace(READY, pause="ana")) == Plan()
    foreign = decide(
        seen, scene=replace(READY, holder=LeaseHolder("9999", "", "job 9999 of bob on far"))
    )
    assert foreign.actions == () and "job 9999 of bob" in foreign.withheld[0]
    read_error = decide(
        seen, ActionHistory(read_error="journal f line 3: the chain is broken"), scene=READY
    )
    assert read_error.actions == () and "the chain is broken" in read_error.withheld[0]
    assert (
        decide(
            replace(seen, attempts=(ended("1007", age=60, reason="finished", iteration=31219),))
        ).actions
        == ()
    )


JOBS = st.lists(
    st.sampled_from(
        [
            running(), running(job_id="2000", raw_id="2000", array_id=None, user="bob"), pending(),
            pending(reason="JobHeldUser"), pending((), job_id="31", raw_id="31", array_id=None, reason="BadConstraints"),
            pending((), job_id="32", raw_id="32", array_id=None, reason="DependencyNeverSatisfied"),
            pending((8,), job_id="1000_8", reason="DependencyNeverSatisfied"),
            pending((9,), job_id="1000_9", reason="DependencyNeverSatisfied,"),
        ]
    ),
    max_size=4,
    unique_by=lambda job: job.job_id,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    jobs=JOBS,
    silent=st.floats(0, 9 * HOUR),
    budget=st.integers(0, 2),
    blames=st.lists(
        st.builds(replace, st.just(BLAME), node=st.sampled_from(["n01", "n02", "n03"])), max_size=4
    ),
    lost=st.booleans(),
    earlier=st.lists(
        st.sampled_from(["cancel:1007", "resubmit", "cancel:31", "exclude:n01:1006"]), max_size=2
    ),
)
def test_no_plan_exceeds_its_budgets_or_does_a_thing_twice(
    jobs: list[Any], silent: float, budget: int, blames: list[Blame], lost: bool, earlier: list[str]
) -> None:
    seen = (zombie if lost else down)(
        jobs=tuple(jobs), heartbeats=beats(age=silent), steps=steps(age=silent), submissions=(SENT,)
    )
    history = ActionHistory(tuple(
        ActionRecord(str(n), what.split(":")[0], what.split(":")[-1], what, NOW - HOUR, "", progress(seen), result=Result.DONE)
        for n, what in enumerate(earlier)
    ))  # fmt: skip
    watch = WatchSection(
        resubmissions_per_day=budget, exclusions_per_day=budget, cancellations_per_day=budget
    )
    scene = replace(SCENE, blames=tuple(blames))
    found = decide(seen, history, scene, watch)
    assert len({(action.name, action.subject) for action in found.actions}) == len(found.actions)
    assert not {action.incident for action in found.actions} & set(earlier)
    for name in ("resubmit", "exclude", "cancel"):
        assert sum(action.name == name for action in found.actions) + history.spent(
            name, NOW
        ) <= max(budget, history.spent(name, NOW))
    assert sum(isinstance(action, Resubmit) for action in found.actions) <= 1
    owners = {job.raw_id: job.user for job in jobs}
    assert all(
        owners.get(action.subject) != "bob"
        for action in found.actions
        if isinstance(action, Cancel)
    )
    assert all(action.why and action.undo for action in found.actions)
    assert decide(seen, history, scene, watch) == found
