"""How an attempt ended, concluded from evidence: the trainer's end marker first, then what the step left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import EXIT_ERROR, EXIT_FINE, EXIT_REFUSED, EndMarker


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
    """
    if marker is not None:
        status = {"error": EXIT_ERROR, "refused": EXIT_REFUSED}.get(marker.reason, EXIT_FINE)
        return AttemptVerdict(marker.reason, marker.iteration, marker.checkpoint_step, status, marker.message)
    evidence = first_failure or (
        srun_lines[0] if srun_lines else f"the workers ended with status {step_status} and no word"
    )
    return AttemptVerdict("error", None, None, EXIT_ERROR, evidence)


def first_failure(attempt: Path) -> str | None:
    """The earliest failure that a worker recorded: `rank R on HOST: ERROR`; None when none was recorded."""
    found = []
    for path in (attempt / "failures").glob("rank-*.json"):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            found.append((float(value["time"]), f"rank {value['rank']} on {value['host']}: {value['error']}"))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a half-dead node may leave half a record; the others still speak
    return min(found)[1] if found else None
