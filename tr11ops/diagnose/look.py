"""Files in, diagnoses out: reads the logs and judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tr11ops.diagnose.causes import judge, judge_after
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.reading import blocks, in_order
from tr11ops.diagnose.scan import LogScan
from tr11ops.diagnose.sighting import LogLaunch


def diagnose_files(
    paths: Sequence[Path], every: bool = False, progress: Callable[[int], None] = lambda position: None
) -> list[Diagnosis]:
    """The diagnosis of the last launch in these logs; with `every`, of each launch, the oldest first.

    `progress` is told how many bytes were read so far. Without logs nothing is known. Raises OSError; ValueError for a
    damaged compressed file.
    """
    read = 0

    def count(amount: int) -> None:
        nonlocal read
        read += amount
        progress(read)

    logs = []
    for parts in in_order(paths):
        scan = LogScan(str(parts[0]), matcher())
        for path in parts:
            scan.begin_file(str(path))
            for block in blocks(path, count):
                scan.feed(block)
        logs.append(scan.launches())
    if every and len(logs) == 1:
        return [judge([launch]) for launch in logs[0]]
    if not logs:
        return [judge([LogLaunch("")])]
    before = [launches[-2] for launches in logs if len(launches) > 1]
    return [judge_after([launches[-1] for launches in logs], before)]
