"""Words that processes leave about their end: the trainer's end marker, and the death of what could
not speak.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from trainer.contract.end_marker import EndMarker
from trainer.contract.files import write_json
from trainer.contract.record import Record
from trainer.contract.state_file import read_json
from trainer.contract.units import signal_name


def trainer_is_done(attempt: Path, launch: int) -> bool:
    """Has the trainer of this launch left its end marker?"""
    try:
        return EndMarker.of_launch(attempt, launch) is not None
    except (ValueError, OSError):
        return False


def forget_earlier_life(attempt: Path, launch: int) -> None:
    """Remove what is recorded of a launch that has not begun: the job had this number before it was
    requeued.

    What cannot be read or removed stays; it is said by whoever reads it.
    """
    for folder in ("failures", "nodes"):
        for path in (attempt / folder).glob("*.json"):
            with suppress(OSError, ValueError):
                value = read_json(path)
                if isinstance(value, dict) and value.get("launch") == launch:
                    path.unlink()


def keep_launchers_word(attempt: Path, launch: int, host: str, error: str) -> None:
    """Keep why the launcher of a node failed by itself. Raises OSError when it cannot be written."""
    value = {"rank": None, "host": host, "time": time.time(), "launch": launch, "error": error}
    write_json(attempt / "failures" / f"launcher-{host}.json", value)


class Death(Record):
    """A process that signal `number` ended, so that it cannot tell of it itself. `rank`: of a
    worker, else None.
    """

    what: str
    host: str
    number: int
    launch: int
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.what} was ended by {signal_name(self.number)}"

    def write(self, attempt: Path, name: str) -> None:
        """Keep it as `failures/NAME-HOST.json`. Raises OSError when it cannot be written."""
        value = {
            "rank": self.rank,
            "host": self.host,
            "time": time.time(),
            "launch": self.launch,
            "error": str(self),
        }
        write_json(
            attempt / "failures" / f"{name}-{self.host}.json", {**value, "signal": self.number}
        )
