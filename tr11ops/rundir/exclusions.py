"""The ledger of nodes that a run must not use: who excluded them, since when, why, and when they
are due for a check.

state/exclusions.json    state/exclusions.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import ExclusionError
from tr11ops.base.now import now
from tr11ops.base.observed import cause, why_only_read
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit, NodeStanding
from tr11ops.rundir.journal import Journal, JournalEntry, Ledger
from tr11ops.rundir.paths import RunDirectory, run_id
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.documents import document, record_of
from trainer.contract.errors import DamagedFile
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json
from trainer.contract.units import shortened

SCHEMA = 1
AUTOMATIC_OWNER = "tr11"  # the owner of what no person asked for
# kinds of journal entries
EXCLUDED, INCLUDED, CHECKED = "node-excluded", "node-included", "node-checked"
VERSIONS_KEPT = 64
MOST_EVIDENCE = 20
LONGEST_EVIDENCE = 500
DAY_SECONDS = 86400.0
# text: compiling it takes 3 ms, which no reader needs
_NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,253}"


class Version(Record, rename={"number": "version"}):
    """The ledger at one moment. `number` counts changes; 0 is the empty ledger, or a file written
    by hand.

    `exclusions` are nodes that are not used; `suspects` are used, after the others. No node is in
    both.
    """

    number: int
    exclusions: tuple[Exclusion, ...]
    suspects: tuple[Exclusion, ...] = ()

    def find(self, node: str) -> Exclusion | None:
        """What keeps the run off a node; None where it may be used."""
        return next((entry for entry in self.exclusions if entry.node == node), None)

    def on_record(self, node: str) -> Exclusion | None:
        """What is known of a node: that it is excluded, avoided or suspected, or came back."""
        return next(
            (entry for entry in (*self.exclusions, *self.suspects) if entry.node == node), None
        )

    def without(self, node: str) -> Version:
        """The same, with nothing on record of a node."""
        return replace(
            self,
            exclusions=tuple(entry for entry in self.exclusions if entry.node != node),
            suspects=tuple(entry for entry in self.suspects if entry.node != node),
        )


# ----------------------------------------------------------------------------- questions
def due_for_recheck(exclusions: Iterable[Exclusion], now: float) -> tuple[Exclusion, ...]:
    """The exclusions whose time has passed, oldest first. They hold until a check of the node has
    passed.
    """
    due = [entry for entry in exclusions if entry.until is not None and entry.until <= now]
    return tuple(sorted(due, key=lambda entry: (entry.until or 0.0, entry.node)))


def check_node_name(node: str) -> None:
    """Raises ExclusionError for a text that cannot be one node's name (blanks, brackets, commas,
    shell signs).
    """
    if not re.fullmatch(_NODE_NAME, node):
        raise ExclusionError(
            f"node {node[:80]!r}: a node's name is letters, digits, dots, dashes and underscores"
        )


def read_version(path: Path) -> Version:
    """The ledger whose published copy is `path`; empty when there is none.

    Raises OSError when it cannot be read, ValueError when neither the newest version nor the copy
    is a ledger.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[Version, str]:
    """The ledger, and why this tr11 must not replace it ("" where it may). Raises as
    `read_version`.
    """
    problem: Exception | None = None
    found: list[Version] = []
    newer = ""
    newest = _newest(path)
    for place in (path,) if newest is None else (newest, path):
        try:
            value = read_json(place)
            why = why_only_read(value, SCHEMA)
            if why and not newer:
                newer = f"{place} {why}"
            if value is not None:
                found.append(_version(place, value))
        except ValueError as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return max(found, key=lambda version: version.number, default=Version(0, ())), newer


