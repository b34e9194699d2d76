"""The periodic jobs are not run any more: their daemon, crontab or chain of jobs is gone, and no
one was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.periodic_job_failed import WATCHDOG, is_wanted
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from tr11ops.rundir.cron_records import PeriodicJobState

BOUND = "an interval, from 15 minutes to 6 hours"
SEVERITIES = "WARNING, CRITICAL for the watchdog"
NAME = "cron-dead"
NEEDS = ("operation.periodic_jobs", "operation.chains")

INTERVALS = {"hourly": derived.HOUR, "daily": derived.DAY}  # of the chains
SHORTEST_GRACE_SECONDS = 15 * derived.MINUTE
LONGEST_GRACE_SECONDS = 6 * derived.HOUR
CHAIN_WAY = "slurm"
ALONE = "no watchdog looks at the run"
BY_HAND = frozenset({"hand", "once"})  # nothing was installed that could die


def grace(interval_seconds: float) -> float:
    """How late a round may begin: its own interval, at least a quarter of an hour, at most six
    hours.
    """
    return min(LONGEST_GRACE_SECONDS, max(SHORTEST_GRACE_SECONDS, interval_seconds))


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each dead chain, else for each way in which jobs are overdue; silent where
    none was ever run.

    WARNING; CRITICAL when the watchdog is among them. A round that still runs is overdue after two
    intervals.
    """
    dead_chains = False
    for chain in known(snapshot.operation.chains, ()):
        late = snapshot.time - chain.next_due
        if late > grace(INTERVALS.get(chain.name, derived.DAY)):
            dead_chains = True
            yield Finding(
                NAME,
                Severity.CRITICAL if chain.name == "hourly" else Severity.WARNING,
                f"the {chain.name} periodic jobs stopped: the next round should have begun {duration(late)} ago",
                subject=f"chain-{chain.name}",
                identity=(f"chain-{chain.name}",),
                evidence=(f"job {chain.job_id} was to begin it",),
                fix=derived.command(snapshot, "cron install"),
                then=(derived.command(snapshot, "cron run --once"),),
            )
    overdue: dict[str, list[PeriodicJobState]] = {}
    for job in known(snapshot.operation.periodic_jobs, ()):
        if is_overdue(job, snapshot.time) and is_wanted(snapshot, job):
            overdue.setdefault(job.way, []).append(job)
    for way, jobs in sorted(overdue.items()):
        if way == CHAIN_WAY and dead_chains:
            continue  # said above
        names = ", ".join(job.name for job in jobs)
        yield Finding(
            NAME,
            Severity.CRITICAL if any(job.name == WATCHDOG for job in jobs) else Severity.WARNING,
            f"periodic jobs are not run any more ({way}): {names}",
            subject=way,
            identity=(way,),
            evidence=tuple(
                f"{job.name}: due {duration(snapshot.time - job.next_due)} ago, last run on {job.host}"
                for job in jobs[:4]
            ),
            fix=derived.command(snapshot, "cron install"),
            then=(derived.command(snapshot, "cron run --once"),),
        )


def is_overdue(job: PeriodicJobState, now: float) -> bool:
    """Whether a job's next round should have begun long ago."""
    if job.way in BY_HAND or now - job.next_due <= grace(job.interval_seconds):
        return False
    return not job.is_running or now - job.started > 2 * job.interval_seconds + grace(
        job.interval_seconds
    )


def watchdog_fault(jobs: Iterable[PeriodicJobState], now: float) -> str:
    """Why nothing looks at the run regularly; "" where a watchdog lives: its last round is on
    record, it did not fail, and by its own interval the next one is not overdue. A look that a
    person made is no watchdog.
    """
    watchdog = next((job for job in jobs if job.name == WATCHDOG), None)
    if watchdog is None or watchdog.way in BY_HAND:
        return ALONE
    if is_overdue(watchdog, now):
        silent, every = duration(now - watchdog.started), duration(watchdog.interval_seconds)
        return f"the watchdog has not looked for {silent} (due every {every})"
    if watchdog.failures_in_a_row:
        return "the watchdog's last look failed"
    return ""
