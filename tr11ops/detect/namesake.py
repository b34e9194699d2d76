"""A job carries this run's name but does not belong to it: easily mistaken for the run, by people and by tools."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot

NAME = "namesake"
NEEDS = ("jobs",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One remark for all jobs of that name that still run or wait; such jobs count for nothing else."""
    strangers = [job for job in snapshot.namesakes if not job.state.is_final]
    if strangers:
        named = ", ".join(f"{job.job_id} of {job.user}" for job in strangers[:3])
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        yield Finding(
            NAME,
            Severity.INFO,
            f"not of this run, though of its name: {named}{more}",
            subject=strangers[0].job_id,
            evidence=tuple(
                f"{job.job_id}: {job.working_directory or job.comment or 'no directory'}" for job in strangers[:3]
            ),
        )