# ----------------------------------------------------------------------------- changes
def exclude(
    directory: RunDirectory,
    asked: Exclusion,
    *,
    days: float | None,
    limit: ExclusionLimit | None = None,
    forced: bool = False,
) -> bool:
    """Put a node on the ledger from now on, due for a check after `days` (None: never); False when
    the limit forbids it.

    `forced`: a person wants it whatever the limit says, which is kept in the journal. Who is excluded already is not
    made less than that.
    A node that is on it already stays there: the later expiry holds, evidence is added, who was first stays the owner.
    Where the same attempt has put it there, by a launch's end, its follower or the watchdog, that is no second
    exclusion, and the journal has none.
    Raises ExclusionError for an impossible name or number, OSError as the file system does.
    """
    node = asked.node
    check_node_name(node)
    if days is not None and not 0 < days <= 36500:
        raise ExclusionError(f"days = {days:g}: must be above 0 and at most 36500")
    since = now()
    until = None
    if days is not None:
        until = since + days * DAY_SECONDS
    fresh = replace(asked, since=since, until=until, evidence=_bounded(asked.evidence))

    is_known = False

    def change(version: Version) -> Version | None:
        nonlocal is_known
        old = version.find(node)
        others = version.without(node)
        is_known = old is not None and _is_same(old, fresh)
        full = limit is not None and limit.forbids(
            [node], (entry.node for entry in others.exclusions)
        )
        if old is None and full and not forced:
            return None
        before = version.on_record(node)
        made = fresh
        if old is not None:
            made = _renewed(old, fresh)
        elif before is not None:
            made = replace(fresh, returns=before.returns)
        return replace(others, exclusions=(*others.exclusions, made))

    done = _commit(directory.exclusions, change)
    if done is None:
        return False
    if is_known:
        return True
    entry = done.find(node) or fresh
    data = {
        "node": node,
        "until": entry.until,
        "evidence": list(fresh.evidence),
        "job_id": fresh.job_id,
        "owner": fresh.owner,
    }
    data |= {"forced": True} if forced else {}
    data |= {} if entry.state == NodeStanding.EXCLUDE else {"state": entry.state}
    _note(directory, EXCLUDED, why=fresh.why, data=data, who=fresh.owner)
    return True


def include(
    directory: RunDirectory, node: str, *, why: str, owner: str, then: NodeStanding | None = None
) -> bool:
    """Take a node off the ledger; False when it is not on it. Raises OSError as the file system
    does.

    `then`: as what it stays on record, as a node that came back or is a suspect still; None: it is
    innocent.
    """

    def change(version: Version) -> Version | None:
        old = version.find(node)
        if old is None:
            return None
        others = version.without(node)
        if then is None:
            return others
        kept = replace(old, state=then.value, until=None, since=now(), good_seconds=0.0, out=None)
        if then is NodeStanding.RETURNED and owner == AUTOMATIC_OWNER:
            kept = replace(kept, returns=old.returns + 1)
        return replace(others, suspects=(*others.suspects, kept))

    if _commit(directory.exclusions, change) is None:
        return False
    _note(directory, INCLUDED, why=why, data={"node": node, "owner": owner}, who=owner)
    return True


def revise(directory: RunDirectory, change: Callable[[Version], Version]) -> bool:
    """Change what is on record of nodes by a pure rule; whether that changed anything.

    Raises OSError, ExclusionError, ValueError as the ledger does. What takes a node off the list is
    for `include`.
    """

    def changed(version: Version) -> Version | None:
        made = change(version)
        if made == version:
            return None
        return made

    return _commit(directory.exclusions, changed) is not None


def record_check(
    directory: RunDirectory,
    node: str,
    *,
    result: str,
    why: str,
    owner: str,
    checks: Sequence[Mapping[str, Any]] = (),
    of_speed: bool = False,
) -> None:
    """Keep the result of a health check of a node (`fine`, `warning`, `bad`, `slow` or `unknown`) in
    the journal; `of_speed`: it measured how quickly the node computes.
    """
    data = {"node": node, "result": result, "checks": list(checks), "of_speed": of_speed}
    _note(directory, CHECKED, why=why, data=data, who=owner)


def is_clean_speed(entry: JournalEntry) -> bool:
    """Whether it says that a node was measured to compute as quickly as others."""
    data = entry.data
    return entry.kind == CHECKED and data.get("of_speed") is True and data.get("result") == "fine"


