"""Attempts that did not end by themselves: no end marker, or one that says the trainer failed or refused."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.queue.held_jobs import standing_holds
from trainer.contract.end_marker import BAD_REASONS

BOUND = "one; two in a row"
SEVERITIES = "WARNING, CRITICAL; less (INFO, WARNING) once a later one trains"
NAME = "unfinished-end"
NEEDS = ("jobs", "attempts", "last_end", "heartbeats", "steps")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """The bad ends since the last good one: one is a warning, two in a row are critical (a bad node or a bad card)."""
    if isinstance(snapshot.jobs, Unknown) or isinstance(snapshot.attempts, Unknown):
        return
    if derived.hidden_life(snapshot):
        return  # an attempt that lives outside the scheduler would count as ended
    jobs = {name: job for job in snapshot.jobs for name in derived.identifiers(job)}
    outside = derived.liveness_outside(snapshot)
    row: list[Attempt] = []
    advanced = False
    for attempt in sorted(snapshot.attempts, key=lambda attempt: attempt.changed, reverse=True):
        if attempt.gave_way:
            continue
        job = jobs.get(attempt.job_id)
        if (job is not None and not job.state.is_final) or (outside is not None and outside.job_id == attempt.job_id):
            advanced = advanced or any(step.job_id == attempt.job_id for step in known(snapshot.steps, ()))
            continue
        if not is_bad(attempt):
            break
        row.append(attempt)
    if row:
        severity = Severity.CRITICAL if len(row) > 1 else Severity.WARNING
        if advanced:
            severity = Severity.WARNING if len(row) > 1 else Severity.INFO
        yield _finding(snapshot, row, _told(snapshot, jobs), severity)
    yield from _never_began(snapshot, jobs)


def _told(snapshot: Snapshot, jobs: dict[str, Job]) -> dict[str, Job]:
    """What is known of each job's end: the scheduler's own log says more than its queue, and remembers longer."""
    found = dict(jobs)
    for job in known(snapshot.ended_jobs, ()):
        shown = jobs.get(job.raw_id)
        if shown is None or (shown.state.is_final and shown.submit_time == job.submit_time):
            found[job.raw_id] = job
    return found


def is_bad(attempt: Attempt) -> bool:
    """True for an attempt that ended without its own word, or by an error. Unknown is not bad."""
    if isinstance(attempt.end, Unknown):
        return False
    return attempt.end is None or attempt.end.reason in BAD_REASONS


def how_it_ended(attempt: Attempt, job: Job | None) -> str:
    """One line: the marker's word, or what else is known of an end without one."""
    if isinstance(attempt.end, Unknown):
        return f"cannot be told: {attempt.end.why}"
    if attempt.end is not None:
        reason = attempt.end.reason
        return f"{reason}: {attempt.end.message}" if reason in BAD_REASONS else reason
    known_facts = [] if job is None else [job.state.value]
    if job is not None and job.derived_exit_code:
        known_facts.append(f"derived exit code {job.derived_exit_code}")
    elif job is not None and job.exit_code:
        known_facts.append(f"exit code {job.exit_code}")
    if job is not None and job.exit_signal:
        known_facts.append(f"signal {job.exit_signal}")
    if attempt.failure:
        known_facts.append(attempt.failure)
    return "no end marker" + (f" ({', '.join(known_facts)})" if known_facts else "")


def _finding(snapshot: Snapshot, row: list[Attempt], jobs: dict[str, Job], severity: Severity) -> Finding:
    newest = row[0]
    label = newest.label or newest.job_id
    why = why_it_ended(snapshot, newest)
    if len(row) > 1:
        title = f"the last {len(row)} attempts " + (f"failed: {why}" if why else "did not end by themselves")
    elif why:
        title = f"attempt {label} failed: {why}"
    elif newest.end is None:
        title = f"attempt {label} ended without the trainer's end marker"
    else:
        title = f"attempt {label} ended by an error"
    evidence = []
    for entry in row[:3]:
        when = f", {duration(max(0.0, snapshot.time - entry.changed))} ago" if len(row) > 1 else ""
        evidence.append(f"{entry.label or entry.job_id}{when}: {how_it_ended(entry, jobs.get(entry.job_id))}")
    fix = derived.command(snapshot, f"diagnose --job {label}")
    since = min(entry.changed for entry in row)  # the end of the first of them
    return Finding(
        NAME, severity, title, subject=label, evidence=tuple(evidence), fix=fix, fault=newest.cause, since=since
    )


def why_it_ended(snapshot: Snapshot, attempt: Attempt) -> str:
    """Why an attempt ended badly: its own records, else what the queued work says that it was held for by it."""
    if attempt.why or attempt != derived.last_attempt(snapshot):
        return attempt.why
    return next((hold.why for hold in standing_holds(snapshot) if hold.is_for_fault), "")


def _never_began(snapshot: Snapshot, jobs: dict[str, Job]) -> Iterator[Finding]:
    """Jobs that got nodes and ended before they left anything in the run directory."""
    attempts = {attempt.job_id for attempt in known(snapshot.attempts, ())}
    oldest = min((attempt.changed for attempt in known(snapshot.attempts, ())), default=0.0)
    for job in dict.fromkeys(jobs.values()):
        if not job.state.is_final or job.start_time is None or job.state is JobState.CANCELLED:
            continue
        ended = job.end_time if job.end_time is not None else job.start_time
        if ended > oldest and not derived.identifiers(job) & attempts:
            code = "" if job.exit_code is None else f", exit code {job.exit_code}"
            yield Finding(
                NAME,
                Severity.WARNING,
                f"job {job.job_id} ended before it began to work: {job.state.value}{code}",
                subject=job.job_id,
                since=ended,
                evidence=(job.output,) if job.output else (),
                fix=derived.command(snapshot, "logs"),
            )
