"""The journal's entries as sentences: what people and tr11 did. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from tr11ops.rundir.action_log import INTENT, OUTCOME
from tr11ops.rundir.exclusion import kept_off
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, CHECKED, EXCLUDED, INCLUDED
from tr11ops.rundir.journal import JournalEntry
from trainer.contract.record import Record

Data = Mapping[str, Any]

# What the attempts, alerts and copies of a hand-over or a report say already, or what says nothing
# to a person.
SILENT = frozenset(
    {
        "alert-opened",
        "alert-sent",
        "alert-resolved",
        "handover",
        "launch",
        "launch-failed",
        INTENT,
        "backup-began",
        "reread",
        "sync",
        "checkpoint-removed",
        "rollback-done",
        "served-act",  # the command that the page typed is on record itself
    }
)
NODES = frozenset({EXCLUDED, INCLUDED, CHECKED})


def _names(data: Data, key: str) -> str:
    value = data.get(key)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value or "")


def _alert(data: Data) -> str:
    return str(data.get("title") or data.get("detector") or "an alert")


def _copy(data: Data) -> str:
    if data.get("step") is None:
        step = "a copy"
    else:
        step = f"the copy of step {data.get('step')}"
    return f"{step} in the {data.get('archive')}"


def _stop_drill(data: Data) -> str:
    why = f" ({data['why']})" if data.get("why") else ""
    return f"drilled a stop in order: {data.get('result')}{why}"


def _rollback(data: Data) -> str:
    if data.get("action") == "undo":
        return f"undid the roll-back: step {data.get('to')} is resumed from"
    skipped = ""
    if data.get("skip"):
        skipped = f", iterations {data.get('skip')} skipped"
    return f"rolled back to step {data.get('to')}{skipped}"


SENTENCES: Mapping[str, Callable[[Data], str]] = {
    "submitted": lambda data: f"submitted job {data.get('job_id')}",
    "launch-refused": lambda _: "tried to launch, and was refused",
    "launch-unknown": lambda _: "tried to launch; the scheduler's answer was lost",
    "submission-settled": lambda data: (
        f"a submission in doubt was settled: job {data.get('job_id') or 'none'}"
    ),
    "kill-switch-set": lambda _: "set the kill switch",
    "kill-switch-released": lambda _: "released the kill switch",
    "pause": lambda _: "paused the run after its task",
    "resumed": lambda _: "let the run go on",
    "held": lambda data: f"held job {_names(data, 'jobs')}",
    "array-held": lambda data: f"held the queued jobs: job {_names(data, 'jobs')}",
    "older-checkpoint": lambda data: (
        f"let the training go on from the checkpoint of step {data.get('step')}"
    ),
    "stop-fallback": lambda data: f"cancelled job {data.get('job')}, which did not stop",
    "checkpoint-now": lambda _: "asked for a checkpoint",
    "profile": lambda _: "asked for a profile",
    "compute-check": lambda _: "asked for a check of the arithmetic",
    "repaired": lambda data: f"repaired the chain: {data.get('action')} job {data.get('job_id')}",
    "replaced": lambda data: (
        f"gave the queue a new card: job {data.get('job_id')} -> {_names(data, 'submitted')}"
    ),
    "alert-acknowledged": lambda data: f"acknowledged: {_alert(data)}",
    "alert-assigned": lambda data: f"assigned to {data.get('owner') or 'someone'}: {_alert(data)}",
    "alert-snoozed": lambda data: f"snoozed: {_alert(data)}",
    "alert-acknowledgement-expired": lambda data: f"unassigned again: {_alert(data)}",
    "shift-taken": lambda data: f"put {_names(data, 'on_call')} on call",
    "shift-ended": lambda data: f"gave the shift of {_names(data, 'before')} back to the rota",
    "cron-installed": lambda data: f"installed the periodic jobs ({data.get('way')})",
    "cron-removed": lambda data: f"removed the periodic jobs ({data.get('way')})",
    "backup-submitted": lambda data: f"queued a backup: job {data.get('job')}",
    "backup-copied": lambda data: f"copies made and read back in the {data.get('archive')}",
    "backup-failed": lambda data: f"{_copy(data)} failed",
    "backup-damaged": lambda data: f"{_copy(data)} was found damaged",
    "backup-sound": lambda data: f"{_copy(data)} is sound again",
    "backup-drill": lambda data: (
        f"restore drill of step {data.get('step')} {'passed' if data.get('passed') else 'FAILED'}"
    ),
    "stop-drill": _stop_drill,
    "restored": lambda data: f"restored step {data.get('step')} from the {data.get('archive')}",
    "upload": lambda data: f"published step {data.get('step')}",
    "checkpoint-pinned": lambda data: f"pinned checkpoint {data.get('step')}",
    "checkpoint-unpinned": lambda data: f"unpinned checkpoint {data.get('step')}",
    "checkpoints-prune": lambda _: "pruned checkpoints",
    "rollback": _rollback,
    "rollback-withdrawn": lambda _: "withdrew the roll-back, because a training had started",
    EXCLUDED: lambda data: f"{data.get('node')} {kept_off(data.get('state'))}",
    INCLUDED: lambda data: f"{data.get('node')} may be used again",
    CHECKED: lambda data: f"{data.get('node')} checked: {data.get('result')}",
    OUTCOME: lambda data: (
        f"{data.get('action', 'acted')} {data.get('subject', '')}: {data.get('result') or 'begun'}"
    ),
}


class JournalLine(Record):
    """One entry, or several alike in a row (`count`), as a sentence without its subject."""

    time: float
    kind: str
    who: str
    text: str
    why: str
    count: int = 1

    @property
    def is_of_a_node(self) -> bool:
        return self.kind in NODES

    @property
    def is_of_a_person(self) -> bool:
        """Whether a person did it. The watchdog acts under the name of the person who installed it,
        but by itself.
        """
        return self.who not in {"", AUTOMATIC_OWNER} and self.kind != OUTCOME


def lines_of(entries: Iterable[JournalEntry]) -> tuple[JournalLine, ...]:
    """What is worth a line, oldest first. A kind that is not known here is told by its own name."""
    found: list[JournalLine] = []
    seen: set[str] = set()
    for entry in entries:
        if entry.kind in SILENT or _is_repeated(entry, seen):
            continue
        line = JournalLine(
            entry.time, entry.kind, who=entry.who, text=_sentence(entry), why=entry.why
        )
        last = None
        if found:
            last = found[-1]
        if last is not None and replace(last, time=line.time, count=1) == line:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(line)
    return tuple(_counted(line) for line in found)


def _is_repeated(entry: JournalEntry, seen: set[str]) -> bool:
    """An alert's entry that a killed process wrote twice carries the same id."""
    name = None
    if entry.kind.startswith("alert-"):
        name = entry.data.get("event")
    if not isinstance(name, str):
        return False
    if name in seen:
        return True
    seen.add(name)
    return False


def _sentence(entry: JournalEntry) -> str:
    tell = SENTENCES.get(entry.kind)
    if tell is not None:
        return tell(entry.data)
    return entry.kind.replace("-", " ")


def _counted(line: JournalLine) -> JournalLine:
    if line.count == 1:
        return line
    return replace(line, text=f"{line.text} ({line.count} times)")
