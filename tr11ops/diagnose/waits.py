"""What ranks that waited in vain tell of the next time. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import FaultClass, Restart

_STUCK = re.compile(
    r"\bRank (?P<rank>\d+)\] .{0,120}\bWorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
)
_GROUP = re.compile(r"\bPG (?:ID )?(?P<group>\w+)\b")
# the number of the group that all ranks are of; others have other members on other ranks
_EVERY_RANK = "0"
_ENQUEUED = re.compile(
    r"\bRank (?P<rank>\d+)\] +(?:failure detected by watchdog.{0,60}last enqueued work"
    r"|Received a dump signal.{0,160}Last enqueued NCCL work): (?P<number>\d+)"
)
_WAITED = re.compile(
    r"(?:(?:client socket has t|T)imed out after|Timeout waiting for key: .{1,80}? after) (?P<wait>\d+) ?(?P<unit>m?s)"
)
# of an address that did not answer, and of tasks that never came to it
UNREACHED = re.compile(
    r"trying to connect to|connection to the C10d store has failed|No route to host"
    r"|PjRT_Client_Connect|tasks_to_register|[Cc]luster registration failed|RegisterTask\b"
)
_OF_CONNECTIONS = frozenset({FaultClass.RENDEZVOUS, FaultClass.NCCL_NETWORK})
_NO_WORD_OF = re.compile(r"\bnot received the Notify record from remote rank: ?\[(?P<rank>\d+)\]")
_BUSY = "rank-busy"
_AT_DEVICE = "rank-waits-for-device"
WITNESSES = 2  # others who agree
LONG_SECONDS = 1800  # who is only late, as a machine that boots, comes sooner


class Stuck(NamedTuple):
    """The collective in which a rank waits, and its number there.

    `is_of_all`: whether the line says that it is of the group of all ranks; older watchdogs name no
    group.
    """

    rank: int
    number: int
    operation: str
    is_of_all: bool


def what_is_missing(fault: FaultClass, trained: bool, texts: Sequence[str]) -> str:
    """What would tell whether it comes again, where nothing does; "" where that is not the
    question. `texts`: those of the first cause, that first, and of what other ranks said of it.

    What was not reached before the first step has never been known to work.
    """
    is_at_start = fault in _OF_CONNECTIONS and not trained
    if is_at_start and (UNREACHED.search(texts[0]) or _has_waited_long(texts[0])):
        return (
            "the logs of those that did not come, or of the host that did not answer, are missing"
        )
    if fault is FaultClass.NCCL_TIMEOUT and len({one.operation for one in stuck_ranks(texts)}) > 1:
        return "ranks wait in different collectives, and the stacks that say why are missing"
    return ""


def _has_waited_long(text: str) -> bool:
    found = _WAITED.search(text)
    return found is not None and int(found["wait"]) >= LONG_SECONDS * (
        1000 if found["unit"] == "ms" else 1
    )


def helps_where_ranks_parted(texts: Sequence[str]) -> Restart | None:
    """CHANGE where ranks do different collectives under one number: the program's doing, which it
    does again.
    """
    done = {(one.number, one.operation) for one in stuck_ranks(texts) if one.is_of_all}
    if len(done) > len({number for number, _ in done}):
        return Restart.CHANGE
    return None


def helps_where_a_device_stands(sightings: Sequence[Sighting]) -> Restart | None:
    """UNKNOWN where the one rank that did not come waits for its own accelerator, by its stack: what that
    stands at, a kernel or a fault, no line tells.
    """
    at_device = {one.named["rank"] for one in sightings if one.signature.id == _AT_DEVICE}
    if len(at_device) == 1:
        return Restart.UNKNOWN
    return None


def helps_where_one_works(root: Sighting, launch: LogLaunch) -> Restart | None:
    """CHANGE where a rank was still at a long work of its own, after the last step, when others had
    waited too long for it: a copy, a save, an evaluation takes as long the next time.
    """
    last = 0 if launch.progress is None else launch.progress.line_number
    at_work = [
        one
        for one in launch.sightings
        if one.signature.id == _BUSY and one.file == root.file and one.line_number > last
    ]
    if not at_work or at_work[-1].origin.rank is None:
        return None
    if at_work[-1].origin.rank == root.origin.rank:
        return None
    return Restart.CHANGE


def stuck_ranks(texts: Sequence[str]) -> list[Stuck]:
    """Of each rank, the first collective that its watchdog gave up, if not of a group that only
    some are of.
    """
    first: dict[int, Stuck] = {}
    for text in texts:
        found = _STUCK.search(text)
        group = _GROUP.search(text)
        if found is None or (group is not None and group["group"] != _EVERY_RANK):
            continue
        rank = int(found["rank"])
        first.setdefault(
            rank, Stuck(rank, int(found["number"]), found["operation"], group is not None)
        )
    return list(first.values())


def rank_waited_for(texts: Sequence[str]) -> int | None:
    """The one rank of which several ranks say that its word did not come; None for none."""
    named = [int(found["rank"]) for text in texts if (found := _NO_WORD_OF.search(text))]
    if len(named) >= WITNESSES and len(set(named)) == 1:
        return named[0]
    return None


def rank_behind(texts: Sequence[str]) -> int | None:
    """The one rank that its watchdog saw begin fewer collectives than all others did, which agree;
    None for none.
    """
    begun = {
        int(found["rank"]): int(found["number"])
        for text in texts
        if (found := _ENQUEUED.search(text))
    }
    if len(begun) <= WITNESSES:
        return None
    most = max(begun.values())
    behind = [rank for rank, number in begun.items() if number < most]
    if len(behind) == 1:
        return behind[0]
    return None
