"""A job carries this run's name but does not belong to it: easily mistaken for the run, by people
and by tools.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import first_few
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "INFO"
NAME = "namesake"
NEEDS = ("jobs",)
NAMED = 3


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One remark for all jobs of that name that still run or wait, which count for nothing else;
    and one for those of the run that train another variant of it: they hold its lease, and its kill
    switch stops them.
    """
    for job_id, variant in list(derived.other_variants(snapshot).items())[:1]:
        yield Finding(
            NAME,
            Severity.INFO,
            f"job {job_id} trains variant {variant} of this run: its log and checkpoints are that variant's",
            subject=job_id,
        )
    strangers = [job for job in snapshot.namesakes if not job.state.is_final]
    if strangers:
        named = first_few((f"{job.job_id} of {job.user}" for job in strangers), NAMED)
        yield Finding(
            NAME,
            Severity.INFO,
            f"not of this run, though of its name: {named}",
            subject=strangers[0].job_id,
            evidence=tuple(
                f"{job.job_id}: {job.working_directory or job.comment or 'no directory'}"
                for job in strangers[:NAMED]
            ),
        )
