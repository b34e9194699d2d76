"""The ledger of nodes that a run must not use: who excluded them, since when, why, and when they are due for a check.

state/exclusions.json    state/exclusions.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tr11ops.base.newer import newer_schema
from tr11ops.base.units import number_in
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusion_limit import ExclusionLimit
from tr11ops.rundir.journal import Journal, Ledger
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

SCHEMA = 1
AUTOMATIC_OWNER = "tr11"  # the owner of what no person asked for
EXCLUDED, INCLUDED, CHECKED = "node-excluded", "node-included", "node-checked"  # kinds of journal entries
VERSIONS_KEPT = 64
MOST_EVIDENCE = 20
LONGEST_EVIDENCE = 500
DAY_SECONDS = 86400.0
_NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,253}"  # text: compiling it takes 3 ms, which no reader needs


class ExclusionError(ValueError):
    """A request that the ledger refuses; the text is one line, fit to be shown."""


class Version(Record):
    """The ledger at one moment. `number` counts changes; 0 is the empty ledger, or a file written by hand.

    `newer`: why this tr11 must not replace it, "" where it may.
    """

    number: int
    exclusions: tuple[Exclusion, ...]
    newer: str = ""

    def find(self, node: str) -> Exclusion | None:
        return next((entry for entry in self.exclusions if entry.node == node), None)


# ----------------------------------------------------------------------------- questions
def due_for_recheck(exclusions: Iterable[Exclusion], now: float) -> tuple[Exclusion, ...]:
    """The exclusions whose time has passed, oldest first. They hold until a check of the node has passed."""
    due = [entry for entry in exclusions if entry.until is not None and entry.until <= now]
    return tuple(sorted(due, key=lambda entry: (entry.until or 0.0, entry.node)))


def check_node_name(node: str) -> None:
    """Raises ExclusionError for a text that cannot be one node's name (blanks, brackets, commas, shell signs)."""
    if not re.fullmatch(_NODE_NAME, node):
        raise ExclusionError(f"node {node[:80]!r}: a node's name is letters, digits, dots, dashes and underscores")


def read_version(path: Path) -> Version:
    """The ledger whose published copy is `path`; empty when there is none.

    Raises OSError when it cannot be read, ValueError when neither the newest version nor the copy is a ledger.
    """
    problem: Exception | None = None
    found: list[Version] = []
    newer = ""
    newest = _newest(path)
    for place in (path,) if newest is None else (newest, path):
        try:
            value = read_json(place)
            newer = newer or newer_schema(place, value, SCHEMA)
            if value is not None:
                found.append(_version(place, value))
        except ValueError as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return replace(max(found, key=lambda version: version.number, default=Version(0, ())), newer=newer)


# ----------------------------------------------------------------------------- changes
def exclude(
    directory: RunDirectory,
    node: str,
    *,
    why: str,
    owner: str,
    evidence: tuple[str, ...] = (),
    days: float | None,
    job_id: str = "",
    limit: ExclusionLimit | None = None,
    forced: bool = False,
) -> bool:
    """Put a node on the ledger, due for a check after `days` (None: never); False when the limit forbids it.

    `forced`: a person wants it whatever the limit says, which is kept in the journal.
    A node that is on it already stays there: the later expiry holds, evidence is added, who was first stays the owner.
    Raises ExclusionError for an impossible name or number, OSError as the file system does.
    """
    check_node_name(node)
    if days is not None and not 0 < days <= 36500:
        raise ExclusionError(f"days = {days:g}: must be above 0 and at most 36500")
    now = time.time()
    until = None if days is None else now + days * DAY_SECONDS
    fresh = Exclusion(node, why, owner, until, _bounded(evidence), now, job_id)

    def change(version: Version) -> tuple[Exclusion, ...] | None:
        old = version.find(node)
        others = tuple(entry for entry in version.exclusions if entry.node != node)
        full = limit is not None and limit.forbids([node], (entry.node for entry in others))
        if old is None and full and not forced:
            return None
        return (*others, fresh if old is None else _renewed(old, fresh))

    done = _commit(directory.exclusions, change)
    if done is None:
        return False
    entry = done.find(node) or fresh
    data = {"node": node, "until": entry.until, "evidence": list(fresh.evidence), "job_id": job_id, "owner": owner}
    data |= {"forced": True} if forced else {}
    _note(directory, EXCLUDED, why, data, owner)
    return True


def include(directory: RunDirectory, node: str, *, why: str, owner: str) -> bool:
    """Take a node off the ledger; False when it is not on it. Raises OSError as the file system does."""

    def change(version: Version) -> tuple[Exclusion, ...] | None:
        if version.find(node) is None:
            return None
        return tuple(entry for entry in version.exclusions if entry.node != node)

    if _commit(directory.exclusions, change) is None:
        return False
    _note(directory, INCLUDED, why, {"node": node, "owner": owner}, owner)
    return True


