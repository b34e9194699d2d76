"""The trainer has ended, but its job still holds the nodes: the next task cannot start, the hours are billed."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, Unknown
from tr11ops.units import duration

NAME = "lingering"
NEEDS = ("jobs", "attempts", "heartbeats", "steps")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Fires a while after the end marker, unless a later launch in the same allocation is alive."""
    if isinstance(snapshot.heartbeats, Unknown) or isinstance(snapshot.steps, Unknown):
        return  # a later launch may be alive
    for job in signs.active_jobs(snapshot):
        marker = signs.marker_of(snapshot, signs.identifiers(job))
        if marker is None:
            continue
        life = signs.life_of(snapshot, job)
        if life is not None and life.time > marker.time and life.phase != signs.ENDED_PHASE:
            continue
        age = snapshot.time - marker.time
        if age > signs.LEAVING_SECONDS:
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} still holds its nodes {duration(age)} after the trainer ended",
                subject=job.job_id,
                evidence=(f"end marker: {marker.reason} at iteration {marker.iteration}, from {marker.host}",),
                fix=signs.command(snapshot, "kill --now --wait"),
            )
