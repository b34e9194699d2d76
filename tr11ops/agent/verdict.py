"""How an attempt ended, concluded from evidence: the trainer's end marker first, then what the step left behind."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import END_MARKER_FILE, EXIT_ERROR, EXIT_FINE, EXIT_REFUSED, EndMarker, write_json

_KILLED_TASK = re.compile(r"^srun: error: .*: tasks? [\d,-]+: Killed")  # a person, or the kernel for want of memory


@dataclass(frozen=True)
class AttemptVerdict:
    """Written as `state/attempts/JOBID/verdict.json` by the batch controller when its last launch has ended."""

    reason: str
    iteration: int | None
    checkpoint_step: int | None
    exit_status: int
    message: str


def conclude(
    marker: EndMarker | None, step_status: int, first_failure: str | None, srun_lines: tuple[str, ...]
) -> AttemptVerdict:
    """The verdict of one attempt.

    Exit status 0 is not success: without the trainer's own end marker the attempt failed.
    A marker is success even when the step's status is not 0: the launcher may fail after a clean end.
    But a stop by signal that followed a failure is a failure, saved: the survivors were told to leave.
    """
    killed = next((line for line in srun_lines if _KILLED_TASK.search(line)), None)
    if marker is not None and not (marker.reason == "signal" and (first_failure or killed)):
        status = {"error": EXIT_ERROR, "refused": EXIT_REFUSED}.get(marker.reason, EXIT_FINE)
        return AttemptVerdict(marker.reason, marker.iteration, marker.checkpoint_step, status, marker.message)
    evidence = first_failure or (
        srun_lines[0] if srun_lines else f"the workers ended with status {step_status} and no word"
    )
    if marker is not None:
        return AttemptVerdict("error", marker.iteration, marker.checkpoint_step, EXIT_ERROR, killed or evidence)
    return AttemptVerdict("error", None, None, EXIT_ERROR, evidence)


def trainer_is_done(attempt: Path, launch: int) -> bool:
    """Has the trainer of this launch left its end marker?"""
    try:
        marker = EndMarker.read(attempt / END_MARKER_FILE)
    except (ValueError, OSError):
        return False
    return marker is not None and marker.launch == launch


@dataclass(frozen=True)
class Death:
    """A process that signal `number` ended, so that it cannot tell of it itself. `rank`: of a worker, else None."""

    what: str
    host: str
    number: int
    launch: int
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.what} was ended by {signal.Signals(self.number).name}"

    def write(self, attempt: Path, name: str) -> None:
        """Keep it as `failures/NAME-HOST.json`, for `first_failure`. Raises OSError when it cannot be written."""
        value = {"rank": self.rank, "host": self.host, "time": time.time(), "launch": self.launch, "error": str(self)}
        write_json(attempt / "failures" / f"{name}-{self.host}.json", {**value, "signal": self.number})


def first_failure(attempt: Path) -> str | None:
    """The failure that came first: `rank R on HOST: ERROR`; None when none was recorded.

    A process that was killed comes before all others: the time of its record is when its launcher noticed, and until
    then its peers have said that they lost it.
    """
    found = []
    for path in (attempt / "failures").glob("*.json"):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            who = value["host"] if value["rank"] is None else f"rank {value['rank']} on {value['host']}"
            found.append((value.get("signal") is None, float(value["time"]), f"{who}: {value['error']}"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a half-dead node may leave half a record; the others still speak
    return min(found)[2] if found else None
