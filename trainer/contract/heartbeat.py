"""The heartbeat of one rank: its phase, iteration and time."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.documents import document, read_record
from trainer.contract.files import write_unflushed
from trainer.contract.record import Finite, Record


class Heartbeat(Record):
    """Where one rank is: written at every change of phase and every step, replaced atomically.

    `request` is the number of the last request (see `trainer.contract.requests`) that this rank has
    honoured; 0: none yet.
    """

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    time: Finite
    job_id: str
    request: int = 0

    @classmethod
    def read(cls, path: Path) -> Heartbeat | None:
        """The heartbeat in `path`, or None when absent. Raises ValueError when it is malformed."""
        return read_record(cls, path, "a heartbeat")


def write_heartbeat(path: Path, heartbeat: Heartbeat) -> None:
    """Replace one rank's heartbeat. Not flushed to disk: it is worth nothing after a power cut."""
    write_unflushed(path, document(heartbeat), heartbeat.pid)
