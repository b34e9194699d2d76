"""One look at every watched file system: all at the same time, and none of them hides another."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from msgspec.structs import asdict

from tr11ops.base.errors import SourceError
from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.processes import ProbeOutput
from tr11ops.filesystems.sources import SOURCES, UsageReading
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.permissions import PermissionTally, PermissionWalk
from trainer.contract.record import Record

# ----------------------------------------------------------------------------- running the commands
MOST_BYTES = 1 << 20  # of one command's output that are kept
LOOK_SECONDS = 0.05
# for a killed process to be gone; one that hangs in a dead file system is left to the kernel
LAST_SECONDS = 2.0


@dataclass
class NicedRunner:
    """The commands as they are, below `timeout`: should this process be killed, they end by
    themselves in time.
    """

    environment: Mapping[str, str]
    _cancelled: threading.Event = field(default_factory=threading.Event, init=False)

    def cancel(self) -> None:
        """End everything that runs, now and from now on."""
        self._cancelled.set()

    def run(self, command: Sequence[str], seconds: float) -> ProbeOutput:
        """Run one command line to its end, in any thread. Raises SourceError when it cannot be run
        or does not end in time.
        """
        try:
            process = subprocess.Popen(
                [
                    "nice",
                    "-n",
                    "19",
                    "timeout",
                    "-s",
                    "KILL",
                    str(math.ceil(seconds) + 10),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self.environment, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise SourceError(f"{command[0]} cannot be run: {error.strerror or error}") from None
        texts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        readers = [
            threading.Thread(target=_drain, args=(stream, text), daemon=True)
            for stream, text in zip((process.stdout, process.stderr), texts, strict=True)
        ]
        for reader in readers:
            reader.start()
        try:
            status = self._wait(process, command[0], seconds)
        finally:
            _end(process)
        for reader in readers:
            reader.join(LAST_SECONDS)
        text, error_text = (bytes(one).decode("utf-8", "replace") for one in texts)
        if status in {126, 127} and error_text.startswith(("nice:", "timeout:")):
            raise SourceError(
                f"{command[0]} is not there" if status == 127 else f"{command[0]} may not be run"
            )
        return ProbeOutput(status, text, error_text)

    def _wait(self, process: subprocess.Popen[bytes], name: str, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_SECONDS)
            if self._cancelled.is_set():
                raise SourceError(f"{name} was interrupted")
            if time.monotonic() >= deadline:
                raise SourceError(f"{name} gave no answer in {seconds:.0f} s")


def _drain(stream: IO[bytes], text: bytearray) -> None:
    """Keep the beginning and throw the rest away, so that the command never waits for a reader."""
    with suppress(ValueError, OSError):
        while block := os.read(stream.fileno(), 1 << 16):
            text += block[: max(0, MOST_BYTES - len(text))]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the command's own session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_SECONDS)


# ----------------------------------------------------------------------------- the look
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
    sections: Sequence[FilesystemSection], runner: NicedRunner, now: float, seconds: float
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
    section: FilesystemSection, runner: NicedRunner, now: float, seconds: float
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
        bytes_limit=section.most_bytes or reading.bytes_limit,
        inodes_used=reading.inodes_used,
        inodes_limit=section.inodes_limit or reading.inodes_limit,
        bytes_free=reading.bytes_free,
        bytes_share=reading.bytes_share,
        inodes_share=reading.inodes_share,
    )


# ----------------------------------------------------------------------------- rights
# in one folder, beyond the time that there was: the file system is unreachable
HANGING_SECONDS = 30.0


def read_drift(root: Path, seconds: float, clock: Callable[[], float]) -> Observed[PermissionTally]:
    """Walk the tree below `root` for at most about `seconds` of `clock`."""
    deadline = clock() + seconds
    try:
        walk = PermissionWalk(root, root.stat().st_gid, repair=False)

        def stop_in_time(tally: PermissionTally) -> None:
            if clock() >= deadline:
                walk.stop()
            if clock() >= deadline + HANGING_SECONDS and tally.folders < tally.folders_found:
                raise TimeoutError(110, "it gives no answer")

        tally = walk.run(stop_in_time)
    except OSError as error:
        return Unknown(f"{root}: {error.strerror or error}")
    return tally
