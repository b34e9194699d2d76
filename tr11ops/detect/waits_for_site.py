"""Queued work that starts when the site lets it: a partition that is down or closed, nodes kept for
maintenance.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job
from tr11ops.cluster.pending_reasons import Wait, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.forecast import queue_coverage_seconds
from tr11ops.observe.placement import is_shut
from tr11ops.observe.snapshot import Snapshot

BOUND = "the scheduler's reason; 12 h"
SEVERITIES = (
    "INFO, WARNING when nothing runs, or when what runs and starts by itself lasts less than 12 h, CRITICAL when a"
    " closed partition lets nothing train"
)
NIGHT_SECONDS = 12 * derived.HOUR
NAME = "waits-for-site"
CLOSED = ("PartitionDown", "PartitionInactive")  # the scheduler's reasons
NEEDS = ("jobs", "nodes", "kill_switch", "pause")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each array: a WARNING when nothing of the run runs or starts by itself, or
    will soon, else INFO.

    CRITICAL when nothing trains because the site has closed the partition, which no one of the run
    may have planned. What a maintenance keeps waiting goes on by itself, and was announced.
    """
    covered = queue_coverage_seconds(snapshot, only_sure=True)
    is_soon = covered is not None and covered < NIGHT_SECONDS
    waits = (derived.closed_by_site(snapshot) is not None or is_soon) and derived.stop_of(
        snapshot
    ) is None
    told = [job for job in snapshot.pending_jobs if reason_of_job(job).wait is Wait.SITE]
    shut = [
        job
        for job in snapshot.pending_jobs
        if reason_of_job(job).wait is Wait.PASSES and is_shut(snapshot, job)
    ]
    nothing_trains = (
        derived.closed_by_site(snapshot) is not None and derived.stop_of(snapshot) is None
    )
    titles = {array_number(job): _title(job, nothing_trains) for job in told}
    for job in shut:  # it waits for another one too, and the scheduler tells that alone
        titles.setdefault(
            array_number(job),
            f"job {job.job_id} cannot start: partition {job.partition} starts nothing now",
        )
    jobs = {array_number(job): job for job in (*shut, *told)}
    for number, job in jobs.items():
        severity = Severity.WARNING if waits else Severity.INFO
        if nothing_trains and _is_closed(job):
            severity = Severity.CRITICAL
        yield Finding(
            NAME,
            severity,
            titles[number],
            subject=number,
            evidence=(
                f"{derived.site_reason(job).meaning}: it starts by itself when the site is done",
                "only the site can change that: ask when; the command shows how it stands now",
            ),
            fix=f"scontrol show partition {job.partition}"
            if snapshot.scheduler == "slurm" and job.partition
            else "",
        )


def _is_closed(job: Job) -> bool:
    """Whether the scheduler says that its partition is closed; a maintenance of nodes is another
    reason.
    """
    return job.reason.startswith(CLOSED)


def _title(job: Job, nothing_trains: bool) -> str:
    if not _is_closed(job):
        return f"job {job.job_id} waits for the site: {job.reason}"
    if job.partition:
        partition = f"partition {job.partition}"
    else:
        partition = "its partition"
    if nothing_trains:
        return f"the site has closed {partition}: nothing trains"
    return f"the site has closed {partition}: job {job.job_id} cannot start"
