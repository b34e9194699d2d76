"""The trainer has ended, but its job still holds the nodes: the next task cannot start, the hours
are billed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "15 minutes"
SEVERITIES = "CRITICAL"
NAME = "lingering"
NEEDS = ("jobs", "attempts", "heartbeats", "steps", "training.launch_ends")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Fires a while after the end marker, unless a later launch in the same allocation is alive."""
    if derived.hidden_life(snapshot):
        return  # a later launch may be alive
    for job in snapshot.active_jobs:
        marker = derived.marker_of(snapshot, derived.identifiers(job))
        if marker is None:
            continue
        liveness = derived.liveness_of(snapshot, job)
        if (
            liveness is not None
            and liveness.time > marker.time
            and liveness.phase != derived.ENDED_PHASE
        ):
            continue
        age = snapshot.time - marker.time
        if age > derived.LEAVING_SECONDS:
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} still holds its nodes {duration(age)} after the trainer ended",
                subject=job.job_id,
                evidence=(
                    f"end marker: {marker.reason} at iteration {marker.iteration}, from {marker.host}",
                ),
                fix=derived.command(snapshot, "kill --now --wait"),
                then=(derived.command(snapshot, "resume"),),
            )
