"""When it is said that a fault is over, and what is said of the run then. A table, pure: looks in,
mails out.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.looks import (
    BAD,
    CLOSED,
    DISK,
    DOWN,
    ENDED,
    FINISHED,
    HANG,
    LESS,
    PAUSED,
    POLICY,
    QUEUED,
    SLOW,
    STARTS,
    STOPPED,
    TRAINS,
    UNSEEN,
    WELL,
    Looks,
    at,
    flat,
    subjects,
)
from tests.tr11ops.alerts.office import CRITICAL, HOUR, INFO, MINUTE, NOON, WARNING, finding
from tests.tr11ops.status_cases import record, steps as logged_steps
from tr11ops.alerts.changes import AlertChange
from tr11ops.alerts.incidents import ACKNOWLEDGED, RESOLVED
from tr11ops.alerts.service import AlertInput
from tr11ops.alerts.situation import RunCondition, RunSituation, Spell
from tr11ops.alerts.state import AlertState, Incident, Message
from tr11ops.cluster.base import Node
from tr11ops.detect.detector import Finding
from tr11ops.observe.snapshot import Step
from tr11ops.rundir.exclusion import Exclusion


def test_no_all_clear_of_a_hang_while_the_run_is_down() -> None:
    looks = Looks()
    assert subjects(looks.see(HANG, condition=ENDED)) == ["[CRITICAL] small: job 1007 hangs"]
    assert subjects(looks.see(DOWN, condition=ENDED)) == [
        "[CRITICAL] small: small is neither running nor queued"
    ]
    assert looks.see_again(2, DOWN, condition=ENDED) == []
    assert looks.see(condition=STARTS, after=10 * MINUTE) == []
    assert looks.see(condition=STARTS) == []
    (over,) = looks.see(condition=TRAINS, trained=5.0)
    assert over.subject == "[OK] small: over: job 1007 hangs (and 1 more)"
    said = flat(over)
    assert "Now HEALTHY: job 1008 on 4 nodes: training at iteration 266. Nothing to type." in said
    assert "neither running nor queued" in over.body
    assert looks.see(condition=TRAINS, trained=5.0) == []


def test_a_slow_node_is_not_over_before_the_next_launch_was_measured() -> None:
    """Its ranks' compute times come with its steps: none of them is no all-clear."""
    looks = Looks()

    def steps_of(job: str, count: int) -> tuple[Step, ...]:
        times = (looks.now + MINUTE - 8.0 * (count - index) for index in range(count))
        return tuple(Step(record(index), time, job) for index, time in enumerate(times))

    slow = steps_of("1007", 40)
    looks.see(SLOW, condition=TRAINS, trained=5.0, steps=slow)
    for count in (3, 10, 18, 25):
        steps = (*slow, *steps_of("1008", count))
        assert looks.see(condition=TRAINS, trained=5.0, steps=steps) == [], count
    (over,) = looks.see(condition=TRAINS, trained=5.0, steps=(*slow, *steps_of("1008", 33)))
    assert over.subject == "[OK] small: over: iam05 holds the others back"


def test_a_slow_node_is_not_over_because_nothing_moves() -> None:
    looks = Looks()
    looks.see(SLOW, condition=TRAINS, trained=5.0)
    # the last iteration ended before the node was last seen to be slow
    for age in (65.0, 125.0, 185.0):
        assert looks.see(condition=TRAINS, trained=age) == []
    assert subjects(looks.see(HANG, condition=ENDED)) == ["[CRITICAL] small: job 1007 hangs"]
    assert looks.see(HANG, condition=ENDED) == []
    told = subjects(looks.see(condition=TRAINS, trained=5.0))
    assert told == [
        "[OK] small: over: job 1007 hangs",
        "[OK] small: over: iam05 holds the others back",
    ]


