"""A periodic job failed: the watchdog, the copy of the logs, the check of the nodes. Its silence is
no good news.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from tr11ops.rundir.cron_records import PeriodicJobState

BOUND = "once; three times in a row"
SEVERITIES = "INFO, WARNING; the watchdog's own: WARNING, CRITICAL"
NAME = "periodic-job-failed"
NEEDS = ("operation.periodic_jobs",)

IN_A_ROW = 3
LONGEST_MESSAGE = 300
WATCHDOG = "pulse"  # while it fails, nothing else is noticed


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each job whose last round failed: INFO, and WARNING from the third in a row
    on.

    The watchdog's own: WARNING, and CRITICAL from the third in a row on. A job that the card skips
    does not count.
    """
    for job in known(snapshot.operation.periodic_jobs, ()):
        if job.failures_in_a_row < 1 or not is_wanted(snapshot, job):
            continue
        if job.failures_in_a_row == 1:
            times = ""
        else:
            times = f" {job.failures_in_a_row} times in a row"
        yield Finding(
            NAME,
            severity(job),
            f"the periodic job {job.name} failed{times}",
            subject=job.name,
            identity=(job.name,),
            evidence=tuple(_evidence(snapshot, job)),
            fix=derived.command(snapshot, f"cron run {job.name}"),
        )


def is_wanted(snapshot: Snapshot, job: PeriodicJobState) -> bool:
    """Whether the card wants this job at all: records of others stay behind."""
    wanted = snapshot.run.operation.periodic_jobs
    return wanted is None or job.name in wanted


def severity(job: PeriodicJobState) -> Severity:
    """How loud a failed job is."""
    again = job.failures_in_a_row >= IN_A_ROW
    if job.name == WATCHDOG:
        if again:
            return Severity.CRITICAL
        return Severity.WARNING
    if again:
        return Severity.WARNING
    return Severity.INFO


def _evidence(snapshot: Snapshot, job: PeriodicJobState) -> Iterator[str]:
    if job.exit_code is None:
        code = ""
    else:
        code = f", exit code {job.exit_code}"
    yield f"last round {duration(snapshot.time - job.started)} ago on {job.host}{code}"
    if job.message:
        yield " ".join(job.message.split())[:LONGEST_MESSAGE]
