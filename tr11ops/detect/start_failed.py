"""The last attempt never came to train: its set-up failed or hung, or its agent could not begin
after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.base.redact import signature
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "no attempt since"
SEVERITIES = "CRITICAL"
NAME = "start-failed"
NEEDS = ("jobs", "attempts", "last_end")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL until the next attempt begins: each one would end in the same way, so what is queued
    is held.
    """
    newest, marker = derived.last_attempt(snapshot), derived.last_marker(snapshot)
    if isinstance(snapshot.jobs, Unknown) or snapshot.active_jobs:
        return
    if (
        newest is None
        or marker is None
        or newest.end != marker
        or marker.reason != "refused"
        or marker.launch
    ):
        return
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"attempt {newest.label or newest.job_id} could not start: {marker.message}",
        subject=newest.label or newest.job_id,
        identity=(signature(marker.message) or marker.reason,),
        fix=derived.command(snapshot, "doctor"),
        then=(derived.command(snapshot, "resume"),) if snapshot.pending_jobs else (),
    )
