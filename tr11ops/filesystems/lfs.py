"""`lfs quota`: quotas of a Lustre file system, of a group (`-g`), a user (`-u`) or a project (`-p`)."""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.filesystems.quota_table import reading_of
from tr11ops.filesystems.reading import Output, Place, Reading, Source, answered, required_path


def commands(place: Place) -> tuple[tuple[str, ...], ...]:
    return (("lfs", "quota", *place.arguments, required_path(place, "lfs")),)


def parse(outputs: Sequence[Output]) -> Reading:
    return reading_of(answered(outputs[0]))


SOURCE = Source("lfs", commands, parse)
