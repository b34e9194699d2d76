"""Runs a source's commands: with the lowest priority, a time limit, bounded output, and nothing
left behind.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Protocol

from tr11ops.base.errors import SourceError
from tr11ops.filesystems.reading import CommandOutput

MOST_BYTES = 1 << 20  # of one command's output that are kept
LOOK_SECONDS = 0.05
# for a killed process to be gone; one that hangs in a dead file system is left to the kernel
LAST_SECONDS = 2.0


class Runner(Protocol):
    """Runs one command line to its end, in any thread."""

    def run(self, command: Sequence[str], seconds: float) -> CommandOutput:
        """Raises SourceError when the command cannot be run or does not end in time."""
        ...

    def cancel(self) -> None:
        """End everything that runs, now and from now on."""
        ...


@dataclass
class NicedRunner:
    """The commands as they are, below `timeout`: should this process be killed, they end by
    themselves in time.
    """

    environment: Mapping[str, str]
    _cancelled: threading.Event = field(default_factory=threading.Event, init=False)

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, command: Sequence[str], seconds: float) -> CommandOutput:
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
        return CommandOutput(text, status, error_text)

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