@pytest.mark.parametrize(
    ("fault", "condition", "trained", "is_told"),
    [
        (HANG, TRAINS, 5.0, True), (HANG, TRAINS, 500.0, False), (HANG, TRAINS, None, False),
        (HANG, QUEUED, None, True), (HANG, FINISHED, None, True), (HANG, STARTS, None, False),
        (HANG, ENDED, None, False), (HANG, UNSEEN, None, False), (DOWN, QUEUED, None, True),
        (DOWN, STARTS, None, False), (SLOW, TRAINS, 5.0, True), (SLOW, QUEUED, None, False),
        (SLOW, STOPPED, None, False), (LESS, STOPPED, None, False), (HANG, STOPPED, None, False),
        (DOWN, STOPPED, None, False), (DISK, STOPPED, None, True), (SLOW, PAUSED, 5.0, True),
        (SLOW, FINISHED, None, True), (DISK, QUEUED, None, True), (DISK, ENDED, None, False),
    ],
)  # fmt: skip
def test_an_all_clear_needs_evidence_that_the_run_is_well(
    fault: Finding, condition: RunCondition, trained: float | None, is_told: bool
) -> None:
    looks = Looks()
    looks.see(fault, condition=ENDED)
    told = looks.see_again(2, condition=condition, trained=trained)
    assert [message.kind for message in told] == (["cleared"] if is_told else [])


@pytest.mark.parametrize(
    ("fault", "condition", "instead"),
    [
        (HANG, ENDED, "DOWN: nothing runs and nothing is queued"), (HANG, UNSEEN, "UNKNOWN: scheduler unreachable"),
        (SLOW, QUEUED, "QUEUED: nothing runs now; job 1008 waits: Resources"),
        (LESS, STOPPED, STOPPED.words),
    ],
)  # fmt: skip
def test_after_an_hour_it_is_said_what_is_there_instead(
    fault: Finding, condition: RunCondition, instead: str
) -> None:
    looks = Looks()
    looks.see(fault, condition=ENDED)
    looks.see(condition=condition)
    assert looks.see(condition=condition) == []
    (message,) = looks.see(condition=condition, after=HOUR)
    shown = "QUEUED: nothing runs now; job 1008 waits, Resources" if fault is SLOW else instead
    over = fault.title
    if fault is LESS:  # as far as a subject has room
        over, shown = fault.detector, shown.replace(" (slow)", "")
    assert (message.kind, message.subject) == (
        "replaced",
        f"[NOT OK] small: {shown} (over: {over})",
    )
    assert "Nothing to type" not in flat(message)
    assert f"Now: {instead}." in flat(message)
    assert ("When it may, type: cd /home/ana tr11 resume" in flat(message)) is (
        condition is STOPPED
    )
    assert looks.see(condition=condition) == []
    assert subjects(looks.see(fault, condition=ENDED, after=HOUR)) == [
        f"[{fault.severity.name}] small: {fault.title}"
    ]


def test_what_stands_instead_is_named_with_what_to_type() -> None:
    looks = Looks()
    looks.see(HANG, condition=ENDED)
    looks.see_again(3, DOWN, condition=ENDED)
    (message,) = (
        one for one in looks.see(DOWN, condition=ENDED, after=HOUR) if one.kind == "replaced"
    )
    assert (
        message.subject
        == "[NOT OK] small: small is neither running nor queued (over: job 1007 hangs)"
    )
    assert "But the run is not well." in flat(message)
    said = flat(message)
    assert (
        "Still open, CRITICAL: small is neither running nor queued (since 2022-05-02 12:02 UTC)."
        in said
    )
    assert "Type: cd /home/ana tr11 launch --array 1-10" in flat(message)


def test_an_all_clear_names_the_lesser_faults_that_stand() -> None:
    looks = Looks()
    looks.see(HANG, DISK, condition=ENDED)
    (message,) = looks.see(DISK, **WELL)
    assert message.subject == "[OK] small: over: job 1007 hangs"
    assert "Nothing to type" not in flat(message)
    assert "Still open, WARNING: /scratch is full in 3 days (since" in flat(message)
    assert "Type: cd /home/ana tr11 disk" in flat(message)


@pytest.mark.parametrize(("condition", "trained"), [(STOPPED, None), (PAUSED, 5.0)])
def test_an_all_clear_of_a_run_that_waits_to_be_resumed_says_how(
    condition: RunCondition, trained: float
) -> None:
    looks = Looks()
    looks.see(DISK, **WELL)
    looks.see(condition=condition, trained=trained)
    (message,) = looks.see(condition=condition, trained=trained)
    assert message.kind == "cleared"
    assert "Nothing to type" not in flat(message)
    said = flat(message)
    assert "It goes on only when it is resumed. When it may, type: cd /home/ana tr11 resume" in said


