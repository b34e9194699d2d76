"""Whom the lines about broken links name, and whose machine alone is not in order. Pure.

Who prints such a line is a witness: a link has two ends. The peer that several of them name, and
more than any other, is the suspect; one word, or two ends that name each other, accuse no one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.sighting import Sighting
from tr11ops.diagnose.signature import FaultClass, Role

FEWEST_WITNESSES = 2
_OF_ONE_MACHINE = frozenset({"memory-held", "device-held", "nvls-memory"})
SETTINGS = "nccl-network-settings"
DRIVERS = frozenset(
    {
        "cuda-configuration",
        "cuda-unknown-start",
        "nccl-refused",
        "driver-mismatch",
        "fabric-permission",
    }
)
_INSTALLED = DRIVERS | {"gds-driver", "cuda-died"}  # what a node alone may lack
_OF_A_DRIVER = re.compile(r"driver|unknown error", re.IGNORECASE)
_FACTS = "nodes"  # the family of what nodes say of themselves
_DAEMON_ON = re.compile(r"\bslurmd\[[A-Za-z][\w.-]*\]: ")  # which names its node
_NO_DAEMON = re.compile(
    r"munge\.socket\S*: (?:No such file|Connection refused)|munged is (?:not running|down)"
)
_IN_ORDER = re.compile(
    r"munged\[\d+\]: Exiting on signal|Stopped MUNGE|munge\.service: (?:Succeeded|Deactivated)"
)
_CLOCK = re.compile(
    r"RequestTimeTooSkewed|request time and the current time is too large|RequestExpired\b"
)
_FIREWALL = "firewall-refused"
FEWEST_OTHERS = 2  # nodes that agree, before a third one is the odd one
_UNLIMITED = "memlock-unlimited"
_OF_LOCKED_MEMORY = re.compile(r"Cannot allocate memory|RLIMIT_MEMLOCK|max locked memory")
_OWN_DISK = re.compile(  # by its name, which may hold that of a file system that all share
    r"(?<![\w./-])(?!/usr/)(?:/tmp|/run|/var/(?:cache|lib|log|opt|run|spool|tmp)|/(?:\w+/)?(?:local(?:_?(?:scratch|ssd|disk))?|scratch_local|nvme\w*|raid\d*))"
    r"(?:/\S*|\b)|\btmpfs\b"
)
_SHARED_NAME = re.compile(
    r"lustre|gpfs|beegfs|weka|ceph|nfs|vast\b|daos|juicefs|fsx|\befs|/s3|gcsfuse|quobyte|glusterfs|/shared|[-_]shared\b|/home/",
    re.IGNORECASE,
)
_OURS = "ours"  # the family of tr11's own words: the paths in them are those of the run directory
_OWN_MOUNT = re.compile(
    r"Transport endpoint is not connected|Errno 10[78]\b|Cannot send after transport endpoint shutdown"
)


def most_named_peer(sightings: Sequence[Sighting], places: LaunchPlaces) -> str | None:
    """The node or address that at least two others name, and no other as often; None where there is
    none.
    """
    words = [
        (peer, places.quoted(one).node, one)
        for one in sightings
        if (peer := places.peer_of(one)) is not None
    ]
    are_placed = any(node is not None for _, node, _ in words)
    witnesses: dict[str, set[object]] = {}
    for peer, node, one in words:
        # whose word that is, is not known: it may be told already
        if node == peer or (are_placed and node is None):
            continue
        witnesses.setdefault(peer, set()).add(node if are_placed else one.origin.writer)
    by_count = sorted(witnesses, key=lambda peer: len(witnesses[peer]), reverse=True)
    if not by_count or len(witnesses[by_count[0]]) < FEWEST_WITNESSES:
        return None
    if len(by_count) > 1 and len(witnesses[by_count[1]]) == len(witnesses[by_count[0]]):
        return None
    return by_count[0]


def refusing_peer(
    root: Sighting, sightings: Sequence[Sighting], places: LaunchPlaces
) -> str | None:
    """The node whose own kernel says that its firewall refused what the root could not reach: the
    same address and port; None where none says so.
    """
    for one in sightings:
        if (
            one.signature.id == _FIREWALL
            and one.file != root.file
            and one.named["address"] == root.named.get("peer")
            and f"<{one.named['port']}>" in root.text
        ):
            return places.shell_of(one) or one.origin.node
    return None


def lone_node(
    root: Sighting, alike: Sequence[Sighting], places: LaunchPlaces, sightings: Sequence[Sighting]
) -> str | None:
    """The node whose own machine is not in order, where only it says so; None where none is, or
    others share it.

    A GPU that someone else holds, a full disk of its own, a mount or credentials that it alone has lost;
    a limit on locked memory, where another node says that it has none.
    """
    if root.progress is None and _may_be_nodes_own(root):
        odd = odd_node(sightings, places)
        if odd is not None:
            return odd
        if _is_set_up_here_alone(root, alike, places, sightings):
            return _nodes_of(root, alike, places).pop()
    if root.is_mild or not (
        _is_of_a_machine(root, places) or _is_locked_here_alone(root, places, sightings)
    ):
        return None
    if _NO_DAEMON.search(root.text) is not None and (shell := places.shell_of(root)) is not None:
        return shell
    nodes = _nodes_of(root, alike, places)
    if len(nodes) == 1:
        return nodes.pop()
    return None


def _nodes_of(root: Sighting, alike: Sequence[Sighting], places: LaunchPlaces) -> set[str]:
    """The nodes of a line and of others like it, without those that are guessed."""
    said = [places.quoted(one, is_root=one is root) for one in [root, *alike]]
    return {quoted.node for quoted in said if quoted.node is not None and not quoted.is_guess}


def _may_be_nodes_own(root: Sighting) -> bool:
    """Whether an error at the start is one that a node alone may cause by what is installed on it."""
    signature = root.signature
    is_nccls = signature.fault is FaultClass.USER_CODE and signature.family == "nccl"
    return is_nccls or signature.fault is FaultClass.NCCL_NETWORK or signature.id in _INSTALLED


def odd_node(sightings: Sequence[Sighting], places: LaunchPlaces) -> str | None:
    """The one node that has another driver, library, image or network than all others, which agree;
    None for none.
    """
    odd = set()
    for fact in {one.signature.id for one in sightings if one.signature.family == _FACTS}:
        values: dict[str, set[str]] = {}
        for one in sightings:
            node = one.named.get("node") or places.quoted(one).node
            if one.signature.id == fact and node is not None:
                values.setdefault(node, set()).add(one.named["value"])
        for node, own in values.items():
            others = [value for other, value in values.items() if other != node]
            agree = len(others) >= FEWEST_OTHERS and all(value == others[0] for value in others)
            if agree and not own & others[0]:
                odd.add(node)
    if len(odd) == 1:
        return odd.pop()
    return None


def _is_set_up_here_alone(
    root: Sighting, alike: Sequence[Sighting], places: LaunchPlaces, sightings: Sequence[Sighting]
) -> bool:
    """Whether one node alone says that it is not set up for the network, or its driver not for the
    program, while others say only that they lost it.
    """
    is_driver = root.signature.id in _INSTALLED and _OF_A_DRIVER.search(root.text) is not None
    if root.signature.id != SETTINGS and not is_driver:
        return False
    said = _nodes_of(root, alike, places)
    if len(said) != 1:
        return False
    others = [
        one
        for one in sightings
        if one.signature.role is not Role.CAUSE and one.signature.family != _FACTS
    ]
    witnesses = {places.quoted(one).node for one in others}
    if is_driver and not any(one.signature.family == _FACTS for one in sightings):
        witnesses |= places.in_columns  # who says something, and not that, has it not
    return len(witnesses - {None, *said}) >= FEWEST_OTHERS


def _is_of_a_machine(root: Sighting, places: LaunchPlaces) -> bool:
    signature = root.signature
    if signature.fault is FaultClass.SLURM_AUTH:
        is_no_nodes = places.is_asked_for_alone(root.named.get("node")) or places.says(_IN_ORDER)
        return not is_no_nodes and (
            "node" in root.named
            or places.is_of_a_daemon(root)
            or _DAEMON_ON.search(root.text) is not None
            or _NO_DAEMON.search(root.text) is not None
        )
    if signature.fault is FaultClass.GCS:
        return _CLOCK.search(root.text) is not None and places.has_other_nodes
    if signature.fault is not FaultClass.STORAGE:
        return signature.id in _OF_ONE_MACHINE
    own = _OWN_DISK.search(root.text)
    # wherever the run directory lies: all nodes share it
    if own is not None and signature.family != _OURS:
        return _SHARED_NAME.search(own[0]) is None and not places.is_shared(own[0])
    return _OWN_MOUNT.search(root.text) is not None and places.has_other_nodes


def _is_locked_here_alone(
    root: Sighting, places: LaunchPlaces, sightings: Sequence[Sighting]
) -> bool:
    """Whether it is a limit on locked memory of a node, and at least one other says that it has no
    such limit.
    """
    if root.signature.id != SETTINGS or _OF_LOCKED_MEMORY.search(root.text) is None:
        return False
    own = places.quoted(root, is_root=True).node
    free = {places.quoted(one).node for one in sightings if one.signature.id == _UNLIMITED} - {None}
    return own is not None and bool(free) and own not in free
