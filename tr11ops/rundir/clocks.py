"""The clocks by which ages are judged before anything is removed: this machine's and the file
server's.
"""

from __future__ import annotations

from pathlib import Path

from trainer.contract.files import file_system_time, make_shared
from trainer.contract.record import Record


class Clocks(Record):
    """What time it is, here and by the file server (None where it was not asked). Seconds since the
    epoch.
    """

    here: float
    server: float | None = None

    def ages(self, moment: float) -> tuple[float, ...]:
        """How long ago that was, by each clock."""
        return tuple(clock - moment for clock in (self.here, self.server) if clock is not None)


def read_clocks(folder: Path) -> Clocks:
    """Ask both clocks: the server stamps a file that is made for it in `folder`. Raises OSError."""
    make_shared(folder)
    return Clocks(*file_system_time(folder))