def test_what_was_slow_before_a_stop_is_over_when_it_trains_again_and_is_not_slow() -> None:
    looks = Looks()
    looks.see(LESS, **WELL)
    assert looks.see_again(4, condition=STOPPED) == []
    assert looks.see(condition=STARTS) == []
    (message,) = looks.see(**WELL)
    assert (message.kind, message.subject) == ("cleared", f"[OK] small: over: {LESS.title}")
    assert "Nothing to type." in flat(message)


def test_an_all_clear_does_not_call_open_what_the_same_look_has_disproved() -> None:
    waits = finding("waits-for-site", WARNING, "9", title="nothing trains", fix="tr11 nodes list")
    looks = Looks()
    looks.see(SLOW, condition=TRAINS, trained=5.0)
    looks.see(SLOW, waits, condition=QUEUED)
    looks.see(waits, condition=QUEUED)
    (over,) = looks.see(**WELL)
    assert over.subject == f"[OK] small: over: {SLOW.title}"
    assert "Still open" not in over.body
    assert "tr11 nodes list" not in over.body
    assert "Not seen any more, WARNING: nothing trains" in flat(over)
    assert "266. Nothing to type. Not seen" in flat(over), "as no command stands below it"


def test_an_all_clear_beside_what_has_no_command_says_that_nothing_is_to_be_typed() -> None:
    looks = Looks()
    bare = replace(DISK, fix="")
    looks.see(HANG, bare, condition=ENDED)
    (message,) = looks.see(bare, **WELL)
    assert "Nothing to type. Still open, WARNING: /scratch is full" in flat(message)


def course(*parts: tuple[int, int, str]) -> tuple[Step, ...]:
    """Steps of 10 s each: from which to which minute after noon, and in which job."""
    (one,) = logged_steps(count=1)
    times = [(60 * minute + second, job) for first, last, job in parts for minute in range(first, last)
             for second in range(0, 60, 10)]  # fmt: skip
    return tuple(
        replace(
            one, record=replace(one.record, iteration=200 + number), time=NOON + time, job_id=job
        )
        for number, (time, job) in enumerate(times)
    )


@pytest.mark.parametrize(
    ("fault", "steps", "says"),
    [
        (HANG, course((-5, 1, "7_1"), (3, 5, "7_1")), "Training goes on since 2022-05-02 12:03 UTC: job 7_1, from step 236."),
        (HANG, course((-5, 1, "7_1"), (3, 5, "7_2")), "Training goes on since 2022-05-02 12:03 UTC: job 7_2, from step 236."),
        (
            DOWN,
            course((-5, 1, "7_1"), (2, 3, "7_2"), (4, 5, "7_3")),
            "Training went on at 2022-05-02 12:02 UTC: job 7_2, from step 236; now it is job 7_3.",
        ),
        (HANG, course((3, 5, "7_1")), ""),  # how it trained before is not seen any more
        (SLOW, course((-5, 5, "7_1")), ""),
        (CLOSED, course((-5, 5, "7_1")), ""),  # it trained all the while
        (DISK, course((-5, 5, "7_1")), ""),
    ],
)  # fmt: skip
def test_an_all_clear_says_since_when_and_in_which_job_the_training_goes_on(
    fault: Finding, steps: tuple[Step, ...], says: str
) -> None:
    looks = Looks()
    looks.see(at(fault, MINUTE), condition=ENDED, steps=steps)
    (over,) = looks.see_again(3, **WELL, steps=steps)
    assert over.kind == "cleared"
    assert (says in flat(over)) if says else ("Training goes on" not in flat(over))


