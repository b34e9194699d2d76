"""What a training does now, by each rank's heartbeat; and the phases of one attempt, in order: rank
0 appends a line at each change, so that no one has to guess later.

    {"time": 1790000000.25, "phase": "saving", "iteration": 300, "launch": 2}

A phase lasts until the
next line, or until its launch ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.documents import document, read_record, record_of_text
from trainer.contract.files import make_shared, open_shared, write_unflushed
from trainer.contract.record import Finite, Record
from trainer.contract.state_file import read_bytes


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


# What the trainer reports, in the order of a launch. `compiling`: a step of a kind that this launch
# does for the first time, whose code is made in it. `data-wait`: the next step's data are not there
# yet.
PHASES = (
    "starting",
    "loading",
    "compiling",
    "training",
    "data-wait",
    "saving",
    "evaluating",
    "ending",
    "ended",
)
STEPPING = ("training", "compiling")  # in which a step is done


class PhaseRecord(Record):
    """The begin of a phase: seconds since the epoch, the iteration that was done by then, the
    launch it belongs to.
    """

    time: Finite
    phase: str
    iteration: int
    launch: int


@dataclass
class PhaseWriter:
    """Appends to one attempt's file, one line in one write. The file is made with the first line.

    A file system that refuses must not stop a training: `complain` hears of it, once.
    """

    path: Path
    launch: int
    complain: Callable[[str], None]

    def __post_init__(self) -> None:
        self._phase = ""
        self._complained = False
        # by the launch before, which may have been killed in the middle of a line
        self._may_be_torn = True

    def enter(self, phase: str, iteration: int, now: float) -> None:
        """Record the phase, unless the training is in it already."""
        if phase == self._phase:
            return
        self._phase = phase
        line = json.dumps(document(PhaseRecord(now, phase, iteration, self.launch))) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._complained:
                self._complained = True
                self.complain(f"phases cannot be recorded: {error}")

    def _append(self, line: bytes) -> None:
        try:
            descriptor = self._open()
        except FileNotFoundError:  # a training without a controller has no folder yet
            make_shared(self.path.parent)
            descriptor = self._open()
        try:
            if self._may_be_torn and os.fstat(descriptor).st_size:
                line = b"\n" + line
            self._may_be_torn = True
            self._may_be_torn = os.write(descriptor, line) != len(line)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return open_shared(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)


def read_phases(path: Path) -> tuple[PhaseRecord, ...]:
    """All records in the order they were written; none when there is no file. Raises OSError as the
    file system does.

    A line that was cut, or is no record, is left out.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return ()
    records = (parse_phase(line) for line in content.split(b"\n") if line.strip())
    return tuple(record for record in records if record is not None)


def parse_phase(line: bytes | str) -> PhaseRecord | None:
    """The record in one line, or None if the line is none."""
    try:
        return record_of_text(PhaseRecord, line)
    except ValueError:
        return None
