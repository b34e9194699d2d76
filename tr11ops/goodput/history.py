"""Everything that a run's files say of its past: submissions, attempts, phases, steps, checkpoints,
stops, exclusions.

Read-only. What could not be read is Unknown, or a line in `read_errors`; nothing is filled in.
Times are seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tr11ops.alerts.incidents import OPENED, SENT
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.robust import is_step_time
from tr11ops.base.units import number_in
from tr11ops.cluster.base import Job, JobState
from tr11ops.goodput.history_values import AttemptHistory, CheckpointMark, History, Period, StepMark
from tr11ops.observe.files import read_submissions
from tr11ops.observe.jobs import Ownership
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.rundir.action_log import Result, replay
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord, last_sign_in, told_end
from tr11ops.rundir.exclusions import EXCLUDED, INCLUDED
from tr11ops.rundir.journal import JournalEntry, Ledger, read_journal
from tr11ops.rundir.paths import RunDirectory, Submission
from tr11ops.trainers.watched import WatchedJob
from trainer.contract.attempt import EndMarker, read_phases
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.metrics_record import STEP, MetricsRecord, parse_record, records
from trainer.contract.paths import RunPaths, attempt_label, read_attempt_label
from trainer.contract.state_file import open_for_reading, read_json, tail_lines

# ---------------------------------------------------------------- attempts

LOST_HOST_DETECTORS = frozenset({"node-lost", "zombie"})
# clocks differ by less; what is older than the attempt by more is of another life
REQUEUE_SECONDS = 5.0
TAIL_BYTES = 1 << 18  # of the record of steps: some hundreds of the newest


def read_attempts(
    directory: RunDirectory,
    jobs: Observed[tuple[Job, ...]],
    last_steps: Mapping[str, float],
    read_errors: list[str],
    ledger: Ledger,
) -> tuple[AttemptHistory, ...]:
    found = []
    lost = lost_hosts(ledger)
    cancelled = _cancelled(ledger)
    by_number = {job.raw_id: job for job in known(jobs, ())}
    beats = _heartbeat_times(directory.paths)
    for job_id in directory.attempt_ids():
        sign = max(last_steps.get(job_id, 0.0), beats.get(job_id, 0.0))
        job = by_number.get(job_id)
        attempt = observed(
            _read_attempt,
            directory.paths,
            job_id,
            jobs=jobs,
            job=job,
            sign=sign,
            read_errors=read_errors,
        )
        if isinstance(attempt, Unknown):
            name = read_attempt_label(directory.paths, job_id)
            read_errors.append(f"attempt {name}: {attempt.why}")
        elif attempt is not None:
            found.append(_as_others_saw_it(attempt, job, lost, cancelled))
    return tuple(found)


def _as_others_saw_it(
    attempt: AttemptHistory, job: Job | None, lost: frozenset[str], cancelled: Mapping[str, float]
) -> AttemptHistory:
    """With what the scheduler and the watchdog know of an end of which the attempt itself could not
    tell.
    """
    names = {attempt.job_id, attempt.label}
    is_lost = bool(names & lost) or (job is not None and job.state is JobState.NODE_FAIL)
    ends = [
        cancelled[name] for name in names if name in cancelled and cancelled[name] >= attempt.start
    ]
    if attempt.ended is not None or attempt.is_running or not ends:
        return replace(attempt, lost_its_host=is_lost)
    return replace(attempt, lost_its_host=is_lost, ended=max(ends), is_running=False)


def lost_hosts(ledger: Ledger) -> frozenset[str]:
    """The jobs whose batch script's node was lost, by the alerts that named them."""
    return frozenset(
        str(entry.data.get("subject", ""))
        for entry in ledger.entries
        if entry.kind in {OPENED, SENT}  # what was told as a warning may have become worse
        and entry.data.get("detector") in LOST_HOST_DETECTORS
        and entry.data.get("severity") == "CRITICAL"
    )


def _cancelled(ledger: Ledger) -> dict[str, float]:
    """When the watchdog, or a person's repair, ended which job, by either of its numbers."""
    ended = {
        str(entry.data.get("job_id", "")): entry.time
        for entry in ledger.entries
        if entry.kind == "repaired" and entry.data.get("action") == "cancel"
    }
    for one in replay(ledger).records:
        if one.action == "cancel" and one.result is Result.DONE:
            ended |= {one.subject: one.time, one.incident.removeprefix("cancel:"): one.time}
    return ended


