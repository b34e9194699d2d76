"""Files in, diagnoses out: reads the logs and judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.diagnose.causes import judge, judge_after
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.reading import blocks, in_order
from tr11ops.diagnose.scan import LogScan
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.diagnose.signature import FaultClass, NextStep
from trainer.contract.record import Record

Progress = Callable[[int], None]
CLOCKS_SECONDS = 5.0  # what a file server's clock and a node's may be apart


def _untold(position: int) -> None:
    """No one wants to know how far the reading is."""


def diagnose_files(
    paths: Sequence[Path], every: bool = False, progress: Progress = _untold
) -> list[Diagnosis]:
    """The diagnosis of the last launch in these logs; with `every`, of each launch, the oldest
    first.

    `progress` is told how many bytes were read so far. Without logs nothing is known. Raises
    OSError; ValueError for a damaged compressed file.
    """
    logs = _read(paths, progress)
    if every and len(logs) == 1:
        return [judge([launch], logs[0][:place]) for place, launch in enumerate(logs[0])]
    if not logs:
        return [judge([LogLaunch("")])]
    return [judge_after(logs)]


def if_it_goes_on(found: Diagnosis) -> Diagnosis:
    """The same as `running` where no fault is told, and the last line of a log that is still written
    is a whole step: nothing says that it ended.
    """
    if found.fault is not FaultClass.UNKNOWN or found.step is not NextStep.NONE:
        return found
    if not found.signs.runs_on:
        return found
    return replace(found, fault=FaultClass.RUNNING)


class LaunchNumber(Record):
    """A launch of an attempt, as the line says with which it begins. `start`: seconds since the
    epoch.
    """

    attempt: str
    number: int
    start: float


def diagnose_launch(
    paths: Sequence[Path], which: LaunchNumber, progress: Progress = _untold
) -> Diagnosis | None:
    """The diagnosis of one launch by what these logs say of it alone; None where they say nothing
    of it.

    Main logs and workers' logs hold earlier launches too, and later ones; a log that was written
    last before the launch began says nothing. One without any launch's line, of an older tr11, is
    judged by what stands last. Raises as `diagnose_files` does.
    """
    fresh = [path for path in paths if path.stat().st_mtime >= which.start - CLOCKS_SECONDS]
    found = [_part_of(launches, which) for launches in _read(fresh, progress)]
    parts = [part for part in found if part]
    if not parts:
        return None
    last = judge_after(parts)
    return replace(last, launch=which.attempt, number=which.number)


def nothing_known(attempt: str, number: int | None = None) -> Diagnosis:
    """The diagnosis of a launch of which no log says anything."""
    return replace(judge([LogLaunch("")]), launch=attempt, number=number)


def _part_of(launches: Sequence[LogLaunch], which: LaunchNumber) -> list[LogLaunch]:
    """Of a log's launches the one that is asked for, after those before it; none where it is not
    there.
    """
    if all(launch.number is None for launch in launches):
        return list(launches)
    mine = [
        place
        for place, one in enumerate(launches)
        if (one.label, one.number) == (which.attempt, which.number)
    ]
    if not mine:
        return []
    place = mine[-1]  # a job that was put back into the queue counts its launches anew
    while place + 1 < len(launches) and launches[place + 1].number is None:
        place += 1  # what its program takes for a start of its own
    return list(launches[: place + 1])


def _read(paths: Sequence[Path], progress: Progress) -> list[list[LogLaunch]]:
    """All launches of each log, the oldest first."""
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
    return logs