def record_check(
    directory: RunDirectory, node: str, *, result: str, why: str, owner: str, checks: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Keep the result of a health check of a node (`fine`, `warning`, `bad` or `unknown`) in the journal."""
    _note(directory, CHECKED, why, {"node": node, "result": result, "checks": list(checks)}, owner)


def history(ledger: Ledger, exclusions: Iterable[Exclusion], node: str | None = None) -> tuple[dict[str, Any], ...]:
    """What happened to nodes, oldest first: the journal's entries, and exclusions that never got into it.

    Each is a dict of time, kind, node, who, why and, where known, until, evidence, job_id, result.
    """
    events = [
        {"time": entry.time, "kind": entry.kind, "who": entry.who, "why": entry.why, **entry.data}
        for entry in ledger.entries
        if entry.kind in (EXCLUDED, INCLUDED, CHECKED) and "node" in entry.data
    ]
    for entry in exclusions:
        known = any(
            event["kind"] == EXCLUDED and event["node"] == entry.node and event["time"] >= (entry.since or 0.0)
            for event in events
        )
        if not known:  # the one who excluded it was killed before the journal was written
            events.append(
                {
                    "time": entry.since or 0.0, "kind": EXCLUDED, "who": entry.owner, "why": entry.why,
                    "node": entry.node, "until": entry.until, "evidence": list(entry.evidence),
                    "job_id": entry.job_id, "owner": entry.owner,
                }
            )  # fmt: skip
    return tuple(sorted((event for event in events if node in (None, event["node"])), key=lambda one: one["time"]))


# ----------------------------------------------------------------------------- how
def _renewed(old: Exclusion, fresh: Exclusion) -> Exclusion:
    until = None if old.until is None or fresh.until is None else max(old.until, fresh.until)
    reason = () if fresh.why == old.why else (fresh.why,)
    lines = tuple(dict.fromkeys((*old.evidence, *_bounded(reason), *fresh.evidence)))[-MOST_EVIDENCE:]
    return replace(old, until=until, evidence=lines, job_id=fresh.job_id or old.job_id)


def _bounded(evidence: Iterable[str]) -> tuple[str, ...]:
    return tuple(" ".join(line.split())[:LONGEST_EVIDENCE] for line in evidence)[:MOST_EVIDENCE]


def _versions(path: Path) -> VersionedFile:
    return VersionedFile(path, VERSIONS_KEPT)


def _newest(path: Path) -> Path | None:
    numbers = _versions(path).numbers()
    return _versions(path).file(numbers[-1]) if numbers else None


def _version(path: Path, value: Mapping[str, Any]) -> Version:
    """Raises ValueError when the object is no ledger."""
    try:
        entries = tuple(_exclusion(entry) for entry in value["exclusions"])
        return Version(int(value.get("version", 0)), entries)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a list of exclusions: {error!r}") from None


def _exclusion(entry: Mapping[str, Any]) -> Exclusion:
    lines = entry.get("evidence") or []
    return Exclusion(
        node=str(entry["node"]),
        why=str(entry.get("why") or ""),
        owner=str(entry.get("owner") or ""),
        until=number_in(entry.get("until")),
        evidence=tuple(map(str, lines if isinstance(lines, list) else (lines,))),
        since=number_in(entry.get("since")),
        job_id=str(entry.get("job_id") or ""),
    )


def _commit(path: Path, change: Callable[[Version], tuple[Exclusion, ...] | None]) -> Version | None:
    """Apply `change` to the newest version and publish the result; None when `change` returns None.

    Raises OSError as the file system does, TimeoutError when others were always faster, ExclusionError where a newer
    tr11 has written it.
    """
    versions = _versions(path)

    def following() -> tuple[int, str, Version] | None:
        taken = versions.numbers()  # before it is read: a version that comes in between must not be passed over
        version = read_version(path)
        if version.newer:
            raise ExclusionError(version.newer)
        entries = change(version)
        if entries is None:
            return None
        number = max([version.number, *taken]) + 1  # beyond one that a power cut left empty
        made = Version(number, tuple(sorted(entries, key=lambda entry: entry.node)))
        return number, _text(made), made

    return versions.commit(following, lambda: _published(path))


def _text(version: Version) -> str:
    entries = [asdict(entry) for entry in version.exclusions]
    return json.dumps({"schema": SCHEMA, "version": version.number, "exclusions": entries}, indent=1) + "\n"


def _published(path: Path) -> tuple[int, str]:
    newest = read_version(path)
    return newest.number, _text(newest)


def _note(directory: RunDirectory, kind: str, why: str, data: Mapping[str, Any], who: str) -> None:
    """The ledger is what counts: a journal that cannot be written is said, and stops nothing."""
    try:
        Journal(directory.journal).write(kind, why, data, who)
    except OSError as error:
        print(f"tr11: the journal could not be written: {error}", file=sys.stderr, flush=True)
