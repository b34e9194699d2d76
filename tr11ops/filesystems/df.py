"""`df`: a whole file system, shared with all who write to it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.base.errors import SourceError
from tr11ops.filesystems.reading import (
    KIBI,
    CommandOutput,
    UsageReading,
    UsageSource,
    answered,
    required_path,
)
from tr11ops.runcard.watching import FilesystemSection

# Device and mount point may hold blanks, the figures between them not.
_ROW = re.compile(
    r"^(?P<device>.+?)\s+(?P<total>\d+|-)\s+(?P<used>-?\d+|-)\s+(?P<free>-?\d+|-)\s+(\d+%|-)\s+/.*$"
)


def commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    path = required_path(filesystem, "df")
    return ("df", "-P", "-k", *filesystem.arguments, "--", path), (
        "df",
        "-P",
        "-i",
        *filesystem.arguments,
        "--",
        path,
    )


def parse(outputs: Sequence[CommandOutput]) -> UsageReading:
    """Bytes from the first output, inodes from the second.

    The limit is used + available, as in df's own percentage: what is kept back for the superuser is
    no one's to fill.
    """
    used, free = _row(outputs[0])
    if used is None or free is None:
        raise SourceError("df does not count this file system's blocks")
    inodes, inodes_free = _row(outputs[1])
    # some know no such limit
    counted = inodes is not None and inodes_free is not None and inodes + inodes_free > 0
    return UsageReading(
        bytes_used=used * KIBI,
        bytes_limit=(used + max(0, free)) * KIBI,
        bytes_free=max(0, free) * KIBI,
        inodes_used=inodes if counted else None,
        inodes_limit=(inodes or 0) + max(0, inodes_free or 0) if counted else None,
    )


def _row(output: CommandOutput) -> tuple[int | None, int | None]:
    """Used and available of the one row."""
    lines = answered(output).splitlines()
    rows = [match for match in map(_ROW.match, lines[1:]) if match]
    if len(rows) != 1:
        raise SourceError(f"{len(rows)} rows where one is expected")
    used, free = rows[0]["used"], rows[0]["free"]
    return None if used == "-" else int(used), None if free == "-" else int(free)


SOURCE = UsageSource("df", commands, parse)