@pytest.mark.parametrize(("seen_at", "ends"), [(2, 3), (4, 6)])
def test_a_fault_has_lasted_until_the_training_went_on_not_until_the_look(
    seen_at: int, ends: int
) -> None:
    """But it was not over before the last look that still saw it."""
    steps = course((-5, 1, "7_1"), (3, 6, "7_1"))
    trains = RunSituation(condition=TRAINS, trained=NOON + 6 * MINUTE, steps=steps)

    def seen(*found: Finding) -> AlertInput:
        return AlertInput(found, frozenset(), observed=True, situation=trains)

    hang = seen(at(HANG, MINUTE))
    state = hang.of(AlertState(), POLICY, NOON + seen_at * MINUTE)
    (alert,) = seen().of(state, POLICY, NOON + 6 * MINUTE).alerts
    assert alert.end == NOON + ends * MINUTE


LOST = finding(
    "node-lost", WARNING, "7_1", title="job 7_1 has lost n03", identity=("n03",), fix="tr11 logs"
)


def test_of_two_faults_that_overlap_each_has_its_own_time_job_and_cost() -> None:
    """The loss is over as the next task trains; that hangs, and the first all-clear waits for it."""
    steps = course((-5, 1, "7_1"), (3, 5, "7_2"), (20, 25, "7_3"))
    asked: list[tuple[float, ...]] = []

    def since(*moments: float) -> Spell:
        asked.append(tuple(moment - NOON for moment in moments))
        return Spell(0, 2.4, 2.3, 48.0, 0.75, 64.0, 16.0)

    looks, told = Looks(), list[Message]()
    hang = replace(HANG, subject="7_2")
    for minute in range(1, 26):
        found = []
        if minute < 5:
            found.append(at(LOST, MINUTE))
        if 5 < minute < 21:
            found.append(at(hang, 5 * MINUTE))
        condition = TRAINS if minute > 20 else ENDED
        seen = tuple(step for step in steps if (step.time or 0.0) <= looks.now + MINUTE)
        trained = looks.now + MINUTE - (seen[-1].time or 0.0)
        told += looks.see(*found, condition=condition, trained=trained, steps=seen, since=since)
    first, second = (message for message in told if message.kind == "cleared")
    hangs, lost = sorted((first, second), key=lambda message: "7_1" in message.subject)
    said = flat(lost)
    assert "It lasted 4 min, from 2022-05-02 12:01 UTC to 2022-05-02 12:05 UTC" in said
    assert "went on at 2022-05-02 12:03 UTC: job 7_2, from step 236; now it is job 7_3" in said
    assert "lost from 2022-05-02 12:01 UTC to 2022-05-02 12:03 UTC" in said
    said = flat(hangs)
    assert "Training goes on since 2022-05-02 12:20 UTC: job 7_3, from step 248." in said
    assert "lost from 2022-05-02 12:05 UTC to 2022-05-02 12:20 UTC" in said
    assert {(60.0, 180.0), (300.0, 1200.0)} <= set(asked)


def test_a_loss_that_goes_on_as_the_end_of_its_job_lasts_from_its_first_sign() -> None:
    looks = Looks()
    looks.see(at(LOST, MINUTE), condition=ENDED)
    end = finding(
        "unfinished-end", WARNING, "7_1", title="attempt 7_1 failed: n03 was lost", fault="node",
        identity=("node", "node n03"),
    )  # fmt: skip
    looks.see(at(end, 8 * MINUTE), condition=ENDED, after=8 * MINUTE)
    remark = replace(end, severity=INFO)
    (over,) = looks.see_again(3, remark, **WELL)
    assert "It lasted 9 min, from 2022-05-02 12:01 UTC to 2022-05-02 12:10 UTC" in flat(over)