def history(
    ledger: Ledger, exclusions: Iterable[Exclusion], node: str | None = None
) -> tuple[JsonObject, ...]:
    """What happened to nodes, oldest first: the journal's entries, and exclusions that never got
    into it.

    Each is a dict of time, kind, node, who, why and, where known, until, evidence, job_id, result.
    """
    events = [
        {"time": entry.time, "kind": entry.kind, "who": entry.who, "why": entry.why, **entry.data}
        for entry in ledger.entries
        if entry.kind in (EXCLUDED, INCLUDED, CHECKED) and "node" in entry.data
    ]
    for entry in exclusions:
        known = any(
            event["kind"] == EXCLUDED
            and event["node"] == entry.node
            and event["time"] >= (entry.since or 0.0)
            for event in events
        )
        if not known:  # the one who excluded it was killed before the journal was written
            events.append(
                {
                    "time": entry.since or 0.0,
                    "kind": EXCLUDED,
                    "who": entry.owner,
                    "why": entry.why,
                    "node": entry.node,
                    "until": entry.until,
                    "evidence": list(entry.evidence),
                    "job_id": entry.job_id,
                    "owner": entry.owner,
                }
            )
    return tuple(
        sorted(
            (event for event in events if node in (None, event["node"])),
            key=lambda one: one["time"],
        )
    )


# ----------------------------------------------------------------------------- how
def _is_same(old: Exclusion, fresh: Exclusion) -> bool:
    """Whether tr11 says once more of a node what it has said of it for the same attempt."""
    return (
        old.owner == fresh.owner == AUTOMATIC_OWNER
        and old.job_id == fresh.job_id != ""
        and not _is_worse(old, fresh)
    )


def _is_worse(old: Exclusion, fresh: Exclusion) -> bool:
    """Whether the fresh word takes a node further than it is."""
    steps = list(NodeStanding)
    return steps.index(NodeStanding(fresh.state)) > steps.index(NodeStanding(old.state))


def _renewed(old: Exclusion, fresh: Exclusion) -> Exclusion:
    if old.until is None or fresh.until is None:
        until = None
    else:
        until = max(old.until, fresh.until)
    reason = () if fresh.why == old.why else (fresh.why,)
    lines = tuple(dict.fromkeys((*old.evidence, *_bounded(reason), *fresh.evidence)))[
        -MOST_EVIDENCE:
    ]
    renewed = replace(old, until=until, evidence=lines, job_id=fresh.job_id or old.job_id)
    if not _is_worse(old, fresh):
        return renewed
    return replace(
        renewed, state=fresh.state, why=fresh.why, owner=fresh.owner, fault=fresh.fault or old.fault
    )


def _bounded(evidence: Iterable[str]) -> tuple[str, ...]:
    return tuple(shortened(" ".join(line.split()), LONGEST_EVIDENCE) for line in evidence)[
        :MOST_EVIDENCE
    ]


def _versions(path: Path) -> VersionedFile:
    return VersionedFile(path, VERSIONS_KEPT)


def _newest(path: Path) -> Path | None:
    numbers = _versions(path).numbers()
    if numbers:
        return _versions(path).file(numbers[-1])
    return None


def version_in(path: Path) -> Version | None:
    """What one file of the ledger holds; None where it is not there. Raises OSError, ValueError."""
    value = read_json(path)
    if value is None:
        return None
    return _version(path, value)


def _version(path: Path, value: JsonObject) -> Version:
    """Raises ValueError when the object is no ledger. People may have written one, without a
    number.
    """
    try:
        version = record_of(Version, {"version": 0, **value})
    except ValueError as error:
        raise DamagedFile(path, f"is not a list of exclusions: {error}") from None
    return Version(version.number, _understood(version.exclusions), _understood(version.suspects))


def _understood(entries: Iterable[Exclusion]) -> tuple[Exclusion, ...]:
    """The entries; one with a word of a newer tr11 for its state is an exclusion."""
    known_states = set(NodeStanding)
    return tuple(
        entry if entry.state in known_states else replace(entry, state=NodeStanding.EXCLUDE.value)
        for entry in entries
    )


def _commit(path: Path, change: Callable[[Version], Version | None]) -> Version | None:
    """Apply `change` to the newest version and publish the result; None when `change` returns None.

    Raises OSError as the file system does, TimeoutError when others were always faster,
    ExclusionError where a newer tr11 has written it.
    """

    def read() -> tuple[int, Version]:
        version, newer = _read(path)
        if newer:
            raise ExclusionError(newer)
        return version.number, version

    done = _versions(path).commit(read, change, ledger_text)
    if done is None:
        return None
    return _in_order(*done)


