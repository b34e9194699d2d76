"""What tr11 did by itself, folded from the journal: budgets spent, incidents treated, and what was
left half done.

An action leaves two entries: its intent before the effect, and its outcome after. An intent without
outcome is what a killed process leaves; anyone who comes next looks what became of it (`settle` in
tr11ops/watchdog/apply.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, EXCLUDED
from tr11ops.rundir.journal import JournalEntry, Ledger
from trainer.contract.record import JsonObject, Record

INTENT, OUTCOME = "act-intent", "act-outcome"  # kinds of journal entries
DAY_SECONDS = 86400.0
LETS_IT_ACT = "`watch.act`, `pulse --act`"  # without one of them the watchdog only tells
KEPT_SECONDS = 7 * DAY_SECONDS  # how far back an incident is remembered


class Result(StrEnum):
    """What became of an action. UNKNOWN: the answer was lost, the effect may have come or may come
    yet.
    """

    OPEN = ""  # no outcome was written
    DONE = "done"
    REFUSED = "refused"  # nothing was changed
    UNKNOWN = "unknown"


class ProgressRecord(Record):
    """How far the training had come: last iteration and newest sound checkpoint, -1 where there is
    none.
    """

    iteration: int = -1
    checkpoint: int = -1

    def is_beyond(self, other: ProgressRecord) -> bool:
        return self.iteration > other.iteration or self.checkpoint > other.checkpoint


class ActionRecord(Record):
    """One action that was begun. `number` names it in the journal, `incident` is the trouble that
    it was to end.

    `tag` is that of a submission, `owes` how many attempts must be launched again for what a
    cancellation took away. Times are seconds since the epoch.
    """

    number: str
    action: str
    subject: str
    incident: str
    time: float
    tag: str = ""
    progress: ProgressRecord = ProgressRecord()
    owes: int = 0
    result: Result = Result.OPEN
    message: str = ""

    @property
    def is_unfinished(self) -> bool:
        return self.result in {Result.OPEN, Result.UNKNOWN}


class ActionHistory(Record):
    """The actions of the last days, oldest first, and the nodes that tr11 excluded by itself (time,
    node).

    `read_error` says why the journal may not tell all; nothing is done then.
    """

    records: tuple[ActionRecord, ...] = ()
    excluded: tuple[tuple[float, str], ...] = ()
    read_error: str = ""

    @property
    def unfinished(self) -> tuple[ActionRecord, ...]:
        return tuple(record for record in self.records if record.is_unfinished)

    def spent(self, action: str, now: float) -> int:
        """How many of a day's budget are gone. What was refused cost nothing; a time in the future
        counts as now.
        """
        records = [
            record
            for record in self.records
            if record.action == action and record.result is not Result.REFUSED
        ]
        recent = {record.number for record in records if record.time > now - DAY_SECONDS}
        if action != "exclude":
            return len(recent)
        nodes = {record.subject for record in records if record.number in recent}
        return len(nodes | {node for time, node in self.excluded if time > now - DAY_SECONDS})

    def owed(self, launched: float) -> int:
        """Attempts that were cancelled to be launched again, and were not: nothing was submitted
        since (`launched`).
        """
        resubmitted = [
            record.time
            for record in self.records
            if record.action == "resubmit" and record.result is Result.DONE
        ]
        since = max([launched, *resubmitted])
        return sum(
            record.owes
            for record in self.records
            if record.result is Result.DONE and record.time > since
        )

    def count(self, incidents: str) -> int:
        """How many actions were done against incidents whose names begin so."""
        return sum(
            record.result is Result.DONE and record.incident.startswith(incidents)
            for record in self.records
        )

    def last(self, incident: str) -> ActionRecord | None:
        """The last deed against an incident that changed something, or may have."""
        found = [
            record
            for record in self.records
            if record.incident == incident and record.result is not Result.REFUSED
        ]
        return max(found, key=lambda record: record.time, default=None)


def replay(ledger: Ledger) -> ActionHistory:
    """The state that the entries tell of, in whatever order they were written."""
    records: dict[str, ActionRecord] = {}
    outcomes: dict[str, tuple[float, Result, str]] = {}
    excluded: list[tuple[float, str]] = []
    for entry in ledger.entries:
        if entry.kind == INTENT:
            record = _record(entry)
            records.setdefault(record.number, record)
        elif entry.kind == OUTCOME:
            outcome = (entry.time, _result(entry.data), str(entry.data.get("message", "")))
            number = str(entry.data.get("number", ""))
            outcomes[number] = max(outcomes.get(number, outcome), outcome, key=_weight)
        elif entry.kind == EXCLUDED and entry.data.get("owner") == AUTOMATIC_OWNER:
            excluded.append((entry.time, str(entry.data.get("node", ""))))
    told = []
    for number, record in records.items():
        _, result, message = outcomes.get(number, (0.0, Result.OPEN, ""))
        told.append(replace(record, result=result, message=message))
    wrong = next((str(fault) for fault in ledger.faults if fault.kind != "torn"), "")
    return ActionHistory(
        tuple(sorted(told, key=lambda record: record.time)), tuple(excluded), wrong
    )


def _weight(outcome: tuple[float, Result, str]) -> tuple[int, float]:
    """Of two outcomes the later one holds, but "unknown" gives way to any other."""
    return (outcome[1] is not Result.UNKNOWN, outcome[0])


def intent_data(record: ActionRecord) -> JsonObject:
    """What an intent's entry holds."""
    return {
        "number": record.number,
        "action": record.action,
        "subject": record.subject,
        "incident": record.incident,
        "tag": record.tag,
        "owes": record.owes,
        "iteration": record.progress.iteration,
        "checkpoint": record.progress.checkpoint,
    }


def outcome_data(record: ActionRecord, result: Result, message: str) -> JsonObject:
    """What an outcome's entry holds."""
    return {
        "number": record.number,
        "action": record.action,
        "subject": record.subject,
        "result": result.value,
        "message": message,
    }


def _record(entry: JournalEntry) -> ActionRecord:
    data = entry.data
    return ActionRecord(
        number=str(data.get("number") or f"{entry.writer}:{entry.sequence}"),
        action=str(data.get("action", "")),
        subject=str(data.get("subject", "")),
        incident=str(data.get("incident", "")),
        time=float(entry.time),
        tag=str(data.get("tag", "")),
        progress=ProgressRecord(_integer(data, "iteration"), _integer(data, "checkpoint")),
        owes=max(0, _integer(data, "owes")),
    )


def _result(data: Mapping[str, Any]) -> Result:
    try:
        return Result(str(data.get("result", "")))
    except ValueError:  # written by a later version: it says that something was decided, not what
        return Result.UNKNOWN


def _integer(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if isinstance(value, int):
        return value
    return -1
