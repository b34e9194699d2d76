"""PyTorch's flight recorder: which rank did not enter an operation that the others wait in. Pure.

The recorder keeps a rank's last operations in each process group, each collective with a number that counts up in its
group. The ranks of a group enter the same operations in the same order: the one whose last number is lower than the
others' did not come, and one whose operation of the same number is another one came to the wrong one.
Format: torch/csrc/distributed/c10d/FlightRecorder.hpp; the same keys as JSON and as a pickle.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tr11ops.diagnose.stacks.groups import ranks_words
from trainer.contract.record import Record

MOST_ENTRIES = 100_000
BEHIND = 2  # operations; by one, ranks may differ that see the same end at two moments
# no rank ends alone
_TOGETHER = re.compile(r"all_?(?:reduce|gather|to_?all)|reduce_?scatter|barrier", re.IGNORECASE)
# Operations whose ranks may well give other sizes.
_UNEVEN = re.compile(r"all_?to_?all|gather|scatter|send|recv|barrier|coalesced", re.IGNORECASE)


class Collective(Record):
    """One collective of one rank: its number in its group, its name and its sizes."""

    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    is_pending: bool


class RankOperations(Record):
    """A rank's collectives by group name, in their order; `members` of a group where the record
    names them.
    """

    rank: int
    groups: Mapping[str, tuple[Collective, ...]]
    titles: Mapping[str, str]
    members: Mapping[str, tuple[int, ...]]


class OperationsFinding(Record):
    """What the records say together. `ranks`: who did not come, or came to another operation; may
    be none.
    """

    sentence: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    number: int | None = None
    waiting: frozenset[int] = frozenset()  # who is in that operation
    # of `ranks`, whose own GPU does not end what the others' have ended
    stuck: frozenset[int] = frozenset()


class _NoCode(pickle.Unpickler):
    """Numbers, texts, lists and mappings alone: a record needs nothing else, and a pickle could run
    anything.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, and a flight record holds no classes"
        )


