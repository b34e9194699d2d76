"""Since when a verdict holds: by the evidence of one look, and by the looks before it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.alerts.state import HeldVerdict
from tr11ops.base.observed import known
from tr11ops.cluster.base import Job
from tr11ops.detect.detector import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.watchdog.verdict import Verdict, VerdictWord


def held_verdict(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict
) -> HeldVerdict:
    """What this look alone tells: it is what a watchdog keeps, after `HeldVerdict.after`."""
    if verdict.word is VerdictWord.UNKNOWN:
        return HeldVerdict("", None, snapshot.time, unseen=snapshot.time)
    return HeldVerdict(verdict.word.value, _evident(snapshot, findings, verdict), snapshot.time)


def since_when(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    before: HeldVerdict | None,
) -> float | None:
    """Since when the verdict of this look holds (seconds since the epoch); None where that is not
    known. `before` is what the watchdog has kept.
    """
    if verdict.word is VerdictWord.UNKNOWN:
        return None if before is None else before.unseen
    seen = held_verdict(snapshot, findings, verdict)
    if seen.since is None and (before is None or before.word != seen.word):
        return None
    return seen.after(before).since


def _evident(snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict) -> float | None:
    """When it began, by what was seen now; never later than the look."""
    moments = [moment for moment in _moments(snapshot, findings, verdict) if moment is not None]
    if not moments:
        return None
    return min(moments[0], snapshot.time)


def _moments(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict
) -> Iterator[float | None]:
    """Candidates, the most telling first."""
    marker = derived.last_marker(snapshot)
    ended = None if marker is None else marker.time
    match verdict.word:
        case VerdictWord.STOPPING | VerdictWord.STOPPED:
            switch = derived.stop_of(snapshot)
            if isinstance(switch, KillSwitch):
                yield switch.time
            yield ended
        case VerdictWord.FINISHED:
            yield ended
        case VerdictWord.DOWN:
            newest = derived.last_attempt(snapshot)  # which may have left no marker
            yield ended if newest is None else newest.changed
            yield from _of_faults(findings)
        case VerdictWord.STALLED | VerdictWord.AT_RISK:
            yield from _of_faults(findings)
        case VerdictWord.QUEUED:
            waiting = derived.startable_jobs(snapshot)
            submitted = [job.submit_time for job in waiting if job.submit_time is not None]
            yield max((*submitted[:1], *(() if ended is None else (ended,))), default=None)
        case VerdictWord.SLOW:
            begun = [one.since for one in findings if one.costs_time and one.since is not None]
            yield min(begun) if begun else _started(snapshot)
        case VerdictWord.STARTING | VerdictWord.HEALTHY:
            yield _started(snapshot)


def _of_faults(findings: tuple[Finding, ...]) -> Iterator[float | None]:
    """When the faults began that a person must get up for, the first one first."""
    begun = [
        one.since for one in findings if one.severity is Severity.CRITICAL and one.since is not None
    ]
    yield min(begun, default=None)


def _started(snapshot: Snapshot) -> float | None:
    """When the workers that run now were started: the last launch of the job, or the job."""
    jobs = [job for job in snapshot.active_jobs if job.start_time is not None]
    if not jobs:
        return None
    job = max(jobs, key=_start_of)
    names = derived.identifiers(job)
    ends = [
        end.time
        for end in known(snapshot.training.launch_ends, ())
        if end.job_id in names and end.time is not None
    ]
    return max((_start_of(job), *ends))


def _start_of(job: Job) -> float:
    return job.start_time or 0.0
