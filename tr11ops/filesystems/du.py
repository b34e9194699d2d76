"""`du`: walks a whole tree and adds up. For where no quota is set; it may take hours."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.base.errors import SourceError
from tr11ops.filesystems.reading import CommandOutput, UsageReading, UsageSource, required_path
from tr11ops.runcard.watching import FilesystemSection

_TOTAL = re.compile(r"(\d+)\s+\S.*")


def commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    """One walk for the bytes; a second one for the inodes only where there is a limit to compare
    them with.
    """
    path = required_path(filesystem, "du")
    walks = [("du", "-bs", *filesystem.arguments, "--", path)]
    if filesystem.inodes_limit is not None:
        walks.append(("du", "-s", "--inodes", *filesystem.arguments, "--", path))
    return tuple(walks)


def parse(outputs: Sequence[CommandOutput]) -> UsageReading:
    """The totals. A non-zero exit status is no failure: on a shared tree some folder is always
    closed to us.
    """
    totals = [_total(output) for output in outputs]
    unread = any(output.status != 0 for output in outputs)
    return UsageReading(
        bytes_used=totals[0],
        inodes_used=totals[1] if len(totals) > 1 else None,
        notes=("du could not look into every folder: there is more than it says",)
        if unread
        else (),
    )


def _total(output: CommandOutput) -> int:
    lines = output.text.splitlines()
    match = None
    if lines:
        match = _TOTAL.fullmatch(lines[-1])
    if match is None:
        said = next(
            (line.strip() for line in reversed(output.error.splitlines()) if line.strip()),
            "no total",
        )
        raise SourceError(f"du: {said[:200]}")
    return int(match[1])


SOURCE = UsageSource("du", commands, parse, is_slow=True)
