"""Everything that a run's files say of its past: submissions, attempts, phases, steps, checkpoints,
stops, exclusions.

Read-only. What could not be read is Unknown, or a line in `read_errors`; nothing is filled in.
Times are seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.cluster.base import Job, JobState
from tr11ops.goodput.attempts import lives_of, read_attempts
from tr11ops.goodput.history_values import CheckpointMark, History, Period, StepMark
from tr11ops.observe.files import read_submissions
from tr11ops.observe.ownership import Ownership
from tr11ops.rundir.exclusions import EXCLUDED, INCLUDED
from tr11ops.rundir.journal import JournalEntry, Ledger, read_journal
from tr11ops.rundir.paths import RunDirectory, Submission
from tr11ops.rundir.step_time import is_step_time
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.metrics_record import STEP, VALIDATION, records
from trainer.contract.paths import MANIFEST_FILE, RunPaths
from trainer.contract.state_file import open_for_reading

_CREATED = re.compile(r'"created":\s*(\d+(?:\.\d+)?)')


@dataclass
class _Metrics:
    """What one pass over metrics.jsonl gathers."""

    steps: list[StepMark] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)


def read_history(
    directory: RunDirectory,
    jobs: Observed[tuple[Job, ...]],
    ledger: Ledger | None = None,
    scheduler: str = "",
) -> History:
    """Read a run's past. `jobs` are the scheduler's, for what runs now and when what ended gave its
    nodes back.

    `scheduler` is its name, "" where it is not known: another one's numbers are other jobs'.
    `ledger` is the run's journal where the caller has read it already.
    """
    paths, read_errors = directory.paths, list[str]()
    metrics = observed(lambda: read_metrics(paths.metrics))
    steps: Observed[tuple[StepMark, ...]]
    if isinstance(metrics, Unknown):
        steps = metrics
    else:
        steps = tuple(metrics.steps)
    if isinstance(steps, Unknown):
        read_errors.append(f"steps: {steps.why}")
    last_steps = {step.job_id: step.time for step in known(steps, ())}
    if ledger is None:
        ledger = read_journal(directory.journal)
    attempts = observed(lambda: read_attempts(directory, jobs, last_steps, read_errors, ledger))
    if not isinstance(attempts, Unknown):
        lives = (life for attempt in attempts for life in lives_of(attempt, known(steps, ())))
        attempts = tuple(sorted(lives, key=lambda attempt: (attempt.start, attempt.job_id)))
    if isinstance(attempts, Unknown):
        read_errors.append(f"attempts: {attempts.why}")
    if isinstance(jobs, Unknown) and any(attempt.ended is None for attempt in known(attempts, ())):
        read_errors.append(f"jobs: {jobs.why}")
    submissions, unread = read_submissions(directory)
    if isinstance(submissions, Unknown):
        read_errors.append(f"submissions: {submissions.why}")
    read_errors += unread
    read_errors += [str(fault) for fault in ledger.faults if fault.kind != "torn"][:3]
    if isinstance(metrics, _Metrics):
        found = metrics
    else:
        found = _Metrics()
    return History(
        name=paths.name,
        variant=paths.variant,
        submissions=submissions
        if isinstance(submissions, Unknown)
        else tuple(reversed(submissions)),
        attempts=attempts,
        steps=steps,
        checkpoints=observed(lambda: _read_checkpoints(paths)),
        pauses=_pauses(ledger.entries, directory),
        holds=_holds(ledger.entries),
        exclusions=_exclusions(ledger.entries),
        validations=tuple(found.validations),
        waits=_waits(directory, jobs, known(submissions, ()), scheduler),
        read_errors=tuple(read_errors),
    )


def _waits(
    directory: RunDirectory,
    jobs: Observed[tuple[Job, ...]],
    submissions: tuple[Submission, ...],
    scheduler: str,
) -> bool | None:
    if isinstance(jobs, Unknown):
        return None
    ours = Ownership(directory, submissions, directory.paths.variant, scheduler=scheduler)
    return any(job.state is JobState.PENDING and ours.has(job) for job in jobs)


# ----------------------------------------------------------------------------- steps
def read_metrics(path: Path) -> _Metrics:
    """One pass that keeps some hundred bytes of a step. Raises OSError where the file is
    unreadable.
    """
    found = _Metrics()
    for record in records(path):
        if record.time is None:
            continue
        iteration, seconds = record.iteration, record.number("seconds_per_iteration")
        if record.kind == VALIDATION:
            found.validations.append(record.time)
        elif record.kind == STEP and iteration is not None and record.job_id:
            told = seconds if is_step_time(seconds) else None
            found.steps.append(StepMark(record.time, iteration, told, sys.intern(record.job_id)))
    return found


# ----------------------------------------------------------------------------- checkpoints
def _read_checkpoints(paths: RunPaths) -> tuple[CheckpointMark, ...]:
    """The complete checkpoints that are still there, by step; of a manifest only the head is read."""
    found = []
    for step in checkpoint_steps(paths.checkpoints):
        try:
            with open_for_reading(paths.checkpoint(step) / MANIFEST_FILE) as stream:
                match = _CREATED.search(stream.read(8192).decode("utf-8", "replace"))
                if match:
                    when = float(match.group(1))
                else:
                    when = os.fstat(stream.fileno()).st_mtime
        except FileNotFoundError:
            continue
        found.append(CheckpointMark(step, when))
    return tuple(found)


# ----------------------------------------------------------------------------- what people did
def _pauses(entries: Iterable[JournalEntry], directory: RunDirectory) -> tuple[Period, ...]:
    """When the kill switch or a pause was in force, by the journal, and what lies there now, no
    matter who put it there.
    """
    names = {"kill-switch-set": "kill switch", "pause": "pause"}
    found: list[Period] = []
    held: dict[str, JournalEntry] = {}
    for entry in entries:
        if entry.kind in names:
            held.setdefault(names[entry.kind], entry)
        if entry.kind == "kill-switch-released":
            lifted = ["kill switch"]
        else:
            lifted = []
        if entry.kind == "resumed":
            lifted = [str(name) for name in entry.data.get("switches", ())]
        found += [_period(name, held.pop(name), entry.time) for name in lifted if name in held]
    for name, path in (("kill switch", directory.kill_switch), ("pause", directory.paths.pause)):
        since = known(observed(lambda path=path: path.lstat().st_mtime), None)  # type: ignore[misc]
        if since is None:
            held.pop(name, None)  # it was removed by hand, no one knows when
        else:
            found.append(
                _period(name, held[name], None) if name in held else Period(since, None, name)
            )
    return tuple(sorted(found, key=lambda period: period.start))


def _period(name: str, entry: JournalEntry, end: float | None) -> Period:
    return Period(entry.time, end, name, entry.who, entry.why)


def _holds(entries: Iterable[JournalEntry]) -> tuple[Period, ...]:
    """When an attempt held queued jobs after its fault, until someone let it go or submitted again."""
    found: list[Period] = []
    since: JournalEntry | None = None
    for entry in entries:
        if entry.kind == "array-held":
            since = since or entry
        elif since is not None and entry.kind in {"resumed", "submitted", "repaired"}:
            found.append(_period("array-held", since, entry.time))
            since = None
    if since is not None:
        found.append(_period("array-held", since, None))
    return tuple(found)


def _exclusions(entries: Iterable[JournalEntry]) -> tuple[Period, ...]:
    """Which node was excluded from when to when, by the journal."""
    found: list[Period] = []
    since: dict[str, JournalEntry] = {}
    for entry in entries:
        node = str(entry.data.get("node", ""))
        if entry.kind == EXCLUDED:
            since.setdefault(node, entry)
        elif entry.kind == INCLUDED and node in since:
            found.append(_period(node, since.pop(node), entry.time))
    found += [_period(node, entry, None) for node, entry in since.items()]
    return tuple(sorted(found, key=lambda period: period.start))
