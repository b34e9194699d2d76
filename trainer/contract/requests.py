"""What people ask of a training through files in its run directory: rights to write there are all
that it takes.

    kill-switch                          save and stop, or (kind "kill-now") end within seconds without saving
    state/requests/checkpoint-now.json   save at the next step and go on
    state/requests/pause.json            no attempt trains but the one that it names
    state/requests/profile.json          trace some steps of one rank
    state/requests/compute-check.json    compute one micro batch twice on every rank, and compare
    state/requests/operations.json       every rank writes what it did last with the others, even while it hangs

A file counts by its existence; what it says is who asked and why, and a number. A rank that has
honoured the request says so by writing that number into its heartbeat. A file made by hand
(`touch`) has no number, and no receipts.

Standard library only.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from trainer.contract.attempt import tell
from trainer.contract.documents import read_record, write_record
from trainer.contract.files import host_name
from trainer.contract.paths import RunPaths
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json

Kind = Literal["kill", "kill-now", "checkpoint", "pause", "profile", "operations", "compute-check"]
KINDS: tuple[Kind, ...] = (
    "kill",
    "kill-now",
    "checkpoint",
    "pause",
    "profile",
    "operations",
    "compute-check",
)
MOST_PROFILED_STEPS = 10
BY_HAND = 0  # the number of a request that has none
LARGEST_NUMBER = 2**31 - 1
NO_RANK = -1  # a profile's, where what it says is no rank
WATCH_SECONDS = 1.0


class Request(Record):
    """One request. `id`: 1 to 2**31 - 1, so that the ranks can tell each other. `directory`: the
    run that is meant.

    `exempt` is the attempt (a job's number) that a pause lets train to its end. `steps` and `rank`:
    of a profile.
    """

    kind: Kind
    id: int = BY_HAND
    who: str = ""
    host: str = ""
    time: float = 0.0
    why: str = ""
    directory: str = ""
    exempt: str = ""
    steps: int = 0
    rank: int = 0

    def write(self, path: Path) -> None:
        """Make the request, in one step. Raises OSError as the file system does."""
        write_record(path, self)

    def __str__(self) -> str:
        if self.who and self.host:
            by = f"{self.who} on {self.host}"
        else:
            by = self.who or "someone, by hand"
        if self.why:
            return f"{by} ({self.why})"
        return by


def new_request(kind: Kind, who: str, why: str, directory: Path, exempt: str = "") -> Request:
    """A request with a number that no other has, but by an accident of one in two thousand million."""
    return Request(
        kind,
        1 + secrets.randbelow(2**31 - 1),
        who=who,
        host=host_name(),
        time=time.time(),
        why=why,
        directory=str(directory),
        exempt=exempt,
    )


def read_request(path: Path, kind: Kind) -> Request | None:
    """The request at `path`; None when nothing lies there. What cannot be read is a request of
    `kind`, by hand.
    """
    if not os.path.lexists(path):
        return None
    try:
        value = read_json(path) or {}
        known: JsonObject = {
            name: value[name] for name in Request.__struct_fields__ if name in value
        }
        request = Request(**{"kind": kind, **known})
    except (OSError, ValueError, TypeError):
        return Request(kind)
    return replace(
        request,
        kind=request.kind if request.kind in KINDS else kind,
        id=_number(request.id, BY_HAND),
        steps=_number(request.steps, 0),
        rank=_number(request.rank, NO_RANK),
    )


def _number(value: object, otherwise: int) -> int:
    """What the ranks can tell each other, 0 to 2**31 - 1; `otherwise` for anything else that a file
    says.
    """
    if type(value) is int and 0 <= value <= LARGEST_NUMBER:
        return value
    return otherwise


def pause_of(paths: RunPaths, job_id: str) -> Request | None:
    """The pause that keeps this attempt from training; None when there is none, or when it lets
    this attempt train.
    """
    request = read_request(paths.pause, "pause")
    if request is None or (request.exempt and request.exempt == job_id):
        return None
    return request


class RequestAnswer(Record):
    """What became of a request: `step` is the checkpoint's, the last profiled or the checked one;
    None where there is none, or where results differ.
    """

    id: int
    step: int | None
    message: str
    time: float
    job_id: str

    @classmethod
    def read(cls, path: Path) -> RequestAnswer | None:
        """The answer in `path`; None when there is none yet. Raises ValueError when it is
        malformed.
        """
        return read_record(cls, path, "an answer")


def leave_answer(paths: RunPaths, answer: RequestAnswer) -> None:
    """Write the answer for who asked. A file system that refuses it is said: the training goes on."""
    try:
        write_record(paths.answer(answer.id), answer)
    except OSError as error:
        tell(f"tr11: the answer to a request could not be written: {error}")


def watch_for_kill_now(
    kill_switch: Path, leave: Callable[[Request], object], also: Callable[[], object] = lambda: None
) -> None:
    """Look for a `kill-now` from a thread of its own, and call `leave` with it: whatever the
    training waits for.

    Every rank looks for itself: none could rely on another one that hangs. `also` is called at each
    look; where it fails, that is said once for each reason, and the looking goes on.
    """

    def watch() -> None:
        said = ""
        while True:
            request = read_request(kill_switch, "kill")
            if request is not None and request.kind == "kill-now":
                leave(request)
                return
            try:
                also()
            except Exception as error:
                words = f"tr11: the thread that looks for kill-now goes on after {type(error).__name__}: {error}"
                if words != said:
                    tell(words)
                said = words
            time.sleep(WATCH_SECONDS)

    threading.Thread(target=watch, name="kill-now", daemon=True).start()
