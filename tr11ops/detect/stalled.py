"""A job holds its nodes, but the training gives no sign of life for longer than its phase explains."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import Job, JobState
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, Unknown
from tr11ops.units import duration


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Phase-aware: saving, evaluating and start-up may be silent for long; training only for some iterations."""
    for job in signs.active_jobs(snapshot):
        if job.state is JobState.RUNNING:
            yield from _of_job(snapshot, job)


def _of_job(snapshot: Snapshot, job: Job) -> Iterator[Finding]:
    life = signs.life_of(snapshot, job)
    if life is None:
        if isinstance(snapshot.heartbeats, Unknown) or isinstance(snapshot.steps, Unknown) or snapshot.doubts:
            return
        silent = None if job.start_time is None else snapshot.time - job.start_time
        over = signs.marker_of(snapshot, signs.identifiers(job)) is not None
        if silent is not None and silent > signs.OTHER_PHASE_SECONDS and not over:
            title = f"job {job.job_id} has held its nodes for {duration(silent)} without any sign of life"
            yield _finding(snapshot, job, title, ())
        return
    marker = signs.marker_of(snapshot, signs.identifiers(job))
    if life.is_fresh(snapshot.time) or (marker is not None and marker.time >= life.time):
        return
    title = (
        f"job {job.job_id}: no sign of life for {duration(life.silent_for(snapshot.time))}"
        f" while {life.phase} (normal: up to {duration(life.patience)})"
    )
    oldest = sorted(signs.beats_of(snapshot, job), key=lambda beat: (beat.iteration, beat.time))[:3]
    evidence = tuple(
        f"rank {beat.rank} on {beat.host}: {beat.phase}, iteration {beat.iteration},"
        f" {duration(snapshot.time - beat.time)} ago"
        for beat in oldest
    )
    yield _finding(snapshot, job, title, evidence)


def _finding(snapshot: Snapshot, job: Job, title: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        "stalled", Severity.CRITICAL, title, subject=job.job_id, evidence=evidence, fix=signs.command(snapshot, "logs")
    )