def _read_attempt(
    paths: RunPaths,
    job_id: str,
    jobs: Observed[tuple[Job, ...]],
    job: Job | None,
    sign: float,
    read_errors: list[str],
) -> AttemptHistory | None:
    """One attempt's folder; None when no training began in it (a drill's, or one that left at
    once).
    """
    folder = paths.attempt(job_id)
    record = read_json(folder / "attempt.json")
    if record is None:
        return None
    start = _checked(record["start"])
    label = attempt_label(record, job_id)
    launches = tuple(_launches(folder, label, read_errors))
    phases = observed(read_phases, paths.phases(job_id))
    if isinstance(phases, Unknown):
        read_errors.append(f"phases of attempt {label}: {phases.why}")
    verdict = observed(AttemptVerdict.read, folder)
    marker = observed(EndMarker.read, paths.end_marker(job_id))
    began = known(phases, ())
    signs = [start, sign, *(record.time for record in began)]
    signs += [
        moment
        for launch in launches
        for moment in (launch.start, launch.end, launch.first_sign)
        if moment
    ]
    signs += [
        value.time for value in (verdict, marker) if isinstance(value, AttemptVerdict | EndMarker)
    ]
    ended, is_running = _end(verdict, jobs, job)
    if ended is None:
        signs.append(last_sign_in(folder))
    card = known(observed(read_json, folder / "card.json"), None) or {}
    if job is not None and job.start_time is not None and job.nodes:
        start = min(start, job.start_time)  # the nodes were held from then on
    return AttemptHistory(
        job_id=job_id,
        label=label,
        kind=str(record.get("kind", "")),
        submission=str(record.get("submission", "")),
        start=start,
        ended=ended,
        is_running=is_running,
        last_sign=max(signs),
        nodes=tuple(str(node) for node in record["nodes"]),
        launches=launches,
        phases=began,
        marker=marker,
        verdict=verdict,
        limit=known(observed(lambda: float(parse_time_limit(card["slurm"]["time_limit"]))), None),
        logged_as=job_id,
    )


def lives_of(attempt: AttemptHistory, steps: Sequence[StepMark]) -> Iterator[AttemptHistory]:
    """The attempt, and before it what the same job was before the scheduler started it again under
    its old number.

    Of that life only the phases and the steps are left: the records of its launches were written
    over.
    """
    before = tuple(
        record for record in attempt.phases if record.time < attempt.start - REQUEUE_SECONDS
    )
    if before:
        logged = (
            step.time
            for step in steps
            if step.job_id == attempt.logged_as and step.time < attempt.start
        )
        yield AttemptHistory(
            job_id=f"{attempt.job_id} (requeued)",
            label=f"{attempt.label}, before",
            kind=attempt.kind,
            submission="",
            start=before[0].time,
            ended=None,
            is_running=False,
            last_sign=max(before[-1].time, max(logged, default=0.0)),
            nodes=attempt.nodes,
            phases=before,
            logged_as=attempt.logged_as,
        )
    yield replace(attempt, phases=attempt.phases[len(before) :])


def _end(
    verdict: Observed[AttemptVerdict | None], jobs: Observed[tuple[Job, ...]], job: Job | None
) -> tuple[float | None, bool | None]:
    """When the attempt gave its nodes back, and whether it still runs; None for what no one says."""
    if job is not None and job.state.is_active:
        return None, True
    word = None
    if isinstance(verdict, AttemptVerdict) and verdict.time:
        word = verdict.time
    by_scheduler = None
    if job is not None and job.state.is_final:
        by_scheduler = job.end_time
    ended = told_end(by_scheduler, word)
    if ended is not None or (job is not None and job.state.is_final):
        return ended, False
    return None, None if isinstance(jobs, Unknown) or job is not None else False


def _launches(folder: Path, label: str, read_errors: list[str]) -> Iterator[LaunchRecord]:
    paths = [path for path in (folder / "launches").glob("*.json") if path.stem.isdigit()]
    for path in sorted(paths, key=lambda path: int(path.stem)):
        try:
            launch = LaunchRecord.of(read_json(path) or {})
            for moment in (launch.start, launch.end or 0.0, launch.first_sign or 0.0):
                _checked(moment)
            yield launch
        except (OSError, ValueError, TypeError) as error:
            read_errors.append(f"launch {path.stem} of attempt {label}: {cause(error)}")


def _checked(moment: object) -> float:
    """A point of time. Raises ValueError for anything else."""
    found = number_in(moment)
    if found is None:
        raise ValueError(f"it holds {str(moment)[:40]!r} where a time belongs")
    return found


def _heartbeat_times(paths: RunPaths) -> dict[str, float]:
    """The last heartbeat of each attempt that still has one; every rank's, for some end before
    others.
    """
    found: dict[str, float] = {}
    for path in paths.heartbeats.glob("*.json"):
        value = observed(read_json, path)
        moment = None
        if isinstance(value, dict):
            moment = number_in(value.get("time"))
        if isinstance(value, dict) and moment is not None:
            job_id = str(value.get("job_id"))
            found[job_id] = max(found.get(job_id, 0.0), moment)
    return found