@pytest.mark.parametrize(
    ("excluded", "words"),
    [
        (None, "n03 is down+not_responding. The attempt can lose 1 more node."),
        ({}, "n03 is down+not_responding, and not excluded. The attempt can"),
        (
            {"n03": Exclusion("n03", owner="tr11")},
            "n03 is down+not_responding, and excluded by tr11.",
        ),
    ],
)
def test_the_all_clear_of_a_lost_node_says_how_it_is_now_and_what_may_still_be_lost(
    excluded: dict[str, Exclusion] | None, words: str
) -> None:
    nodes = (
        Node("n03", frozenset({"down", "not_responding"})),
        Node("n3", frozenset({"idle"})),
        Node("n04", frozenset({"idle"})),
    )
    looks = Looks()
    looks.see(LOST, condition=ENDED)
    facts = {"nodes": nodes, "excluded": excluded, "spares": "the attempt can lose 1 more node"}
    (over,) = looks.see_again(2, **WELL, **facts)
    assert words in flat(over) and "n04" not in over.body
    # it is down still: that is not over
    assert over.subject == "[OK] small: nothing waits for n03 any more: job 7_1 has lost n03"
    assert flat(over).startswith("Nothing waits for n03 any more: job 7_1 has lost n03. It lasted")
    looks.see(DISK, **WELL, **facts)
    told = looks.see_again(2, **WELL, **facts)
    assert "can lose" not in told[0].body, "a full disk is no node's"


# ----------------------------------------------------------------------------- what comes back
def test_a_critical_fault_that_comes_back_is_a_new_incident_and_is_said_at_once() -> None:
    looks = Looks()
    looks.see(at(BAD, MINUTE), condition=ENDED)
    told = looks.see_again(2, **WELL)
    assert [message.kind for message in told] == ["cleared"]
    # the first of them ended long ago
    two = replace(BAD, title="the last 2 attempts failed", subject="67_2")
    (message,) = looks.see(at(two, MINUTE), condition=ENDED)
    assert (message.kind, message.severity) == ("reopened", CRITICAL)
    said = flat(message)
    assert "The last 2 attempts failed. This began at 2022-05-02 12:04 UTC, just now." in said
    assert "This came back 1 min after its all-clear." in flat(message)
    looks.see(at(two, MINUTE), condition=ENDED)
    first, second = looks.state.incidents()
    assert (first.lasted_from, first.lasted_to) == (NOON + MINUTE, NOON + 2 * MINUTE)
    assert (second.lasted_from, second.lasted_to) == (NOON + 4 * MINUTE, None)
    assert looks.state.open_alerts[0].start == NOON + 4 * MINUTE, "as people were told"
    assert second.fingerprint == first.fingerprint
    assert "it is back" in looks.state.events[-1].why


def test_an_attempt_that_ended_after_the_all_clear_of_another_is_an_incident_of_its_own() -> None:
    """Also by the same fault, a sample further on: nothing has come back, and all hear when it is
    over.
    """
    looks = Looks()
    looks.see(at(BAD, MINUTE), condition=ENDED)
    looks.see_again(2, **WELL)
    after = at(replace(BAD, subject="67_4", title="attempt 67_4 failed"), 9 * MINUTE)
    (message,) = looks.see(after, condition=ENDED, after=9 * MINUTE)
    assert message.kind == "opened" and "came back" not in flat(message)
    (over,) = looks.see_again(2, **WELL)
    assert over.subject == "[OK] small: over: attempt 67_4 failed"
    assert len(looks.state.incidents()) == 2


def test_what_called_someone_is_over_at_once_though_it_was_milder_at_the_end() -> None:
    looks = Looks()
    full = replace(DISK, severity=CRITICAL)
    looks.see(DISK, **WELL)
    looks.see_again(2, **WELL)
    (back,) = looks.see(DISK, **WELL)
    (worse,) = looks.see(full, **WELL)
    assert [back.kind, worse.kind] == ["reopened", "raised"]
    looks.see_again(2, DISK, **WELL)
    (over,) = looks.see_again(2, **WELL)
    assert over.kind == "cleared"


def test_a_fault_that_a_later_attempt_meets_again_calls_again_who_took_it_on() -> None:
    """Even where one look alone saw the later attempt train."""
    looks = Looks()
    looks.see(BAD, condition=ENDED)
    looks.person(AlertChange(ACKNOWLEDGED, "ana"))
    trains = replace(BAD, severity=INFO, is_to_be_passed=True)
    assert looks.see(trains, **WELL) == []
    assert [alert.severity for alert in looks.state.open_alerts] == [WARNING]
    (message,) = looks.see(
        replace(BAD, title="the last 2 attempts failed", subject="67_2"), condition=ENDED
    )
    assert (message.kind, message.severity) == ("raised", CRITICAL)
    assert [looks.see(trains, **WELL) for _ in range(5)] == [[]] * 5, "no all-clear yet"
    told = [looks.see(**WELL) for _ in range(2)]
    assert [[message.kind for message in messages] for messages in told] == [[], ["cleared"]]


