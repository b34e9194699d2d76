"""The training shows life, but its logs do not tell of it; or the logs tell, and the heartbeats do
not.

Half of what watches this run is then blind. What to do: see whether the disk or the quota is full,
and whether the folder may be written to.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.base.units import duration, size
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import TRAINING_PHASES

BOUND = "k iterations and 2 minutes"
SEVERITIES = "WARNING"
NAME = "log-not-growing"
NEEDS = ("jobs", "heartbeats", "steps", "training.logs")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Compares iterations before times: a clock that is wrong must not look like a log that stands
    still.
    """
    pace = derived.seconds_per_iteration(snapshot)
    for job in snapshot.active_jobs:
        if job.state is JobState.RUNNING and pace is not None:
            patience = normal_silence.training_patience(snapshot, pace, snapshot.run.log_interval)
            yield from _of_job(snapshot, job, patience)


def _of_job(snapshot: Snapshot, job: Job, patience: float) -> Iterator[Finding]:
    names = derived.identifiers(job)
    beats = [beat for beat in derived.beats_of(snapshot, job) if beat.phase in TRAINING_PHASES]
    stepped, now = derived.step_times(snapshot, names), snapshot.time
    interval = snapshot.run.log_interval
    if not beats or not stepped:
        return
    done, last = (
        max(beat.iteration for beat in beats),
        known(snapshot.steps, ())[-1].record.iteration,
    )
    beat, line = max(beat.time for beat in beats), max(stepped)
    if done > last + interval and now - line > patience and now - beat <= patience:
        title = f"job {job.job_id} trains iteration {done}, but its log stands at {last}"
        yield _finding(snapshot, job, title, f"the last line is {duration(now - line)} old")
    elif now - line <= patience < now - beat and last > done + interval:
        title = f"job {job.job_id} logs iteration {last}, but its heartbeats stand at {done}"
        yield _finding(snapshot, job, title, f"the last heartbeat is {duration(now - beat)} old")
    else:
        yield from _of_main_log(snapshot, job, line, patience)


def _of_main_log(snapshot: Snapshot, job: Job, line: float, patience: float) -> Iterator[Finding]:
    """The people's log against the programs' one: both are told of each step."""
    logs = {log.name: log for log in known(snapshot.training.logs, ())}
    main, metrics = logs.get("main_log.txt"), logs.get("metrics.jsonl")
    if main is None or metrics is None or snapshot.time - line > patience:
        return
    behind = metrics.changed - main.changed
    if behind > patience:
        title = f"main_log.txt has not grown for {duration(behind)}, though job {job.job_id} trains"
        yield _finding(snapshot, job, title, "metrics.jsonl grows")


def _finding(snapshot: Snapshot, job: Job, title: str, reason: str) -> Finding:
    sizes = ", ".join(
        f"{log.name}: {size(log.bytes)}, changed {duration(snapshot.time - log.changed)} ago"
        for log in known(snapshot.training.logs, ())
    )
    evidence = (reason, sizes) if sizes else (reason,)
    return Finding(
        NAME,
        Severity.WARNING,
        title,
        subject=job.job_id,
        evidence=evidence,
        fix=derived.command(snapshot, "checkpoint-now --wait"),
        then=(derived.command(snapshot, "kill --wait"), derived.command(snapshot, "resume")),
    )
