"""One look at every watched file system: all at the same time, and none of them hides another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec.structs import asdict

from tr11ops.base.errors import SourceError
from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import bytes_of
from tr11ops.filesystems import df, du, idrquota, lfs, quota
from tr11ops.filesystems.reading import UsageReading, UsageSource
from tr11ops.filesystems.runner import LAST_SECONDS, Runner
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import Usage
from trainer.contract.record import Record

SOURCES: Mapping[str, UsageSource] = {
    module.SOURCE.name: module.SOURCE for module in (idrquota, lfs, quota, df, du)
}
MOST = 1e24  # bytes or inodes
QUICK_SECONDS = 120.0  # for a command that only asks


class FilesystemResult(Record):
    """What was seen of one file system: a sample, or why there is none. `report` and `notes`: see
    `UsageReading`.
    """

    name: str
    usage: Observed[Usage]
    report: str = ""
    notes: tuple[str, ...] = ()


def look_at(
    sections: Sequence[FilesystemSection], runner: Runner, now: float, seconds: float
) -> tuple[FilesystemResult, ...]:
    """Ask every source, at once; the looks are in the card's order. `seconds` is what a slow source
    may take in all.
    """
    answers: queue.SimpleQueue[tuple[int, FilesystemResult | BaseException]] = queue.SimpleQueue()

    def ask(number: int, section: FilesystemSection) -> None:
        try:
            answers.put((number, _look(section, runner, now, seconds)))
        except BaseException as error:  # raised again below: a thread's own would be lost
            answers.put((number, error))

    for number, section in enumerate(sections):
        threading.Thread(
            target=ask, args=(number, section), name=f"filesystem-{section.name}", daemon=True
        ).start()
    found: dict[int, FilesystemResult] = {}
    try:
        while len(found) < len(sections):
            number, answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            found[number] = answer
    except BaseException:  # Ctrl-C: nothing may go on walking when this returns
        runner.cancel()
        with suppress(queue.Empty):
            for _ in range(len(sections) - len(found)):
                answers.get(timeout=2 * LAST_SECONDS)
        raise
    return tuple(found[number] for number in range(len(sections)))


def _look(
    section: FilesystemSection, runner: Runner, now: float, seconds: float
) -> FilesystemResult:
    source = SOURCES[section.source]
    if source.is_slow:
        limit = seconds
    else:
        limit = min(seconds, QUICK_SECONDS)
    try:
        commands = source.commands(section)
        outputs = [runner.run(command, limit / len(commands)) for command in commands]
        reading = source.parse(outputs)
        _check(reading)
    except SourceError as error:
        return FilesystemResult(section.name, Unknown(str(error)))
    except (ValueError, ArithmeticError):  # digits without end
        return FilesystemResult(
            section.name, Unknown(f"{source.name} printed a figure that is none")
        )
    return FilesystemResult(
        section.name, _usage(section, reading, now), reading.report, reading.notes
    )


def _check(reading: UsageReading) -> None:
    """Raises SourceError for a figure that cannot be."""
    figures = asdict(reading).values()
    if any(isinstance(figure, int | float) and not 0 <= figure < MOST for figure in figures):
        raise SourceError("it printed a figure that is none")


def _usage(section: FilesystemSection, reading: UsageReading, now: float) -> Usage:
    """The reading as a sample. The card's limits hold, where it has some, instead of what the
    source says.
    """
    return Usage(
        time=now,
        name=section.name,
        source=section.source,
        path=section.path or "",
        bytes_used=reading.bytes_used,
        bytes_limit=bytes_of(section.bytes_limit) if section.bytes_limit else reading.bytes_limit,
        inodes_used=reading.inodes_used,
        inodes_limit=section.inodes_limit or reading.inodes_limit,
        bytes_free=reading.bytes_free,
        bytes_share=reading.bytes_share,
        inodes_share=reading.inodes_share,
    )