def test_a_critical_fault_that_flaps_is_said_to_be_back_once_in_ten_minutes() -> None:
    looks = Looks()
    kinds: list[tuple[int, str]] = []
    for minute in range(1, 31):
        ill = minute % 3 == 1  # one look in three sees it
        found = (HANG,) if ill else ()
        messages = looks.see(
            *found, condition=ENDED if ill else TRAINS, trained=None if ill else 1.0
        )
        kinds += [(minute, message.kind) for message in messages]
    back = [minute for minute, kind in kinds if kind == "reopened"]
    assert [kind for _, kind in kinds] == [
        "opened",
        "cleared",
        *["reopened", "cleared"] * len(back),
    ]
    assert back == [4, 16, 28]


def test_a_warning_that_comes_back_after_its_all_clear_is_said_once() -> None:
    """Also where it is gone again before the hour is over: `[OK]` said that there was nothing."""
    looks = Looks()
    (first,) = looks.see(DISK, **WELL)
    over = looks.see_again(2, **WELL)
    (again,) = looks.see(DISK, **WELL)
    assert [one.kind for one in over] == ["cleared"]
    assert (again.kind, again.severity, again.thread) == ("reopened", WARNING, first.message_id)
    assert "This came back 1 min after its all-clear." in flat(again)
    assert looks.see(DISK, **WELL) == []
    assert len(looks.state.incidents()) == 1


def test_a_warning_that_comes_and_goes_is_back_once_and_over_when_an_hour_was_free_of_it() -> None:
    looks, told = Looks(), list[Message]()
    for minute in range(240):  # three minutes in every twelve, for three hours
        found = [DISK] * (minute < 180 and minute % 12 < 3)
        told += looks.see(*found, **WELL)
    first, cleared, back, over = told
    assert [one.kind for one in (first, cleared, back, over)] == [
        "opened", "cleared", "reopened", "cleared",
    ]  # fmt: skip
    assert back.time == NOON + 13 * MINUTE and over.time == NOON + 233 * MINUTE
    said = flat(over)
    assert "It came and went from 2022-05-02 12:13 UTC to 2022-05-02 14:52 UTC" in said
    assert "came and went" not in flat(cleared)


def test_a_warning_that_came_back_and_stood_for_long_is_over_at_once() -> None:
    looks, told = Looks(), list[Message]()
    for minute in range(90):
        found = [DISK] * (minute not in {1, 2, 3, 88, 89})
        told += looks.see(*found, **WELL)
    assert [one.kind for one in told] == ["opened", "cleared", "reopened", "cleared"]


def test_a_person_who_says_that_it_is_over_is_not_kept_waiting() -> None:
    looks = Looks()
    looks.see(HANG, condition=ENDED)
    looks.person(AlertChange(RESOLVED, "ana", "false alarm"))
    (message,) = looks.see(condition=UNSEEN)
    assert message.kind == "replaced"
    assert "(ana: false alarm)" in flat(message)


def test_what_comes_back_before_its_all_clear_calls_again_who_took_it_on() -> None:
    looks = Looks()
    looks.see(HANG, condition=ENDED)
    looks.person(AlertChange(ACKNOWLEDGED, "ana"))
    assert [looks.see(condition=STARTS) for _ in range(2)] == [[], []]
    (message,) = looks.see(HANG, condition=ENDED)
    assert message.kind == "again"


def test_a_finished_run_says_so_once_and_again_when_more_was_trained() -> None:
    looks = Looks()
    looks.see(**WELL)
    assert looks.news == []
    for condition in (FINISHED, FINISHED, UNSEEN, QUEUED, FINISHED):
        looks.see(condition=condition, trained=30.0)
    (message,) = looks.news
    assert message.subject == "[DONE] small: the training is finished"
    assert "FINISHED: all 100 iterations are trained. Nothing has to be typed:" in flat(message)
    assert "cd /home/ana tr11 report --run tr11.toml" in flat(message)
    looks.see(**WELL)  # the card wants more now
    looks.see(condition=FINISHED, trained=1.0)
    assert len(looks.news) == 2


