"""`quota`: quotas of a user or group on disks and NFS. Its exit status 1 means no more than that
one is passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.filesystems.quota_table import reading_of
from tr11ops.filesystems.reading import CommandOutput, UsageReading, UsageSource, answered
from tr11ops.runcard.watching import FilesystemSection


def commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    """With a path, of the file system that is mounted there; else the fullest one counts."""
    where = ("-f", filesystem.path) if filesystem.path else ()
    return (("quota", "-w", *filesystem.arguments, *where),)


def parse(outputs: Sequence[CommandOutput]) -> UsageReading:
    output = outputs[0]
    return reading_of(
        answered(
            replace(output, status=0) if output.status == 1 and output.text.strip() else output
        )
    )


SOURCE = UsageSource("quota", commands, parse)
