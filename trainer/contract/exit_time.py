"""When an attempt's trainer leaves by the clock: what the scheduler's limit on its job is now, not when it was sent.

Who started the trainer keeps it in the attempt's folder, and changes it when the limit is changed. Standard library
only.
"""

from __future__ import annotations

from pathlib import Path

from trainer.contract.documents import document, read_record
from trainer.contract.files import write_json
from trainer.contract.record import Record


class ExitTime(Record):
    """`time`: seconds since the epoch, None where no clock ends the attempt. `why`: what it follows from, one line."""

    time: float | None
    why: str = ""

    @classmethod
    def read(cls, path: Path) -> ExitTime | None:
        """The exit time in `path`, None when absent. Raises ValueError when it is malformed, OSError."""
        found = read_record(cls, path, "how long exits take")
        if found is not None and not (found.time is None or isinstance(found.time, (int, float))):
            raise ValueError(f"{path} has no time: {found.time!r}")
        return found

    def write(self, path: Path) -> None:
        """Raises OSError as the file system does."""
        write_json(path, document(self))
