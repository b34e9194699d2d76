"""What the batch controller writes down: one record for each launch, and one for the attempt.

state/attempts/JOB/launches/N.json    a launch: nodes, start, end, cause, blamed nodes, evidence, progress
state/attempts/JOB/verdict.json       how the attempt ended, and whether the next task should go on
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.units import counted
from trainer.contract.documents import document, read_record, record_of
from trainer.contract.end_marker import EXIT_ERROR, EXIT_HELD, EndMarker, exit_code
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.record import Finite, Record
from trainer.contract.state_file import read_json

ATTEMPT_FILE, VERDICT_FILE = "attempt.json", "verdict.json"
SUPERSEDED = "superseded"  # the end of an attempt that found another one of its run training


def attempt_label(record: Mapping[str, Any], job_id: str) -> str:
    """An attempt's number as people see and type it: ARRAY_TASK, or the scheduler's own where it is
    of no array.

    `record` is what attempt.json holds. Folders and records go by `job_id`, the scheduler's own
    number.
    """
    array, task = record.get("array_id"), record.get("task_id")
    if array in (None, "") or task in (None, ""):
        return job_id
    return f"{array}_{task}"


def read_attempt_label(paths: RunPaths, job_id: str) -> str:
    """The same, from the attempt's folder; the scheduler's own number where its record is not there
    or unreadable.
    """
    return label_in(paths.attempt(job_id))


def label_in(folder: Path) -> str:
    """The same of the attempt whose folder this is."""
    try:
        record = read_json(folder / ATTEMPT_FILE)
    except (OSError, ValueError):
        return folder.name
    if isinstance(record, dict):
        return attempt_label(record, folder.name)
    return folder.name


def launch_line(job_id: str, launch: int, node_count: int) -> str:
    """How a launch begins in the main log and in each worker's own, which later launches of the
    attempt write on.
    """
    return f"tr11: attempt {job_id} launch {launch} on {counted(node_count, 'node')}"


class LaunchRecord(Record):
    """One launch. Times are seconds since the epoch, None where there is none (yet).

    `first_sign`: when the first failed process was seen. `decision`: what followed, in one line. `iteration_*` and
    `checkpoint_*`: the highest logged iteration and the newest checkpoint before the launch and at its end.
    `reached`: the last iteration that this very launch logged, None where it logged none. `checked`: whether nodes told
    how their health checks ended; `failed_checks`, `passed_checks`: nodes by check, for each that failed anywhere;
    `left_out_checks`: those that were not run, because they fail everywhere; `failing_checks`: those,
    and what this launch has shown to fail everywhere. `older_checkpoint`: the step of an older checkpoint from which
    the training then was to go on, because this fault came at one step again. `restart`: whether a plain restart helps
    (plain, elsewhere, change, unknown, none), how sure that is, and why; "" where an older tr11 wrote it.
    `avoided`: those of the suspects that are not used any more while enough others are free.
    """

    launch: int
    nodes: tuple[str, ...]
    start: Finite
    end: Finite | None = None
    first_sign: Finite | None = None
    exit_status: int | None = None
    cause: str = ""
    summary: str = ""
    confidence: Finite | None = None
    blamed: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    fault: str = ""
    srun_lines: tuple[str, ...] = ()
    decision: str = ""
    iteration_before: int | None = None
    checkpoint_before: int | None = None
    iteration_after: int | None = None
    checkpoint_after: int | None = None
    reached: int | None = None
    checked: bool = False
    failed_checks: dict[str, list[str]] = field(default_factory=dict)
    passed_checks: dict[str, list[str]] = field(default_factory=dict)
    left_out_checks: tuple[str, ...] = ()
    failing_checks: tuple[str, ...] = ()
    older_checkpoint: int | None = None
    restart: str = ""
    restart_confidence: Finite | None = None
    restart_why: str = ""
    avoided: tuple[str, ...] = ()

    @staticmethod
    def path(attempt: Path, launch: int) -> Path:
        return attempt / "launches" / f"{launch}.json"

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> LaunchRecord:
        """The record that a file holds; what another tr11 wrote beside is left out. Raises
        ValueError.
        """
        return record_of(cls, value)

    def write(self, attempt: Path) -> None:
        """Raises OSError as the file system does."""
        write_json(self.path(attempt, self.launch), document(self))


class AttemptVerdict(Record):
    """How an attempt ended; written when its last launch has ended.

    `restart`: should the next task train on? `held`: the waiting jobs that were held because it
    should not; `hold_failed`: not all could be; `held_for`: the kill switch or pause for which
    alone they were held. `progress`: did any launch add an iteration or a checkpoint? `fault` names
    the fault free of what changes from one time to the next; `blamed` are the nodes found bad.
    `held_because`: why the rest was to be held, which is more than how the attempt ended; "" where
    an older tr11 wrote it.
    """

    reason: str
    iteration: int | None
    checkpoint_step: int | None
    exit_status: int
    message: str
    restart: bool = True
    cause: str = ""
    fault: str = ""
    blamed: tuple[str, ...] = ()
    progress: bool = False
    launches: int = 0
    held: tuple[str, ...] = ()
    hold_failed: bool = False
    held_for: str = ""
    job_id: str = ""
    submission: str = ""
    time: Finite = 0.0
    held_because: str = ""

    def write(self, attempt: Path) -> None:
        """Raises OSError as the file system does."""
        write_json(attempt / VERDICT_FILE, document(self))

    @classmethod
    def read(cls, attempt: Path) -> AttemptVerdict | None:
        """The verdict in an attempt's folder, None when absent. Raises OSError or ValueError when
        it is not one.
        """
        return read_record(cls, attempt / VERDICT_FILE, "a verdict")


def why_held(because: str, ended: str) -> str:
    """Why an attempt let nothing follow, and how it ended: one sentence where one of them holds the
    other.
    """
    said = (because, ended)
    if because:
        both = f"{because}: {ended}"
    else:
        both = ended
    return next((one for one in said if all(other in one for other in said)), both)


def of_marker(marker: EndMarker) -> AttemptVerdict:
    """The verdict that is the trainer's own word: a failing launcher after a clean end changes
    nothing.
    """
    return AttemptVerdict(
        marker.reason,
        marker.iteration,
        marker.checkpoint_step,
        exit_code(marker.reason),
        marker.message,
        restart=marker.restart,
    )


def of_failure(message: str, iteration: int | None, checkpoint: int | None) -> AttemptVerdict:
    """The verdict of an attempt whose last launch failed, after which the next task may try."""
    return AttemptVerdict("error", iteration, checkpoint, EXIT_ERROR, message)


def without_restart(verdict: AttemptVerdict) -> AttemptVerdict:
    """The same end, but nothing may start before a person has looked; the exit status says so."""
    return replace(verdict, restart=False, exit_status=EXIT_HELD)
