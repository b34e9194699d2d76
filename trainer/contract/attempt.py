"""What an attempt tells its trainer: who started it, how it is asked to stop, where its lines go,
what a drill breaks, and when it leaves by the clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainer.contract.documents import read_record, write_record
from trainer.contract.files import host_name, write_json
from trainer.contract.paths import RunPaths
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
