"""`lfs quota`: quotas of a Lustre file system, of a group (`-g`), a user (`-u`) or a project
(`-p`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.filesystems.quota_table import reading_of
from tr11ops.filesystems.reading import (
    CommandOutput,
    UsageReading,
    UsageSource,
    answered,
    required_path,
)
from tr11ops.runcard.watching import FilesystemSection


def commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    return (("lfs", "quota", *filesystem.arguments, required_path(filesystem, "lfs")),)


def parse(outputs: Sequence[CommandOutput]) -> UsageReading:
    return reading_of(answered(outputs[0]))


SOURCE = UsageSource("lfs", commands, parse)
