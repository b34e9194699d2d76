"""When an attempt's trainer leaves by the clock: what the scheduler's limit on its job is now, not
when it was sent.

Who started the trainer keeps it in the attempt's folder, and changes it when the limit is changed.
Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from trainer.contract.documents import read_record, write_record
from trainer.contract.record import Finite, Record


class ExitTime(Record):
    """`time`: seconds since the epoch, None where no clock ends the attempt. `why`: what it follows
    from, one line.
    """

    time: Finite | None
    why: str = ""

    @classmethod
    def read(cls, path: Path) -> ExitTime | None:
        """The exit time in `path`, None when absent. Raises ValueError when it is malformed,
        OSError.
        """
        return read_record(cls, path, "how long exits take")

    def write(self, path: Path) -> None:
        """Raises OSError as the file system does."""
        write_record(path, self)
