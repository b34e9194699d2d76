"""What an attempt tells its trainer: who started it, how it is asked to stop, where its lines go,
what a drill breaks, and when it leaves by the clock. And what the trainer tells: by each rank's
heartbeat what it does now; the phases of the attempt, in order; and by the end marker, and the exit
code that goes with it, how it ended.

    {"time": 1790000000.25, "phase": "saving", "iteration": 300, "launch": 2}

Rank 0 appends such a line at each change of phase, so that no one has to guess later. A phase lasts
until the next line, or until its launch ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

from trainer.contract.documents import document, read_record, record_of_text, write_record
from trainer.contract.errors import UsageError
from trainer.contract.files import host_name, make_shared, open_shared, write_json, write_unflushed
from trainer.contract.paths import END_MARKER_FILE, RunPaths
from trainer.contract.record import Count, Finite, RankCount, Record
from trainer.contract.state_file import read_bytes


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


# What a drill tells a trainer: the phases, and the variable that names them.

# as the heartbeat names them
DRILL_PHASES = ("starting", "training", "evaluating", "saving", "data-wait")


DRILL_VARIABLE = (
    "TR11_DRILL"  # the phases to drill, one for each task of an array: "starting,training"
)


STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # while a child of a command starts


class AttemptIdentity(Record):
    """Who started this trainer: read from the environment that the node agent (or a person) gave
    it.

    `stop_request` is a file whose existence asks for save-and-exit: unlike a signal it cannot come
    before a worker has installed its handler.
    """

    job_id: str
    launch: int
    stop_request: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], paths: RunPaths) -> AttemptIdentity:
        """Under a bare launcher the attempt is named after the launcher's process."""
        job_id = (
            environment.get("TR11_JOB_ID")
            or environment.get("SLURM_JOB_ID")
            or f"pid-{os.getppid()}"
        )
        return cls(job_id, int(environment.get("TR11_LAUNCH", "1")), paths.stop_request(job_id))


def request_stop(path: Path, who: str) -> None:
    """Ask a trainer to save and leave at its next step. Does nothing when it was already asked."""
    if not os.path.lexists(path):
        write_json(path, {"by": who, "host": host_name(), "time": time.time()})


def hear_signals() -> None:
    """Let the signals come that a parent held back for the start of this process
    (`tr11ops.cli.trainer_child`).

    Called where a handler waits for them: what came while the interpreter started is raised here.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def read_command_request(words: Sequence[str]) -> SimpleNamespace:
    """The command that `tr11` has a child do, and the value of each of its options: one JSON object
    (`tr11ops.cli.trainer_child`). Raises UsageError where a person typed something else.
    """
    try:
        return SimpleNamespace(**json.loads(*words))
    except (TypeError, ValueError):
        raise UsageError("type `tr11 data` or `tr11 checkpoints`, which start this") from None


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line (default: stdout). A launcher makes the stream a file, and a full disk must not
    end a training.
    """
    with suppress(OSError):
        print(line, file=stream or sys.stdout, flush=True)


def read_card_hash(card: Path) -> str:
    """The hash that the launcher wrote into the resolved card; empty for a card made by hand.

    Read it once, at the start: later the file may be gone, on one node and not on another.
    """
    if not card.is_file():
        return ""
    derived = json.loads(card.read_text(encoding="utf-8")).get("derived", {})
    return str(derived.get("card_hash", ""))


class EndMarker(Record):
    """The trainer's own word on how it ended. Its absence after a job ended means: it did not end
    by itself.

    `reason` is one of END_REASONS; `restart` says whether the next array task should go on
    training. `node`: the one at fault for an error, where all ranks know that it is one's alone.
    """

    reason: str
    iteration: int
    checkpoint_step: int | None
    restart: bool
    message: str
    time: Finite
    host: str
    job_id: str
    launch: int = 1  # 0: the attempt left before its first
    node: str = ""

    @classmethod
    def read(cls, path: Path) -> EndMarker | None:
        """The marker in `path`, or None when absent. Raises ValueError when it is malformed."""
        return read_record(cls, path, "an end marker")

    @classmethod
    def of_launch(cls, attempt: Path, launch: int) -> EndMarker | None:
        """The marker in the attempt's folder, if it is this launch's. Raises OSError or ValueError
        when it cannot be read.
        """
        marker = cls.read(attempt / END_MARKER_FILE)
        if marker is not None and marker.launch == launch:
            return marker
        return None

    @property
    def has_trained(self) -> bool:
        """Whether the attempt may have taken a step. Where it has not, `iteration` and
        `checkpoint_step` are what the run had before it.
        """
        return self.launch > 0 and self.reason != "refused"

    @property
    def place(self) -> str:
        """Where the attempt ended, in words that follow its reason."""
        if self.has_trained:
            return f"at iteration {self.iteration}"
        return "before it trained"


END_REASONS = {
    "finished": "all samples were trained",
    "exit-duration": "the attempt's own time was up",
    "exit-interval": "the exit interval was reached",
    "signal": "the scheduler or a person sent a signal",
    "kill-switch": "the kill switch was found",
    "pause": "the run is paused",
    "superseded": "another trainer has taken the run's lease over",
    "refused": "bad input: nothing was trained, and another try would end the same way",
    "error": "the trainer failed",
    "unexplained": "it left in order and unasked, and its last step was not reached, or is not known",
}
# after these something must be repaired, or looked at
BAD_REASONS = frozenset({"error", "refused", "unexplained"})
NO_MARKER = "ended without an end marker"  # how an attempt ended that left none


# What the trainer's process returns, and the batch script. After 2 and 3 no other task may start
# before a person has looked: 2, the input is bad; 3 (of the batch script alone), the fault would
# come again, and queued jobs are held.
EXIT_FINE = 0


EXIT_ERROR = 1


EXIT_REFUSED = 2


EXIT_HELD = 3


def exit_code(reason: str) -> int:
    """The process exit status for an end reason."""
    return {"error": EXIT_ERROR, "refused": EXIT_REFUSED, "superseded": EXIT_REFUSED}.get(reason, 0)


class UnheldCheckpoint(Record):
    """A checkpoint that lies complete in another trainer's own folder. `time`: when it was last written,
    seconds since the epoch.
    """

    step: Count
    time: Finite


class Heartbeat(Record):
    """Where one rank is: written at every change of phase and every step, replaced atomically.

    `request` is the number of the last request (see `trainer.contract.requests`) that this rank has
    honoured; 0: none yet.
    `ranks`: None for a rank's own word. Else another process, `pid`, wrote it for so many ranks, from
    `rank` on: none of them is told apart from another by it, and those of other nodes neither.
    `saved`: the newest checkpoint of another trainer, which is a checkpoint of the run only once it is
    held; None where there is none, or it is the trainer's word.
    """

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    time: Finite
    job_id: str
    request: int = 0
    ranks: RankCount | None = None
    saved: UnheldCheckpoint | None = None

    @property
    def stands_for(self) -> range:
        """The ranks that it tells of."""
        return range(self.rank, self.rank + (self.ranks or 1))

    @property
    def is_own(self) -> bool:
        """Whether the rank itself wrote it, so that its iteration is that very rank's."""
        return self.ranks is None

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
