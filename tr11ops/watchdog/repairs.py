"""Nodes that tr11 has excluded and the site has taken out of service since; and those of them that it
has put back. What the site was seen to do is on the run's list (`Exclusion.out`): a look later it
could not be told from a node that no one has touched.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, Version, revise
from tr11ops.rundir.paths import RunDirectory

# times that a repair is believed, before the node has trained well for a day: 22 % of repaired nodes
# fail again within one
MOST_RETURNS = 1
# how long a node that tr11 has excluded is not used whatever is missing: at first, and when it has
# come back once and failed again; then it takes a person
RESTS = (3600.0, 86_400.0)
_KEPT_OFF = {NodeStanding.AVOID.value, NodeStanding.EXCLUDE.value}


def out_of_service(snapshot: Snapshot) -> frozenset[str]:
    """The nodes excluded by tr11 that the site has out of service now, and that are not on record as
    that.
    """
    return frozenset(
        entry.node
        for entry in known(snapshot.exclusions, ())
        if _is_ours(entry) and entry.out is None and _is_out(snapshot, entry.node)
    )


def put_back(snapshot: Snapshot) -> tuple[Exclusion, ...]:
    """What excludes nodes that the site has had out of service since, and gives to jobs again; the
    first that were excluded first. Not one that came back so before, and has failed again.
    """
    found = [
        entry
        for entry in known(snapshot.exclusions, ())
        if _is_ours(entry)
        and entry.out is not None
        and entry.returns < MOST_RETURNS
        and _is_back(snapshot, entry.node)
    ]
    return tuple(sorted(found, key=_age))


def note_out_of_service(directory: RunDirectory, nodes: Collection[str], now: float) -> bool:
    """Put on record that the site has these out of service; whether that changed anything. Raises
    OSError, ValueError as the list does.
    """
    if not nodes:
        return False

    def change(version: Version) -> Version:
        entries = (
            replace(entry, out=now) if entry.node in nodes and _is_ours(entry) else entry
            for entry in version.exclusions
        )
        return replace(version, exclusions=tuple(entries))

    return revise(directory, change)


def in_reserve(entries: Collection[Exclusion], now: float) -> tuple[Exclusion, ...]:
    """What keeps nodes off that may be used where an attempt would wait else: those that are only
    avoided, whoever said so, then those that tr11 excluded and that have rested; the oldest first.
    """
    avoided = [entry for entry in entries if entry.state == NodeStanding.AVOID]
    excluded = [
        entry
        for entry in entries
        if entry.owner == AUTOMATIC_OWNER
        and entry.state == NodeStanding.EXCLUDE
        and entry.returns < len(RESTS)
        and now - (entry.since or now) >= RESTS[entry.returns]
    ]
    return (*sorted(avoided, key=_age), *sorted(excluded, key=_age))


def after_need(entry: Exclusion) -> NodeStanding:
    """As what such a node stays on record while it is used."""
    if entry.state == NodeStanding.AVOID:
        return NodeStanding.SUSPECT
    return NodeStanding.RETURNED


def _age(entry: Exclusion) -> tuple[float, str]:
    return entry.since or 0.0, entry.node


def _is_ours(entry: Exclusion) -> bool:
    return entry.owner == AUTOMATIC_OWNER and entry.state in _KEPT_OFF


def _is_out(snapshot: Snapshot, name: str) -> bool:
    node = snapshot.node(name)
    return node is not None and not node.is_usable and not node.is_unknown


def _is_back(snapshot: Snapshot, name: str) -> bool:
    node = snapshot.node(name)
    return node is not None and node.is_usable and not node.is_silent