_CREATED = re.compile(r'"created":\s*(\d+(?:\.\d+)?)')


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
    paths = directory.paths
    read_errors = list[str]()
    ledger = ledger or read_journal(directory.journal)
    steps = observed(read_metrics, paths.metrics)
    read_errors += _unread(steps=steps)
    last_steps = {step.job_id: step.time for step in known(steps, ())}
    attempts = observed(
        read_attempts,
        directory,
        jobs,
        last_steps=last_steps,
        read_errors=read_errors,
        ledger=ledger,
    )
    if not isinstance(attempts, Unknown):
        attempts = _in_order(attempts, known(steps, ()))
    submissions, unread = read_submissions(directory)
    if any(attempt.ended is None for attempt in known(attempts, ())):
        asked = jobs
    else:
        asked = ()
    checkpoints = observed(_read_checkpoints, paths)
    watched = observed(WatchedJob.read, paths)
    read_errors += _unread(
        attempts=attempts,
        jobs=asked,
        submissions=submissions,
        checkpoints=checkpoints,
        watched=watched,
    )
    read_errors += unread
    read_errors += [str(fault) for fault in ledger.faults if fault.kind != "torn"][:3]
    return History(
        name=paths.name,
        variant=paths.variant,
        submissions=submissions
        if isinstance(submissions, Unknown)
        else tuple(reversed(submissions)),
        attempts=attempts,
        steps=steps,
        checkpoints=checkpoints,
        pauses=_pauses(ledger.entries, directory),
        holds=_holds(ledger.entries),
        exclusions=_exclusions(ledger.entries),
        waits=_waits(directory, jobs, known(submissions, ()), scheduler),
        ends_with_its_jobs=known(watched, None) is not None,
        read_errors=tuple(read_errors),
    )


def _in_order(
    attempts: Iterable[AttemptHistory], steps: Sequence[StepMark]
) -> tuple[AttemptHistory, ...]:
    """Each life of each attempt, by when it began."""
    lives = (life for attempt in attempts for life in lives_of(attempt, steps))
    return tuple(sorted(lives, key=lambda attempt: (attempt.start, attempt.job_id)))


def read_attempts_alone(
    directory: RunDirectory, jobs: Observed[tuple[Job, ...]]
) -> tuple[AttemptHistory, ...]:
    """The attempts as `read_history` has them. The long record of the steps is read only as far as
    it tells something of them that nothing else does. Raises OSError and ValueError.
    """
    ledger = read_journal(directory.journal)
    metrics = directory.paths.metrics
    read = partial(read_attempts, directory, jobs, read_errors=[], ledger=ledger)
    found = read({})
    if any(_is_requeued(attempt) for attempt in found):
        steps = known(observed(read_metrics, metrics), ())
        return _in_order(read({step.job_id: step.time for step in steps}), steps)
    endless = {attempt.job_id for attempt in found if attempt.ended is None}
    if endless - {attempt.job_id for attempt in found if attempt.is_running}:
        found = read(known(observed(_last_steps, metrics, endless), {}))
    return _in_order(found, ())


def _is_requeued(attempt: AttemptHistory) -> bool:
    return next(lives_of(attempt, ())).job_id != attempt.job_id


def _last_steps(metrics: Path, wanted: Set[str]) -> dict[str, float]:
    """When each of these jobs made its last step; of all jobs that were seen on the way. Raises
    OSError.
    """
    if not metrics.exists():
        return {}
    lines, _ = tail_lines(metrics, TAIL_BYTES)
    steps = tuple(_marks(filter(None, map(parse_record, lines))))
    if not wanted <= {step.job_id for step in steps}:
        steps = read_metrics(metrics)
    return {step.job_id: step.time for step in steps}


def _unread(**parts: object) -> list[str]:
    """What could not be read, and why."""
    return [f"{name}: {part.why}" for name, part in parts.items() if isinstance(part, Unknown)]


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
def read_metrics(path: Path) -> tuple[StepMark, ...]:
    """The logged steps, in one pass that keeps some hundred bytes of each. Raises OSError where the
    file is unreadable.
    """
    return tuple(_marks(records(path)))


def _marks(found: Iterable[MetricsRecord]) -> Iterator[StepMark]:
    for record in found:
        iteration = record.iteration
        if (
            record.kind == STEP
            and record.time is not None
            and iteration is not None
            and record.job_id
        ):
            seconds = record.number("seconds_per_iteration")
            told = seconds if is_step_time(seconds) else None
            yield StepMark(record.time, iteration, told, sys.intern(record.job_id))


# ----------------------------------------------------------------------------- checkpoints
def _read_checkpoints(paths: RunPaths) -> tuple[CheckpointMark, ...]:
    """The complete checkpoints that are still there, by step; of a manifest only the head is read.

    Raises ValueError for a job whose checkpoints are not looked at, OSError.
    """
    watched = WatchedJob.read(paths)
    if watched is not None and not watched.hold:
        raise ValueError("not looked at: level 0, only watched")
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
    return Period(entry.time, end, what=name, who=entry.who, why=entry.why)


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