def test_a_run_that_finished_long_ago_is_no_news_to_a_watchdog_that_is_new() -> None:
    looks = Looks()
    looks.see(condition=FINISHED, trained=40 * 86400.0)
    assert looks.news == []
    assert looks.state.finished is not None


# ----------------------------------------------------------------------------- from when to when
def test_a_hang_lasts_from_its_last_sign_of_life_to_the_first_look_that_is_free_of_it() -> None:
    looks = Looks()
    looks.now += 20 * MINUTE
    (first,) = looks.see(at(HANG, 4 * MINUTE), condition=ENDED)
    assert "Job 1007 hangs. This began at 2022-05-02 12:04 UTC, 17 min ago." in flat(first)
    looks.see(condition=QUEUED, after=10 * MINUTE)
    (over,) = looks.see(condition=QUEUED, after=10 * MINUTE)
    assert "It lasted 27 min, from 2022-05-02 12:04 UTC to 2022-05-02 12:31 UTC" in flat(over)
    (incident,) = looks.state.incidents()
    assert (incident.lasted_from, incident.opened) == (NOON + 4 * MINUTE, NOON + 21 * MINUTE)
    assert incident.lasted_to == NOON + 31 * MINUTE


def test_an_iteration_proves_in_one_look_that_a_training_stands_still_no_more() -> None:
    for fault, counts in ((HANG, [1, 0]), (DOWN, [1, 0]), (SLOW, [0, 1])):
        looks = Looks()
        looks.see(fault, condition=ENDED)
        told = [looks.see(**WELL) for _ in range(2)]
        assert [len(one) for one in told] == counts, fault.detector


def test_a_hang_that_recovers_by_itself_has_an_all_clear_and_no_second_alarm() -> None:
    """Its ranks show life again and have finished no iteration yet, which is a stall for a moment."""
    stall = finding(
        "stalled",
        title="job 1007: no iteration after 8",
        fix="tr11 kill --wait",
        patience=5 * MINUTE,
    )
    looks = Looks()
    (first,) = looks.see(at(HANG, 0.0), condition=ENDED)
    told = looks.see_again(3, at(stall, 0.0), condition=ENDED)
    assert told == []
    (over,) = looks.see(**WELL)
    assert (over.kind, over.thread) == ("cleared", first.message_id)
    assert "job 1007 hangs" in over.subject
    looks.see(at(HANG, 0.0), condition=ENDED, after=HOUR * 2)
    (again,) = looks.see_again(8, at(stall, 0.0), condition=ENDED)
    assert "no iteration after 8" in again.subject, "it has had the time of an iteration, and more"


def test_what_comes_back_is_dated_from_when_it_came_back() -> None:
    """Two attempts that ended badly: the first alert's hour is not that of the second."""
    looks = Looks()
    bad = finding(
        "unfinished-end",
        WARNING,
        "20_1",
        title="attempt 20_1 ended by an error",
        identity=("sigsegv",),
    )
    looks.see(at(bad, 0.0), condition=ENDED)
    looks.see_again(2, **WELL)
    two = replace(bad, severity=CRITICAL, subject="20_2", title="the last 2 attempts did not end")
    (message,) = looks.see(at(two, 9 * MINUTE), condition=ENDED, after=20 * MINUTE)
    assert message.kind == "opened"
    said = flat(message)
    assert (
        "The last 2 attempts did not end. This began at 2022-05-02 12:09 UTC, 14 min ago." in said
    )


def test_a_record_of_an_older_tr11_has_the_looks_alone() -> None:
    incident = Incident("f", "hung", "", CRITICAL, "t", NOON, NOON + 1, "", NOON + 2)
    assert (incident.lasted_from, incident.lasted_to) == (NOON, NOON + 2)
    looks = Looks()
    looks.see(HANG, condition=ENDED)
    old = looks.state.open_alerts[0]
    assert replace(old, since=None).start == old.began
    assert replace(old, resolved_at=NOON + 5).end == NOON + 5
