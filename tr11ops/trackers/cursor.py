"""How far a tracker has been told, in the run directory: state/trackers/NAME.json."""

from __future__ import annotations

from pathlib import Path

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import read_record, write_record
from trainer.contract.files import make_shared
from trainer.contract.record import Finite, Record

SCHEMA = 1


class Cursor(Record):
    """`place` is where the tracker's own data are, `offset` the byte of `metrics.jsonl` behind the last
    line that was sent, `iteration` the newest that was sent (-1: none), `points` how many so far.
    """

    tracker: str
    place: str
    key: str
    known_as: str = ""
    offset: int = 0
    iteration: int = -1
    points: int = 0
    time: Finite = 0.0
    schema: int = SCHEMA


def cursor_path(directory: RunDirectory, tracker: str) -> Path:
    """Where the cursor of a tracker lies."""
    return directory.paths.state / "trackers" / f"{tracker}.json"


def read_cursor(directory: RunDirectory, tracker: str) -> Cursor | None:
    """None where nothing was sent yet. Raises DamagedFile, NewerFormat, OSError."""
    path = cursor_path(directory, tracker)
    return read_record(Cursor, path, "how far a tracker has been told", schema=SCHEMA)


def write_cursor(directory: RunDirectory, cursor: Cursor) -> None:
    """Whole or not at all. Raises OSError."""
    path = cursor_path(directory, cursor.tracker)
    make_shared(path.parent)
    write_record(path, cursor)
