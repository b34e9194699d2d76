"""The status screen's rows about the operation around the training: nodes, copies, periodic jobs, disks, alerts. Pure.

What the card does not use has no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tr11ops.detect import signs
from tr11ops.detect.backup_overdue import missing_copies
from tr11ops.detect.cron_dead import is_overdue
from tr11ops.detect.finding import Severity
from tr11ops.detect.nodes_left import bad_nodes
from tr11ops.detect.periodic_job_failed import is_wanted
from tr11ops.operation import CopyStatus
from tr11ops.report.status_answer import watchdog_missing
from tr11ops.report.status_surroundings import SYNC, Surroundings, node_use
from tr11ops.snapshot import Exclusion, Observed, Snapshot, Unknown, known
from tr11ops.units import duration

if TYPE_CHECKING:
    from tr11ops.alerts.book import Alert
    from tr11ops.filesystems.history import Forecast, Usage

NODES_SHOWN = 6
ALERTS_SHOWN = 5
JOBS_SHOWN = 4
FAR_SECONDS = 90 * 86400.0  # a file system that is full later than this is no news

Row = tuple[str, str, str]  # label, text, style


def care_rows(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Row]:
    """All of them, in the order of the screen."""
    yield from copies(snapshot, surroundings)
    yield from filesystems(snapshot)
    yield from periodic(snapshot)
    yield from alerts(snapshot, surroundings.alerts)


# ----------------------------------------------------------------------------- nodes
def nodes(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Row]:
    """Nodes held and not to be used, and why not."""
    use = node_use(snapshot, surroundings)
    excluded = snapshot.exclusions
    parts = [
        "unknown" if use is None else f"{use.used} used, {use.spare} spare" if use.used or use.spare else "none held"
    ]
    if isinstance(excluded, Unknown):
        parts.append("excluded: unknown")
    elif not excluded:
        parts.append("none excluded")
    else:
        parts.append(f"{len(excluded)} excluded: {_named(excluded)}")
    bad = sorted(bad_nodes(snapshot))
    if bad:
        parts.append(f"bad but not excluded: {', '.join(bad)}")
    style = "magenta" if use is None or isinstance(excluded, Unknown) else "yellow" if bad else ""
    yield "nodes", "; ".join(parts), style


def _named(excluded: tuple[Exclusion, ...]) -> str:
    named = ", ".join(entry.node + (f" ({entry.why})" if entry.why else "") for entry in excluded[:NODES_SHOWN])
    return named + (f" and {len(excluded) - NODES_SHOWN} more" if len(excluded) > NODES_SHOWN else "")


# ----------------------------------------------------------------------------- copies
def copies(snapshot: Snapshot, surroundings: Surroundings = Surroundings()) -> Iterator[Row]:  # noqa: B008  frozen
    """The newest backup, what lacks a copy, who copies now, the last restore and the last sync, as the card asks."""
    operation = snapshot.run.operation
    has_backup, has_sync = operation.archive_interval is not None, operation.sync_seconds is not None
    if not has_backup and not has_sync:
        return
    parts = [*_backup(snapshot, surroundings)] if has_backup else []
    if has_sync:
        parts.append(f"sync {_copy(snapshot.sync, snapshot.time)}{_fault(snapshot.sync)}")
    seen = [*([snapshot.backup] if has_backup else []), *([snapshot.sync] if has_sync else [])]
    style = "magenta" if any(isinstance(copy, Unknown) for copy in seen) else ""
    failed = any(isinstance(copy, CopyStatus) and copy.message for copy in seen)
    style = style or ("yellow" if failed or any(copy is None for copy in seen) else "")
    damaged = damaged_copies(snapshot)
    yield "copies", "; ".join(parts), "red" if damaged else style
    for work in known(surroundings.copying, ()):
        what = "mirrors the logs to the hub" if work.to == SYNC else f"copies to the {work.to}"
        step = f" (step {work.step})" if work.step is not None else ""
        since = duration(max(0.0, snapshot.time - work.since))
        yield "", f"{work.user} on {work.host} {what}{step}, for {since}", "cyan"


def _backup(snapshot: Snapshot, surroundings: Surroundings) -> Iterator[str]:
    yield f"backup {_copy(snapshot.backup, snapshot.time)}{_fault(snapshot.backup)}"
    missing, damaged, drill = copies_missing(snapshot), damaged_copies(snapshot), surroundings.drill
    if missing:
        yield f"{missing} not copied yet"
    if damaged:
        yield f"{damaged} DAMAGED"
    if isinstance(drill, Unknown):
        yield "restore drill unknown"
    elif drill is not None:
        how = "passed" if drill.passed else "FAILED"
        yield f"restore drill of step {drill.step} {how} {duration(max(0.0, snapshot.time - drill.time))} ago"


def copies_missing(snapshot: Snapshot) -> int | None:
    """Copies that the card wants of checkpoints that are here, and that are not on record; None where it is unknown."""
    if isinstance(snapshot.backup, Unknown) or isinstance(snapshot.checkpoints, Unknown):
        return None
    return len(missing_copies(snapshot, snapshot.backup))


def damaged_copies(snapshot: Snapshot) -> int | None:
    """Copies that were found damaged; None where it is unknown."""
    if isinstance(snapshot.backup, Unknown):
        return None
    return 0 if snapshot.backup is None else len(snapshot.backup.damaged)


def _fault(seen: Observed[CopyStatus | None]) -> str:
    return f", but now: {seen.message}" if isinstance(seen, CopyStatus) and seen.message else ""


def _copy(seen: Observed[CopyStatus | None], now: float) -> str:
    if isinstance(seen, Unknown):
        return "unknown"
    if seen is None:
        return "never yet"
    step = "" if seen.step is None else f"of step {seen.step} "
    return f"{step}{duration(max(0.0, now - seen.time))} ago"


# ----------------------------------------------------------------------------- file systems
def worst_filesystem(snapshot: Snapshot) -> tuple[Usage, str, float] | None:
    """The newest look at the file system with the largest share used: (look, "bytes" or "inodes", percent)."""
    from tr11ops.filesystems.history import KINDS, newest

    found = [
        (usage, kind, percent)
        for usage in newest(known(snapshot.usage, ())).values()
        for kind in KINDS
        if (percent := usage.percent(kind)) is not None
    ]
    return max(found, key=lambda entry: entry[2], default=None)


def forecast_of(snapshot: Snapshot, name: str) -> Forecast:
    """When the file system of this name will be full."""
    from tr11ops.filesystems.history import forecast

    return forecast((usage for usage in known(snapshot.usage, ()) if usage.name == name), snapshot.time)


def filesystems(snapshot: Snapshot) -> Iterator[Row]:
    """The fullest of the watched file systems, and when it will be full."""
    if isinstance(snapshot.usage, Unknown):
        if snapshot.run.operation.filesystems:
            yield "disks", "unknown", "magenta"
        return
    worst = worst_filesystem(snapshot)
    if worst is None:
        if snapshot.run.operation.filesystems:
            yield "disks", f"not looked at yet ({signs.command(snapshot, 'fs-watchdog')})", "yellow"
        return
    usage, kind, percent = worst
    rule = next((rule for rule in snapshot.run.operation.filesystems if rule.name == usage.name), None)
    limit = 85.0 if rule is None else rule.bytes_percent if kind == "bytes" else rule.inodes_percent
    full_at = forecast_of(snapshot, usage.name).full_at
    left = None if full_at is None else full_at - snapshot.time
    when = f", full in {duration(left)}" if left is not None and left < FAR_SECONDS else ""
    count = len({entry.name for entry in known(snapshot.usage, ())})
    of = f" (fullest of {count})" if count > 1 else ""
    ago = duration(max(0.0, snapshot.time - usage.time))
    yield "disks", f"{usage.name} {percent:.0f} % of {kind}{of}{when}; {ago} ago", "yellow" if percent >= limit else ""


# ----------------------------------------------------------------------------- periodic jobs
def periodic(snapshot: Snapshot) -> Iterator[Row]:
    """Which periodic jobs are alive; the late and the failing first. No row where none was ever run."""
    if isinstance(snapshot.periodic_jobs, Unknown):
        yield "periodic", "unknown", "magenta"
        return
    jobs = [job for job in snapshot.periodic_jobs if is_wanted(snapshot, job)]
    if not jobs:
        return
    now = snapshot.time
    ill = [job for job in jobs if is_overdue(job, now) or job.failures_in_a_row]
    last = max(jobs, key=lambda job: job.started)
    if not ill:
        due = min(jobs, key=lambda job: job.next_due)
        ahead = f"; next {due.name} in {duration(due.next_due - now)}" if due.next_due > now else f"; {due.name} is due"
        count = f"{len(jobs)} job alive" if len(jobs) == 1 else f"{len(jobs)} jobs alive"
        yield "periodic", f"{count}, last {last.name} {duration(max(0.0, now - last.started))} ago{ahead}", ""
        return
    words = []
    for job in ill[:JOBS_SHOWN]:
        late = f"late by {duration(now - job.next_due)}" if is_overdue(job, now) else ""
        failed = f"failed {job.failures_in_a_row} times: {job.message}" if job.failures_in_a_row else ""
        words.append(f"{job.name} {', '.join(filter(None, (late, failed)))}")
    more = f"; and {len(ill) - JOBS_SHOWN} more" if len(ill) > JOBS_SHOWN else ""
    yield "periodic", "; ".join(words) + more, "red"


# ----------------------------------------------------------------------------- alerts
def alerts(snapshot: Snapshot, seen: Observed[tuple[Alert, ...]]) -> Iterator[Row]:
    """The open alerts, and who has each."""
    if isinstance(seen, Unknown):
        yield "alerts", f"unknown: {seen.why}", "magenta"
        return
    if not seen:
        fault = "" if isinstance(snapshot.periodic_jobs, Unknown) else watchdog_missing(snapshot)
        yield "alerts", f"none open; {fault}" if fault else "none open", "yellow" if fault else ""
        return
    for index, alert in enumerate(seen[:ALERTS_SHOWN]):
        owner = alert.owner or alert.acknowledged_by
        if alert.snoozed_until is not None and alert.snoozed_until > snapshot.time:
            owner = f"snoozed for {duration(alert.snoozed_until - snapshot.time)}"
        elif owner:
            owner = f"{owner} has it"
        else:
            owner = f"nobody has it: {signs.command(snapshot, f'alerts ack {alert.fingerprint}')}"
        age = duration(max(0.0, snapshot.time - alert.began))
        style = "red" if alert.severity is Severity.CRITICAL else "yellow"
        label = "alerts" if index == 0 else ""
        yield label, f"{alert.severity.name} {alert.title}, since {age}; {owner}", style
    if len(seen) > ALERTS_SHOWN:
        yield "", f"and {len(seen) - ALERTS_SHOWN} more ({signs.command(snapshot, 'alerts list')})", ""
