"""The flight records in an attempt's folder: which files belong together, read with a bound on
their size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tr11ops.diagnose.stacks.operations import (
    OperationsFinding,
    RankOperations,
    find_missing,
    parse,
)
from trainer.contract.record import Record
from trainer.contract.state_file import read_bytes

LARGEST_RECORD = 64 * 2**20  # bytes; a thousand operations with their stacks are two
MOST_RECORDS = 4096
_NAME = re.compile(r"launch-(\d+)(?:-request-(\d+))?-rank-(\d+)(?:\.json)?")


class RecordsLook(Record):
    """What the newest records of an attempt say. `time`: of the newest, seconds since the epoch;
    None for none.

    `finding`: None where no operation was open in them. `troubles`: files that could not be read,
    and why.
    """

    folder: Path
    time: float | None = None
    ranks: int = 0
    finding: OperationsFinding | None = None
    troubles: tuple[str, ...] = ()


def look_at_records(folder: Path, launch: int = 0) -> RecordsLook:
    """The records that were written together last: of one launch, at its time-out or for one
    request.

    `launch`: the one that runs; what an earlier one left says nothing of it.
    """
    sets: dict[tuple[int, int], list[tuple[float, int, Path]]] = {}
    troubles: list[str] = []
    try:
        for path, number, request, rank in _files(folder):
            if number >= launch:
                sets.setdefault((number, request), []).append((path.stat().st_mtime, rank, path))
    except FileNotFoundError:
        return RecordsLook(folder)
    except OSError as error:
        return RecordsLook(folder, troubles=(f"{folder}: {error.strerror or error}",))
    if not sets:
        return RecordsLook(folder)
    last = max(number for number, _ in sets)
    newest = max((found for (number, _), found in sets.items() if number == last), key=max)
    records: dict[int, RankOperations] = {}
    for _, rank, path in sorted(newest)[-MOST_RECORDS:]:
        try:
            records[rank] = parse(read_bytes(path, LARGEST_RECORD), rank)
        except (OSError, ValueError) as error:
            troubles.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
    finding = find_missing(tuple(records[rank] for rank in sorted(records)))
    return RecordsLook(
        folder, max(newest)[0], ranks=len(records), finding=finding, troubles=tuple(troubles)
    )


def _files(folder: Path) -> Iterator[tuple[Path, int, int, int]]:
    """(file, launch, request or 0, rank)."""
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            yield path, int(match[1]), int(match[2] or 0), int(match[3])
