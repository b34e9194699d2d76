"""A trainer that knows nothing of tr11 is ended for a hang where two facts prove it, and for no other
reason.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import HOUR, NOW, beats, snapshot, steps, with_facts
from tests.tr11ops.watchdog.decisions import decide, record, words
from tr11ops.rundir.action_log import ActionHistory
from tr11ops.rundir.attempts import KeptStacks, LearnedStage, TrainerLife
from tr11ops.trainers.levels import TrainerStanding
from tr11ops.watchdog.hangs import HangCase, hang_case

BOUND = 600.0
LIFE = TrainerLife(
    "1007",
    launch=1,
    node_rank=0,
    nodes=2,
    time=NOW - 5.0,
    watched=NOW - 9 * HOUR,
    sign=NOW - 2000.0,
    kind="step",
    moved=NOW - 2000.0,
    learned={"step": LearnedStage(12.0, 400), "save": LearnedStage(60.0, 3)},
)
PEER = replace(LIFE, node_rank=1)
BUSY = replace(LIFE, moved=NOW - 3.0)
FIRST = KeptStacks(
    "1007", NOW - 300, "all wait", waits=("collective",), mark="a", unmoved=NOW - 300
)
TWICE = replace(FIRST, unmoved=NOW - 900)


def judged(
    life: TrainerLife, stacks: KeptStacks | None = FIRST, peer: TrainerLife = PEER
) -> HangCase:
    return hang_case((life, peer), stacks, NOW, BOUND)


PROVED: dict[str, HangCase] = {
    "all sleep": judged(LIFE),
    "all sleep, and no stack could be read": judged(
        LIFE, replace(FIRST, waits=("unread",), mark="")
    ),
    "all sleep, and none was taken": judged(LIFE, None),
    "one rank sleeps, the others wait for it": judged(
        LIFE, replace(FIRST, waits=("collective", "other"))
    ),
    "they spin in a collective, and have not moved in two looks": judged(BUSY, TWICE),
    "in a save, of which two were seen": judged(replace(LIFE, kind="save")),
}
INNOCENT: dict[str, tuple[HangCase, str]] = {
    "log bytes": (judged(replace(LIFE, sign=NOW - 500)), "last sign of life"),
    "the other node's": (judged(LIFE, peer=replace(PEER, sign=NOW - 500)), "last sign of life"),
    "computes": (judged(BUSY, replace(TWICE, waits=("collective", "compute"))), "compute"),
    "the other node computes": (judged(LIFE, None, replace(PEER, moved=NOW - 3)), "could not be read"),
    "spins, seen once": (judged(BUSY), "use their processors"),
    "spins, and stacks are not to be had": (judged(BUSY, None), "could not be read"),
    "writes a save, by a look that is old": (
        judged(BUSY, replace(TWICE, time=NOW - 600, waits=("file",))),
        "wait for a file",
    ),
    "a slow file system": (judged(replace(LIFE, on_disk=1)), "file system"),
    "writes a save": (judged(LIFE, replace(TWICE, time=NOW - 60, waits=("collective", "file"))), "wait for a file"),
    "waits for data": (judged(LIFE, replace(TWICE, time=NOW - 60, waits=("data-loader",))), "wait for their data"),
    "compiles": (judged(LIFE, replace(TWICE, time=NOW - 60, waits=("starting",))), "still starting"),
    "the first start": (judged(replace(LIFE, kind="load")), "0 of 2 were seen"),
    "the first evaluation": (judged(replace(LIFE, kind="evaluation")), "an evaluation takes is not"),
    "few steps": (judged(replace(LIFE, learned={"step": LearnedStage(1.0, 19)})), "19 of 20"),
    "a rank was stopped": (judged(replace(LIFE, stopped=1)), "stopped by a signal"),
    "the job was paused": (judged(replace(LIFE, watched=NOW - 400)), "without a break"),
    "a keeper that is silent": (judged(LIFE, peer=replace(PEER, time=NOW - 90)), "has told nothing"),
    "processes that no one sees": (judged(replace(LIFE, moved=None)), "sees no process"),
    "a node of which nothing is known": (hang_case((LIFE,), TWICE, NOW, BOUND), "on 1 node"),
    "no keeper": (hang_case((), TWICE, NOW, BOUND), "nothing is known"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVED)
def test_two_facts_prove_a_hang(name: str) -> None:
    case = PROVED[name]
    assert case.is_proved and case.why == "" and len(case.evidence) == 2


@pytest.mark.parametrize("name", INNOCENT)
def test_what_else_is_silent_is_not_ended(name: str) -> None:
    case, why = INNOCENT[name]
    assert not case.is_proved and why in case.why
    assert case.wants_look == (name in {"spins, seen once", "writes a save, by a look that is old"})


# ----------------------------------------------------------------------------- the rule
STANDING = TrainerStanding("none", 2, "it cannot be asked", saves_when_asked=False)
SILENT = with_facts(
    snapshot(heartbeats=beats(age=9 * HOUR), steps=steps(age=9 * HOUR)), standing=STANDING
)
ALONE = replace(LIFE, nodes=1, sign=NOW - 9 * HOUR, moved=NOW - 9 * HOUR, watched=NOW - 20 * HOUR)
KEPT = replace(FIRST, time=NOW - 60, unmoved=NOW - 60)


def seen(lives: tuple[TrainerLife, ...] = (ALONE,), stacks: tuple[KeptStacks, ...] = (KEPT,)):  # type: ignore[no-untyped-def]
    return replace(SILENT, training=replace(SILENT.training, lives=lives, stacks=stacks))


def test_people_are_told_first_then_stacks_then_the_end() -> None:
    first = decide(seen(stacks=()))
    assert words(first) == [("stacks", "1000_7")] and "stacks are kept first" in first.withheld[0]
    just_told = decide(seen(stacks=(replace(KEPT, time=NOW),)))
    assert just_told.actions == () and "people are told first" in just_told.withheld[0]
    end = decide(seen())
    assert words(end) == [("cancel", "1000_7")]
    assert "no process of its ranks" in end.actions[0].evidence[1]


def test_stacks_that_cannot_be_taken_hinder_no_end() -> None:
    tried = ActionHistory((record(decide(seen(stacks=())).actions[0]),))
    assert words(decide(seen(stacks=()), tried)) == [("cancel", "1000_7")]


def test_processes_that_work_are_looked_at_again_before_anything_is_done() -> None:
    busy = replace(ALONE, moved=NOW - 3)
    again = decide(seen((busy,)))
    assert words(again) == [("stacks", "1000_7")]
    assert again.actions[0].incident.startswith("stacks-again:")
    assert words(decide(seen((busy,), (replace(KEPT, unmoved=NOW - 600),)))) == [
        ("cancel", "1000_7")
    ]


def test_a_wait_that_ends_by_itself_is_looked_at_again_and_again() -> None:
    """The look that saw it is a record: it may be over, and the hang has begun."""
    waits = replace(KEPT, time=NOW - 300, waits=("starting",))
    first = decide(seen(stacks=(waits,)))
    assert words(first) == [("stacks", "1000_7")] and "still starting" in first.withheld[0]
    history = ActionHistory((record(first.actions[0]),))
    assert words(decide(seen(stacks=(waits,)), history)) == []
    later = replace(waits, time=NOW - 250)
    assert words(decide(seen(stacks=(later,)), history)) == [("stacks", "1000_7")]
    ended = replace(later, waits=("collective",))
    assert words(decide(seen(stacks=(ended,)), history)) == [("cancel", "1000_7")]


def test_without_a_keeper_s_word_nothing_is_ended() -> None:
    found = decide(seen(lives=()))
    assert found.actions == () and "nothing is known of its processes" in found.withheld[0]


def test_what_the_run_has_taught_makes_the_patience_longer() -> None:
    slow = replace(ALONE, learned={"step": LearnedStage(4 * HOUR, 400)})
    found = decide(seen((slow,)))
    assert found.actions == () and "is given up after" in found.withheld[0]
