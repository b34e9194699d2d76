"""The journal folded into budgets, incidents and unfinished work: whatever order, crash or later
version wrote it.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.rundir.action_log import (
    DAY_SECONDS,
    INTENT,
    OUTCOME,
    ActionRecord,
    ProgressRecord,
    Result,
    intent_data,
    outcome_data,
    replay,
)
from tr11ops.rundir.journal import JournalEntry, JournalFault, Ledger

NOW = 1_700_000_000.0
DEEDS = st.builds(
    ActionRecord,
    number=st.uuids().map(str),
    action=st.sampled_from(["resubmit", "exclude", "cancel", "hold"]),
    subject=st.sampled_from(["1-3", "n01", "n02", "1234"]),
    incident=st.sampled_from(["a", "b"]),
    time=st.floats(NOW - 3 * DAY_SECONDS, NOW + DAY_SECONDS),
    tag=st.just(""),
    progress=st.builds(ProgressRecord, st.integers(-1, 5), st.integers(-1, 5)),
    owes=st.integers(0, 4),
    result=st.sampled_from(list(Result)),
)


def entry(kind: str, time: float, data: dict[str, Any]) -> JournalEntry:
    return JournalEntry(time, "host-1", 0, kind, "tr11", "", data)


def entries_of(record: ActionRecord) -> list[JournalEntry]:
    found = [entry(INTENT, record.time, intent_data(record))]
    if record.result is not Result.OPEN:
        found.append(entry(OUTCOME, record.time + 1, outcome_data(record, record.result, "")))
    return found


@given(st.lists(DEEDS, max_size=12, unique_by=lambda record: record.number), st.randoms())
def test_whatever_the_order_the_actions_come_back(
    records: list[ActionRecord], dice: random.Random
) -> None:
    entries = [one for record in records for one in entries_of(record)]
    dice.shuffle(entries)
    past = replay(Ledger(tuple(entries), ()))
    assert set(past.records) == set(records) and not past.read_error
    for action in ("resubmit", "cancel"):
        counted = sum(
            record.action == action
            and record.result != "refused"
            and record.time > NOW - DAY_SECONDS
            for record in records
        )
        assert past.spent(action, NOW) == counted
    assert {record.number for record in past.unfinished} == {
        record.number for record in records if record.result in {Result.OPEN, Result.UNKNOWN}
    }


@given(st.lists(DEEDS, min_size=1, max_size=8, unique_by=lambda record: record.number))
def test_a_kill_after_any_entry_never_frees_a_budget(records: list[ActionRecord]) -> None:
    """What is cut off the end is at most outcomes: an intent counts from the moment at which it is
    on disk.
    """
    entries = [one for record in records for one in entries_of(replace(record, result=Result.DONE))]
    before = [0, 0]
    for length in range(1, len(entries) + 1):
        past = replay(Ledger(tuple(entries[:length]), ()))
        now = [past.spent("resubmit", NOW), past.spent("cancel", NOW)]
        assert all(new >= old for new, old in zip(now, before, strict=True))
        before = now


def test_controllers_spend_one_budget_and_a_node_counts_once() -> None:
    def excluded(node: str, owner: str, age: float) -> JournalEntry:
        return entry("node-excluded", NOW - age, {"node": node, "owner": owner})

    record = ActionRecord("1", "exclude", "n01", "x", NOW - 60, result=Result.DONE)
    ledger = Ledger(
        (
            excluded("n01", "tr11", 50), excluded("n02", "tr11", 100), excluded("n03", "ana", 100),
            excluded("n04", "tr11", 2 * DAY_SECONDS), *entries_of(record),
        ),
        (),
    )  # fmt: skip
    # n01 by an action and its own entry, n02 by a controller
    assert replay(ledger).spent("exclude", NOW) == 2


def test_a_later_word_replaces_unknown_and_not_the_reverse() -> None:
    record = ActionRecord("1", "resubmit", "1-3", "resubmit", NOW)
    unknown = entry(OUTCOME, NOW + 9, outcome_data(record, Result.UNKNOWN, "lost"))
    done = entry(OUTCOME, NOW + 5, outcome_data(record, Result.DONE, "job 7"))
    for order in ((unknown, done), (done, unknown)):
        (found,) = replay(Ledger((*entries_of(record), *order), ())).records
        assert (found.result, found.message) == (Result.DONE, "job 7")
    later = entry(OUTCOME, NOW, {**outcome_data(record, Result.DONE, ""), "result": "postponed"})
    assert replay(Ledger((*entries_of(record), later), ())).records[0].is_unfinished


def test_what_was_cancelled_to_return_is_owed_until_submitted() -> None:
    cancel = ActionRecord("1", "cancel", "1234", "cancel:1234", NOW, owes=3, result=Result.DONE)
    again = ActionRecord("2", "resubmit", "1-3", "resubmit", NOW + 1, result=Result.DONE)
    past = replay(Ledger(tuple(entries_of(cancel)), ()))
    assert (past.owed(0.0), past.owed(NOW + 5)) == (3, 0)
    assert replay(Ledger((*entries_of(cancel), *entries_of(again)), ())).owed(0.0) == 0
    refused = replace(again, result=Result.REFUSED)
    assert replay(Ledger((*entries_of(cancel), *entries_of(refused)), ())).owed(0.0) == 3


def test_a_tampered_or_unreadable_journal_is_a_doubt_a_torn_not() -> None:
    assert replay(Ledger((), (JournalFault("f", 3, "torn", "cut"),))).read_error == ""
    for kind in ("broken", "unreadable"):
        assert (
            "journal f line 3" in replay(Ledger((), (JournalFault("f", 3, kind, "oh"),))).read_error
        )


def test_entries_with_nothing_in_them_are_survived() -> None:
    past = replay(
        Ledger((entry(INTENT, NOW, {}), entry(OUTCOME, NOW, {}), entry("other", NOW, {})), ())
    )
    assert [record.action for record in past.records] == [""] and past.spent("resubmit", NOW) == 0