def _in_order(number: int, version: Version) -> Version:
    """The version of a number, its nodes by name."""
    exclusions, suspects = (
        tuple(sorted(entries, key=lambda entry: entry.node))
        for entries in (version.exclusions, version.suspects)
    )
    return Version(number, exclusions, suspects)


def ledger_text(number: int, version: Version) -> str:
    """The ledger as it is written."""
    return json.dumps({"schema": SCHEMA, **document(_in_order(number, version))}, indent=1) + "\n"


def _note(directory: RunDirectory, kind: str, why: str, data: JsonObject, who: str) -> None:
    """The ledger is what counts: a journal that cannot be written is said, and stops nothing."""
    try:
        Journal(directory.journal).write(kind, why, data, who)
    except OSError as error:
        print(f"tr11: the journal could not be written: {error}", file=sys.stderr, flush=True)


# What the runs of a site tell each other of nodes: a folder with one list for each run, by its id.
#
#     FOLDER/RUN-ID.json    FOLDER/RUN-ID.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)
#
# Each run writes its own list alone, a copy of state/exclusions.json, so that runs never wait for
# each other; the machines of one run that write at once lose nothing, since each copies the newest
# version of the run's own list. Another run's word is an attribution and no proof: it never excludes
# by itself.

SHARED_VERSIONS_KEPT = 16
_LIST = re.compile(r"[0-9a-f]{32}\.json")


class SharedWord(Record):
    """What other runs have on record of nodes. `faults`: lists that could not be read, so that they
    are unknown.
    """

    entries: tuple[Exclusion, ...] = ()
    faults: tuple[str, ...] = ()

    def of(self, node: str) -> tuple[Exclusion, ...]:
        """A word for each other run that has one of this node."""
        return tuple(entry for entry in self.entries if entry.node == node)


def read_shared(folder: str | None, directory: RunDirectory) -> SharedWord:
    """What tr11 found out in the other runs that share this folder; nothing where it is None. Never
    raises.

    What a person excluded is that person's reason and no attribution.
    """
    if folder is None:
        return SharedWord()
    try:
        own = run_id(directory)
        paths = sorted(path for path in Path(folder).iterdir() if _LIST.fullmatch(path.name))
    except (OSError, ValueError) as error:
        return SharedWord(
            faults=(f"what other runs know of nodes is unknown: {folder}: {cause(error)}",)
        )
    entries: list[Exclusion] = []
    faults: list[str] = []
    for path in paths:
        if path.stem == own:
            continue
        try:
            entries += _entries(path)
        except (OSError, ValueError) as error:
            faults.append(f"what another run knows of nodes is unknown: {path}: {cause(error)}")
    return SharedWord(tuple(entries), tuple(faults))


def publish(folder: str | None, directory: RunDirectory) -> str:
    """Let the other runs know what this one has on record of nodes; why they could not be told, ""
    where they were.
    """
    if folder is None:
        return ""
    try:
        own = run_id(directory)
        if not own:
            return ""  # not launched yet: nothing is on record
        shared = VersionedFile(Path(folder) / f"{own}.json", SHARED_VERSIONS_KEPT)

        def read() -> tuple[int, str]:
            number = max(shared.numbers(), default=0)
            if not number:
                return 0, ""
            return number, shared.file(number).read_text(encoding="utf-8")

        def change(text: str) -> str | None:
            known = read_version(directory.exclusions)
            now = ledger_text(known.number, known)
            if now == text:
                return None
            return now

        shared.commit(read, change, _as_it_is)
    except (OSError, ValueError) as error:
        return f"other runs cannot be told of nodes: {folder}: {cause(error)}"
    return ""


def _as_it_is(_: int, text: str) -> str:
    return text


def _entries(path: Path) -> list[Exclusion]:
    """Raises OSError, ValueError for what is no list, or another schema's."""
    value = read_json(path)
    schema = None
    if value is not None:
        schema = value.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}, this tr11 reads {SCHEMA}")
    version = read_version(path)
    return [
        entry
        for entry in (*version.exclusions, *version.suspects)
        if entry.owner == AUTOMATIC_OWNER
    ]