def parse(data: bytes, rank: int) -> RankOperations:
    """One rank's record, JSON or pickle. Raises ValueError where it is none."""
    try:
        if data[:1] in (b"{", b" ", b"\n"):
            value = json.loads(data)
        else:
            value = _NoCode(io.BytesIO(data)).load()
        if not isinstance(value, Mapping) or not isinstance(value.get("entries", []), list):
            raise ValueError("it has no list of entries")
        return _read(value, rank)
    except (
        pickle.UnpicklingError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        AttributeError,
        IndexError,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as error:
        words = " ".join(str(error).split())[:150]
        raise ValueError(f"is not a flight record ({words or type(error).__name__})") from None


def _read(value: Mapping[str, Any], rank: int) -> RankOperations:
    groups: dict[str, list[Collective]] = {}
    titles: dict[str, str] = {}
    for entry in value.get("entries", [])[-MOST_ENTRIES:]:
        name, *title = (str(part) for part in entry["process_group"])
        if title and title[0] not in {"", "undefined"}:
            titles[name] = title[0]
        else:
            titles[name] = name
        if entry.get("is_p2p"):
            continue
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        sizes = tuple(tuple(int(side) for side in size) for size in entry.get("input_sizes") or ())
        operation = Collective(
            int(entry["collective_seq_id"]), str(entry["profiling_name"]), sizes, not done
        )
        groups.setdefault(name, []).append(operation)
    members = {}
    for key, facts in (value.get("pg_config") or {}).items():
        numbers = tuple(int(number) for number in re.findall(r"\d+", str(facts.get("ranks", ""))))
        name = str(facts.get("name") or key)
        if numbers and name:
            members[name] = numbers
    ordered = {
        name: tuple(sorted(found, key=lambda one: one.number)) for name, found in groups.items()
    }
    return RankOperations(rank, ordered, titles, members)


def find_missing(records: Sequence[RankOperations]) -> OperationsFinding | None:
    """Who did not come to which operation. None where no operation is open, or none of the records
    tells.

    A rank that waits itself, in another group, does so for someone: it is named only where no other
    one is. Who holds up different groups is named together.
    """
    findings = [
        finding
        for name in sorted({name for record in records for name in record.groups})
        if (finding := _in_group(name, records)) is not None
    ]
    if not findings:
        return None
    accused = {rank for one in findings for rank in one.ranks}
    stuck = {rank for one in findings for rank in one.stuck}
    excused = {rank for one in findings for rank in one.waiting - stuck if set(one.ranks) - {rank}}
    guilty = (accused - excused) or accused
    chosen: list[OperationsFinding] = []
    for one in sorted(
        findings, key=lambda one: (bool(set(one.ranks) - guilty), -len(one.ranks), one.group)
    ):
        if (
            set(one.ranks) - {rank for other in chosen for rank in other.ranks}
            and set(one.ranks) <= guilty
        ):
            chosen.append(one)
    if not chosen:
        return findings[0]
    named = tuple(sorted({rank for one in chosen for rank in one.ranks}))
    return replace(chosen[0], sentence="; ".join(one.sentence for one in chosen), ranks=named)


def _in_group(name: str, records: Sequence[RankOperations]) -> OperationsFinding | None:
    present = {record.rank: record.groups[name] for record in records if record.groups.get(name)}
    title = next(record.titles[name] for record in records if name in record.titles)
    last = {rank: found[-1] for rank, found in present.items()}
    newest = max(operation.number for operation in last.values())
    open_at = {
        rank
        for rank, operation in last.items()
        if operation.number == newest and operation.is_pending
    }
    if not open_at:
        return None
    what = Counter(_words(last[rank]) for rank in open_at).most_common(1)[0][0]
    place = f"{what} {newest} of group {title}"
    members = _members(name, records)
    silent = sorted(members - {record.rank for record in records})
    late = {rank for rank, operation in last.items() if operation.number < newest}
    # its record has other groups' operations, or none
    without = members - set(present) - set(silent)
    if len(without) <= len(open_at):
        late |= without
    stuck = _stuck(present)
    waiting = frozenset(open_at) - stuck
    if late:
        text = f"{ranks_words(sorted(late))} did not enter {place}; {ranks_words(open_at)} {_wait(open_at)} in it"
        return OperationsFinding(
            text,
            tuple(sorted(late)),
            group=title,
            number=newest,
            waiting=waiting,
            stuck=stuck & late,
        )
    if stuck and not late:
        text = (
            f"{ranks_words(sorted(stuck))} did not end what the others have ended, before {place}"
        )
        return OperationsFinding(
            text, tuple(sorted(stuck)), group=title, number=newest, waiting=waiting, stuck=stuck
        )
    if other := _mismatching(last, open_at):
        theirs = _words(last[other[0]])
        more = ""
        if theirs == what:
            more = f" with {_sizes(last[other[0]])}"
        text = f"{ranks_words(other)} came to {theirs} {newest}{more} of group {title}"
        return OperationsFinding(
            f"{text}, {ranks_words(open_at - set(other))} to {what}", tuple(other), title, newest
        )
    if silent:
        text = f"{ranks_words(open_at)} {_wait(open_at)} in {place}; of {ranks_words(silent)} there is no record"
        return OperationsFinding(
            text, tuple(silent) if len(silent) <= len(open_at) else (), title, newest
        )
    return OperationsFinding(
        f"{ranks_words(open_at)} are all in {place}: the network or a GPU", (), title, newest
    )


def _stuck(present: Mapping[int, Sequence[Collective]]) -> frozenset[int]:
    """Ranks whose first open operation is one that the others have ended: then it is their own GPU
    that stands.

    So only of an operation that no rank ends alone.
    """
    first_open = {}
    behind = set()
    for rank, operations in present.items():
        pending = next((one for one in operations if one.is_pending), None)
        if pending is None:
            first_open[rank] = operations[-1].number + 1
        else:
            first_open[rank] = pending.number
        if pending is not None and _TOGETHER.search(pending.name):
            behind.add(rank)
    furthest = max(first_open.values())
    behind = {rank for rank in behind if furthest - first_open[rank] >= BEHIND}
    if 2 * len(behind) <= len(present):
        return frozenset(behind)
    return frozenset()


def _members(name: str, records: Iterable[RankOperations]) -> set[int]:
    return {rank for record in records for rank in record.members.get(name, ())}


def _mismatching(last: Mapping[int, Collective], open_at: Iterable[int]) -> list[int]:
    """Ranks whose operation of the same number is not that of most others."""
    kinds = {
        rank: (_words(last[rank]), () if _UNEVEN.search(last[rank].name) else last[rank].sizes)
        for rank in open_at
    }
    ((usual, count), *more) = Counter(kinds.values()).most_common()
    # as many came to the one as to the other: no one stands out
    if not more or more[0][1] == count:
        return []
    return sorted(rank for rank, kind in kinds.items() if kind != usual)


def _words(operation: Collective) -> str:
    """`nccl:all_reduce` -> all-reduce."""
    return operation.name.rpartition(":")[2].strip("_").replace("_", "-") or "an operation"


def _sizes(operation: Collective) -> str:
    return " + ".join("x".join(map(str, size)) or "1" for size in operation.sizes) + " values"


def _wait(ranks: Iterable[int]) -> str:
    if len(list(ranks)) == 1:
        return "waits"
    return "wait"
