"""What the rounds of a periodic job wrote: one file per job, whose size is bounded in every case."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tr11ops.base.observed import cause
from trainer.contract.files import make_shared, open_shared
from trainer.contract.units import printable, shortened

LARGEST_LOG_BYTES = 1 << 20  # then it becomes NAME.log.1, and the older one goes
HEAD_BYTES = 192 << 10  # of one round, as it is written
TAIL_BYTES = 64 << 10  # and its end, when the round is over
LONGEST_LINE = 200


class RoundOutput:
    """The output of one round: kept in the job's log, its end in memory. A log that cannot be
    written stops no job.
    """

    def __init__(self, path: Path, title: str):
        self.fault = ""
        self._path = path
        self._written = 0
        self._dropped = 0
        self._tail = b""
        self._is_at_line_start = True
        self._is_closed = False
        try:
            make_shared(path.parent)
            with suppress(FileNotFoundError):
                if path.stat().st_size > LARGEST_LOG_BYTES:
                    path.replace(path.with_name(f"{path.name}.1"))
        except OSError as error:
            self.fault = cause(error)
        self._append(f"== {title}\n".encode("utf-8", "replace"))

    def feed(self, data: bytes) -> None:
        """Take what the job has just written. What comes after `close`, from a process that
        escaped, is dropped.
        """
        if self._is_closed:
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        kept = data[: max(0, HEAD_BYTES - self._written)]
        self._dropped += len(data) - len(kept)
        self._written += len(kept)
        if kept:
            self._append(kept)

    def close(self, word: str) -> None:
        """Write the end of a long output, and a last line that says how the round went."""
        self._is_closed = True
        lost = self._dropped - len(self._tail)
        if self._dropped:
            self._append(b"\n" if not self._is_at_line_start else b"")
            self._append(f"... {lost} bytes left out ...\n".encode() if lost > 0 else b"")
            self._append(self._tail[-self._dropped :])
        self._append(
            (b"" if self._is_at_line_start else b"\n") + f"-- {word}\n".encode("utf-8", "replace")
        )

    def lines(self) -> list[str]:
        """The last lines that the job wrote, without what a terminal would obey."""
        text = self._tail.decode("utf-8", "replace")
        found = (printable(line, " ").strip() for line in text.splitlines())
        return [shortened(line, LONGEST_LINE) for line in found if line]

    def _append(self, data: bytes) -> None:
        if not data:
            return
        self._is_at_line_start = data.endswith(b"\n")
        try:
            descriptor = open_shared(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.fault = self.fault or cause(error)


def stamp(seconds: float) -> str:
    """A point of time as logs show it: local, with the distance from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
