"""How far each writer's journal had come at the watchdog's last pass: who empties or cuts one is
noticed by it.

    state/journal-heads.json    the newest entry of each writer of the last day

A day's budgets are counted in the journal. Where an entry that was there is gone, they are not
known for a day.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tr11ops.base.observed import replace_json
from tr11ops.base.units import timestamp
from tr11ops.rundir.action_log import DAY_SECONDS
from tr11ops.rundir.journal import Ledger
from trainer.contract.documents import record_of
from trainer.contract.paths import RunPaths
from trainer.contract.record import Finite, Record
from trainer.contract.state_file import read_json

SCHEMA = 1


class JournalHead(Record):
    """The newest entry that was seen of a writer's journal. `time`: seconds since the epoch."""

    writer: str
    sequence: int
    hash: str
    time: Finite


def heads_file(paths: RunPaths) -> Path:
    return paths.state / "journal-heads.json"


def read_heads(paths: RunPaths) -> tuple[JournalHead, ...]:
    """Those of the last pass; none where there was none. Raises OSError and ValueError."""
    value = read_json(heads_file(paths)) or {}
    try:
        return tuple(
            record_of(JournalHead, {**head, "writer": writer})
            for writer, head in dict(value.get("heads") or {}).items()
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{heads_file(paths)} does not say how far the journals had come: {error}"
        ) from None


def write_heads(paths: RunPaths, heads: Iterable[JournalHead]) -> None:
    """Raises OSError."""
    shown = {
        head.writer: {"sequence": head.sequence, "hash": head.hash, "time": head.time}
        for head in heads
    }
    replace_json(heads_file(paths), {"schema": SCHEMA, "heads": shown}, SCHEMA)


def lost_heads(heads: Iterable[JournalHead], ledger: Ledger, now: float) -> tuple[JournalHead, ...]:
    """Entries of the last day that a pass has seen, and that the journal does not hold any more.
    Pure.
    """
    held = {(entry.writer, entry.sequence, entry.hash) for entry in ledger.entries}
    recent = (head for head in heads if abs(now - head.time) < DAY_SECONDS)
    return tuple(head for head in recent if (head.writer, head.sequence, head.hash) not in held)


def next_heads(heads: Iterable[JournalHead], ledger: Ledger, now: float) -> tuple[JournalHead, ...]:
    """What the next pass must find: the newest entry of each writer, and what is lost, until it is
    a day old. Pure.
    """
    newest: dict[str, JournalHead] = {}
    for entry in ledger.entries:
        if abs(now - entry.time) < DAY_SECONDS:
            newest[entry.writer] = JournalHead(entry.writer, entry.sequence, entry.hash, entry.time)
    lost = {head.writer: head for head in lost_heads(heads, ledger, now)}
    return tuple({**newest, **lost}.values())


def words_of(lost: tuple[JournalHead, ...]) -> str:
    """In words, "" where nothing is lost."""
    if not lost:
        return ""
    first = lost[0]
    return (
        f"journal/{first.writer}.jsonl lacks what it held of {timestamp(first.time, None)}: it was emptied or cut,"
        " so what the watchdog did in the last day is not known"
    )
