"""A health check fails everywhere, so that the running attempt goes on without it: nothing looks
for that fault now.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once, until the next attempt makes it again"
SEVERITIES = "WARNING"
NAME = "check-failing"
NEEDS = ("jobs", "training.launch_ends")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for the attempt that runs, by the records of its launches that have ended."""
    for job in snapshot.active_jobs:
        names = derived.identifiers(job)
        ends = [
            end
            for end in known(snapshot.training.launch_ends, ())
            if end.job_id in names and end.failing_checks
        ]
        if ends:
            last = max(ends, key=lambda end: end.launch)
            yield Finding(
                NAME,
                Severity.WARNING,
                f"a health check fails everywhere and is left out: {', '.join(last.failing_checks)}",
                subject=job.job_id,
                evidence=(last.why,),
                identity=tuple(sorted(last.failing_checks)),
                fix=derived.command(snapshot, "nodes check"),
            )
