"""The circuit breaker's count: a fault burns at most two tasks of an array, whatever else of tr11 is alive.

The task that fails is the one that acts (see `remedy`): where other nodes help, it bars the bad one from the waiting
tasks; where they would not, or have not, it holds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.observe.files import read_steps
from tr11ops.rundir.attempts import SUPERSEDED, VERDICT_FILE, AttemptVerdict
from tr11ops.rundir.paths import RunDirectory

NO_VERDICT = "it ended without a word"
ATTEMPTS_LOOKED_AT = 30


@dataclass(frozen=True)
class Burned:
    """An attempt that failed without any progress."""

    job_id: str
    fault: str


def must_hold(fault: str, before: Sequence[Burned], most: int) -> str:
    """Why the waiting tasks must be held after an attempt that failed without progress; "" when they may go on.

    `before`: the attempts just before it that failed without progress too, newest first. `most` tasks may be burned by
    one fault, twice as many by different ones in a row.
    """
    same = 1
    for burned in before:
        if burned.fault != fault:
            break
        same += 1
    if same >= most:
        return f"{counted(same, 'task was', 'tasks were')} ended by the same fault without progress"
    if len(before) + 1 >= 2 * most:
        return f"{len(before) + 1} tasks in a row ended without progress"
    return ""


def read_burned(directory: RunDirectory, job_id: str) -> tuple[Burned, ...]:
    """The attempts before `job_id` that failed without progress, newest first, up to the first other one.

    An attempt that was held for comes to an end too: who released the work has looked at it.
    """
    found: list[Burned] = []
    trained = {step.job_id for step in known(read_steps(directory.paths), ())}
    for attempt, verdict in attempts_before(directory, job_id):
        if verdict is not None and verdict.reason == SUPERSEDED:
            continue  # it tells nothing of the fault
        if verdict is None and attempt.name not in trained:
            found.append(Burned(attempt.name, NO_VERDICT))
        elif verdict is None or verdict.reason != "error" or verdict.progress or verdict.held:
            break
        else:
            found.append(Burned(attempt.name, verdict.fault))
    return tuple(found)


def attempts_before(directory: RunDirectory, job_id: str) -> Iterator[tuple[Path, AttemptVerdict | None]]:
    """Folders of the attempts other than `job_id`, newest first; the verdict is None where there is none to be read."""
    try:
        entries = [entry for entry in os.scandir(directory.paths.attempts) if entry.is_dir() and entry.name != job_id]
    except FileNotFoundError:
        return
    times = [(_changed(Path(entry.path)), Path(entry.path)) for entry in entries]
    for _, folder in sorted(times, reverse=True)[:ATTEMPTS_LOOKED_AT]:
        try:
            yield folder, AttemptVerdict.read(folder)
        except (OSError, ValueError):
            yield folder, None


def _changed(folder: Path) -> float:
    for path in (folder / VERDICT_FILE, folder / "attempt.json", folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
