"""What ranks that waited in vain tell of the next time. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tr11ops.diagnose.sighting import Sighting
from tr11ops.diagnose.signature import FaultClass, Restart

_STUCK = re.compile(r"\bRank (?P<rank>\d+)\] .{0,120}\bWorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)")
_GROUP = re.compile(r"\bPG (?:ID )?(?P<group>\w+)\b")
_EVERY_RANK = "0"  # the number of the group that all ranks are of; others have other members on other ranks
_WAITED = re.compile(
    r"Timed out after (?P<wait>\d+) ?s\w* waiting for clients"
    r"|client socket has timed out after (?P<try>\d+) ?(?P<unit>m?s)\b"
)
LONG_SECONDS = 1800  # who is only late, as a machine that boots, comes sooner


class Stuck(NamedTuple):
    """The collective in which a rank waits, and its number there.

    `is_of_all`: whether the line says that it is of the group of all ranks; older watchdogs name no group.
    """

    rank: int
    number: int
    operation: str
    is_of_all: bool


def what_is_missing(root: Sighting, symptoms: Sequence[Sighting]) -> str:
    """What would tell whether it comes again, where nothing in the log does; "" where that is not the question."""
    if root.signature.fault is FaultClass.RENDEZVOUS and root.progress is None and _has_waited_long(root.text):
        return "the logs of those that did not come, or of the host that did not answer, are missing"
    if root.signature.fault is FaultClass.NCCL_TIMEOUT and len(_operations(stuck_ranks(symptoms))) > 1:
        return "ranks wait in different collectives, and the stacks that say why are missing"
    return ""


def _has_waited_long(text: str) -> bool:
    found = _WAITED.search(text)
    if found is None:
        return False
    if found["wait"] is not None:
        return int(found["wait"]) >= LONG_SECONDS
    seconds = int(found["try"]) / (1000 if found["unit"] == "ms" else 1)
    return seconds >= LONG_SECONDS


def helps_where_ranks_parted(symptoms: Sequence[Sighting]) -> Restart | None:
    """CHANGE where ranks do different collectives under one number: the program's doing, which it does again."""
    by_number: dict[int, list[Stuck]] = {}
    for one in [one for one in stuck_ranks(symptoms) if one.is_of_all]:
        by_number.setdefault(one.number, []).append(one)
    parted = any(len(_operations(ones)) > 1 for ones in by_number.values())
    return Restart.CHANGE if parted else None


def stuck_ranks(symptoms: Sequence[Sighting]) -> list[Stuck]:
    """Of each rank, the first collective that its watchdog gave up, if not of a group that only some are of."""
    first: dict[int, Stuck] = {}
    for one in symptoms:
        found, group = _STUCK.search(one.text), _GROUP.search(one.text)
        if found is None or (group is not None and group["group"] != _EVERY_RANK):
            continue
        rank = int(found["rank"])
        first.setdefault(rank, Stuck(rank, int(found["number"]), found["operation"], group is not None))
    return list(first.values())


def _operations(ones: Sequence[Stuck]) -> set[str]:
    return {one.operation for one in ones}
