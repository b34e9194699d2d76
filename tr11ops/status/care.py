"""The status screen's rows about the operation around the training: nodes, copies, periodic jobs,
disks, alerts. Pure.

Made of the status document alone. What the card does not use has no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from tr11ops.base.units import counted, duration
from tr11ops.detect.detector import Severity
from tr11ops.observe.observations import CopyStatus
from tr11ops.rundir.disk_usage import KINDS, Kind
from tr11ops.rundir.exclusion import Exclusion, NodeStanding, kept_off
from tr11ops.status.document import ShownFilesystem, ShownPeriodicJob, Status
from tr11ops.status.extra_observations import SYNC
from tr11ops.status.rows import Row

NODES_SHOWN = 6
ALERTS_SHOWN = 5
JOBS_SHOWN = 4
FAR_SECONDS = 90 * 86400.0  # a file system that is full later than this is no news


# ----------------------------------------------------------------------------- nodes
def nodes(status: Status) -> Iterator[Row]:
    """Nodes held and not to be used, and why not."""
    use, excluded = status.node_use, status.exclusions
    if use is None:
        parts = ["unknown"]
    elif use.used or use.spare:
        parts = [f"{use.used} used, {use.spare} spare"]
    else:
        parts = ["none held"]
    count = None if use is None else use.excluded
    if excluded is not None:
        count = len(excluded)
    if count is None:
        parts.append("excluded: unknown")
    elif not count:
        parts.append("none excluded")
    else:
        parts.append(f"{count} excluded" + (f": {_named(excluded)}" if excluded else ""))
    style = ""
    if status.bad_nodes:
        parts.append(f"bad but not excluded: {', '.join(status.bad_nodes)}")
        style = "yellow"
    if use is None or count is None:
        style = "magenta"
    yield "nodes", "; ".join(parts), style
    leaving = status.leaving_nodes
    for node in leaving[:NODES_SHOWN]:
        why = ""
        if node.reason:
            why = f" ({node.reason})"
        yield (
            "",
            f"{node.name} leaves when its job ends: {'+'.join(sorted(node.states))}{why}",
            "yellow",
        )
    if len(leaving) > NODES_SHOWN:
        yield "", f"and {len(leaving) - NODES_SHOWN} more", "yellow"


def _named(excluded: Sequence[Exclusion]) -> str:
    named = ", ".join(map(_shown, excluded[:NODES_SHOWN]))
    return named + (
        f" and {len(excluded) - NODES_SHOWN} more" if len(excluded) > NODES_SHOWN else ""
    )


# ----------------------------------------------------------------------------- copies
def copies(status: Status) -> Iterator[Row]:
    """The newest backup, what lacks a copy, who copies now, the last restore and the last sync, as
    the card asks.
    """
    wanted = status.card.copies
    if not wanted:
        return
    made = {"backup": status.backup, SYNC: status.sync}
    if "backup" in wanted:
        parts = [*_backup(status)]
    else:
        parts = []
    if SYNC in wanted:
        parts.append(f"sync {_copy(status, SYNC, status.sync)}")
    style = ""
    if status.copies_damaged:
        style = "red"
    elif any(status.reason_unknown(what) is not None for what in wanted):
        style = "magenta"
    elif any((copy := made[what]) is None or copy.message for what in wanted):
        style = "yellow"
    yield "copies", "; ".join(parts), style
    for work in status.copying or ():
        if work.to == SYNC:
            what = "mirrors the logs to the hub"
        else:
            what = f"copies to the {work.to}"
        step = ""
        if work.step is not None:
            step = f" (step {work.step})"
        yield (
            "",
            f"{work.who} on {work.host} {what}{step}, for {duration(status.age(work.since))}",
            "cyan",
        )


def _backup(status: Status) -> Iterator[str]:
    yield f"backup {_copy(status, 'backup', status.backup)}"
    if status.copies_missing:
        yield f"{status.copies_missing} not copied yet"
    if status.copies_damaged:
        yield f"{status.copies_damaged} DAMAGED"
    drill = status.restore_drill
    if drill is not None:
        how = "passed" if drill.passed else "FAILED"
        yield f"restore drill of step {drill.step} {how} {duration(status.age(drill.time))} ago"
    elif status.reason_unknown("restore drill") is not None:
        yield "restore drill unknown"


def _copy(status: Status, what: str, copy: CopyStatus | None) -> str:
    if copy is None:
        if status.reason_unknown(what) is None:
            return "never yet"
        return "unknown"
    if copy.step is None:
        step = ""
    else:
        step = f"of step {copy.step} "
    fault = ""
    if copy.message:
        fault = f", but now: {copy.message}"
    return f"{step}{duration(status.age(copy.time))} ago{fault}"


# ----------------------------------------------------------------------------- file systems
def filesystems(status: Status) -> Iterator[Row]:
    """The fullest of the watched file systems, and when it will be full."""
    fullest = _fullest(status.filesystems or ())
    if fullest is not None:
        shown, kind, percent = fullest
        if shown.full_at is None:
            left = None
        else:
            left = shown.full_at - status.time
        when = ""
        if left is not None and left < FAR_SECONDS:
            when = f", full in {duration(left)}"
        count = len(status.filesystems or ())
        of = ""
        if count > 1:
            of = f" (fullest of {count})"
        ago = duration(status.age(shown.usage.time))
        style = "yellow" if percent >= _bound(shown, kind) else ""
        yield "disks", f"{shown.usage.name} {percent:.0f} % of {kind}{of}{when}; {ago} ago", style
    elif status.card.filesystems and status.filesystems is None:
        yield "disks", "unknown", "magenta"
    elif status.card.filesystems:
        yield "disks", f"not looked at yet ({status.command('fs-watchdog')})", "yellow"


def _fullest(filesystems: Sequence[ShownFilesystem]) -> tuple[ShownFilesystem, Kind, float] | None:
    """The one with the largest share used, in bytes or in inodes, and that share in percent."""
    fullest: tuple[ShownFilesystem, Kind, float] | None = None
    for shown in filesystems:
        for kind in KINDS:
            percent = shown.usage.percent(kind)
            if percent is not None and (fullest is None or percent > fullest[2]):
                fullest = shown, kind, percent
    return fullest


def _bound(shown: ShownFilesystem, kind: Kind) -> float:
    if kind == "bytes":
        return shown.rule.bytes_percent
    return shown.rule.inodes_percent


# ----------------------------------------------------------------------------- periodic jobs
def periodic(status: Status) -> Iterator[Row]:
    """Which periodic jobs are alive; the late and the failing first. No row where none was ever
    run.
    """
    if status.periodic_jobs is None:
        yield "periodic", "unknown", "magenta"
        return
    jobs = [shown for shown in status.periodic_jobs if shown.wanted]
    if not jobs:
        return
    yield from _alive_or_ill(jobs, status.time)
    if status.watchdog_acts is False and not status.watchdog_fault:
        yield "", "the watchdog only tells (watch.act = false): what it would do waits for you", ""


def _alive_or_ill(periodic: Sequence[ShownPeriodicJob], now: float) -> Iterator[Row]:
    ill = [shown for shown in periodic if shown.late or shown.job.failures_in_a_row]
    if ill:
        more = ""
        if len(ill) > JOBS_SHOWN:
            more = f"; and {len(ill) - JOBS_SHOWN} more"
        yield (
            "periodic",
            "; ".join(_illness(shown, now) for shown in ill[:JOBS_SHOWN]) + more,
            "red",
        )
        return
    jobs = [shown.job for shown in periodic]
    last, due = max(jobs, key=attrgetter("started")), min(jobs, key=attrgetter("next_due"))
    if due.next_due > now:
        ahead = f"next {due.name} in {duration(due.next_due - now)}"
    else:
        ahead = f"{due.name} is due"
    count = counted(len(jobs), "job alive", "jobs alive")
    yield (
        "periodic",
        f"{count}, last {last.name} {duration(max(0.0, now - last.started))} ago; {ahead}",
        "",
    )


def _illness(shown: ShownPeriodicJob, now: float) -> str:
    job, faults = shown.job, []
    if shown.late:
        faults.append(f"late by {duration(now - job.next_due)}")
    if job.failures_in_a_row:
        faults.append(f"failed {counted(job.failures_in_a_row, 'time')}: {job.message}")
    return f"{job.name} {', '.join(faults)}"


# ----------------------------------------------------------------------------- alerts
def alerts(status: Status) -> Iterator[Row]:
    """The open alerts, and who has each."""
    seen = status.alerts
    if seen is None:
        yield "alerts", f"unknown: {status.reason_unknown('alerts')}", "magenta"
        return
    if not seen:
        fault = status.watchdog_fault
        yield "alerts", f"none open; {fault}" if fault else "none open", "yellow" if fault else ""
        return
    for index, alert in enumerate(seen[:ALERTS_SHOWN]):
        owner = alert.owner or alert.acknowledged_by
        if alert.snoozed_until is not None and alert.snoozed_until > status.time:
            owner = f"snoozed for {duration(alert.snoozed_until - status.time)}"
        elif owner:
            owner = f"{owner} has it"
        else:
            owner = f"unassigned: {status.command(f'alerts ack {alert.fingerprint}')}"
        style = "red" if alert.severity is Severity.CRITICAL else "yellow"
        words = (
            f"{alert.severity.name} {alert.title} ({duration(status.age(alert.start))}); {owner}"
        )
        yield "alerts" if index == 0 else "", words, style
        if alert.watchdog:
            yield "", alert.watchdog, ""
    if len(seen) > ALERTS_SHOWN:
        yield "", f"and {len(seen) - ALERTS_SHOWN} more ({status.command('alerts list')})", ""


def _shown(entry: Exclusion) -> str:
    """A node with why it is not used; what is less than an exclusion says so."""
    if entry.state == NodeStanding.EXCLUDE:
        words = ""
    else:
        words = kept_off(entry.state)
    why = ": ".join(filter(None, (words, entry.why)))
    if why:
        return f"{entry.node} ({why})"
    return entry.node
