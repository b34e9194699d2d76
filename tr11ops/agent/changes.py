"""What an attempt has otherwise than the one before it: card, versions, code, nodes.

Told in its log, kept in its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tr11ops.launch.directory_checks import short
from tr11ops.observe.files import read_details
from tr11ops.runcard.differences import differences
from tr11ops.rundir.software import CodeIdentity, code_of, versions_of
from trainer.contract.paths import RunPaths

MOST_LINES = 20


def changes_since_last(paths: RunPaths, job_id: str, record: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """Lines of the attempt `job_id`, whose record and resolved card these are; empty when it is the first."""
    before = _last(paths, job_id)
    if before is None:
        return []
    name, then = before
    old_card = read_details(paths.attempt(name) / "card.json")
    lines = [*_records(then, record)]
    if old_card:
        lines += (f"card {text}" for text in differences(_compared(old_card), _compared(card)))
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more"]
    return [f"since attempt {name}: {line}" for line in lines]


def _last(paths: RunPaths, job_id: str) -> tuple[str, dict[str, Any]] | None:
    """The attempt that began last before this one, and its record."""
    try:
        names = [entry.name for entry in paths.attempts.iterdir() if entry.name != job_id]
    except OSError:
        return None
    found = []
    for name in names:
        record = read_details(paths.attempt(name) / "attempt.json")
        if isinstance(record.get("start"), int | float):
            found.append((record["start"], name, record))
    return max(found, key=lambda entry: entry[:2])[1:] if found else None


def _records(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = ({str(node) for node in record.get("nodes") or ()} for record in (then, now))
    if old != new:
        added, gone = sorted(new - old), sorted(old - new)
        parts = [f"with {short(added)}" if added else "", f"without {short(gone)}" if gone else ""]
        yield f"nodes: {', '.join(filter(None, parts))}"
    before, after = versions_of(then), versions_of(now)
    both = before.keys() & after.keys()  # what an older tr11 did not record is not known to be another
    for text in differences({name: before[name] for name in both}, {name: after[name] for name in both}):
        yield f"version of {text}"
    yield from _codes(code_of(then), code_of(now))


def _codes(then: CodeIdentity | None, now: CodeIdentity | None) -> Iterator[str]:
    """Another commit, or other changes to it; `code.diff` of both attempts holds them."""
    if then is None or now is None or str(then) == str(now):
        return
    patch = f"; see {now.patch}" if now.patch else ""
    yield f"code: {then} -> {now}{patch}"


def _compared(card: Mapping[str, Any]) -> dict[str, Any]:
    """What people set: an exit time is derived again from what is left of each allocation."""
    kept = {key: value for key, value in card.items() if key != "derived"}
    run = kept.get("run")
    if isinstance(run, Mapping):
        kept["run"] = {key: value for key, value in run.items() if key != "exit_duration_minutes"}
    return kept
