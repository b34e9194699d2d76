"""The running job's time limit is not the card's: someone has changed it at the scheduler, or the
card since.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from tr11ops.base.units import duration, timestamp
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "a minute, to which Slurm rounds limits"
SEVERITIES = "WARNING, INFO where the limit is longer than the card's"
NAME = "limit-changed"
NEEDS = ("jobs",)
ROUNDING_SECONDS = 60.0


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """The attempt follows the limit that its job has now; a shorter one trains less in each task,
    or too little.
    """
    wanted = snapshot.run.time_limit
    others = derived.other_variants(snapshot)
    for job in snapshot.active_jobs:
        limit = job.time_limit_seconds
        if wanted is None or limit is None or job.start_time is None or job.job_id in others:
            continue
        if abs(limit - wanted) < ROUNDING_SECONDS:
            continue
        is_shorter = limit < wanted
        ends, said = job.start_time + limit, job.start_time + wanted
        scheduler = "Slurm" if snapshot.scheduler == "slurm" else "the scheduler"
        yield Finding(
            NAME,
            Severity.WARNING if is_shorter else Severity.INFO,
            f"{scheduler} ends job {job.job_id} at {timestamp(ends, UTC)}, the card says {timestamp(said, UTC)}",
            subject=job.job_id,
            evidence=(
                f"its time limit is {duration(limit)} now, the card's (slurm.time_limit) is {duration(wanted)}",
            ),
            fix=derived.command(snapshot, "checkpoint-now") if is_shorter else "",
        )
