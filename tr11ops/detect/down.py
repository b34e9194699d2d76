"""Nothing runs and nothing is queued, though the training is neither finished nor stopped by
someone.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.end_marker import BAD_REASONS

BOUND = "at once"
SEVERITIES = "CRITICAL"
NAME = "down"
NEEDS = ("jobs", "kill_switch", "pause", "attempts", "last_end", "heartbeats", "steps")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Silent unless jobs and the kill switch were really seen: absence is never concluded from
    silence.
    """
    if isinstance(snapshot.jobs, Unknown) or derived.stop_of(snapshot) is not None:
        return
    if snapshot.active_jobs or snapshot.pending_jobs:
        return
    if derived.is_finished(snapshot) or derived.liveness_outside(snapshot) is not None:
        return
    if isinstance(snapshot.attempts, Unknown) or derived.last_end_is_unknown(snapshot):
        return
    if derived.may_live_outside(snapshot):
        return  # it may train outside the scheduler
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"{snapshot.run.name} is neither running nor queued",
        evidence=tuple(_evidence(snapshot)),
        fix=derived.command(snapshot, _what_helps(snapshot)),
        then=(derived.command(snapshot, last_launch(snapshot)),),
        since=_since(snapshot),
    )


def _since(snapshot: Snapshot) -> float | None:
    """When the last of it ended, as far as that is known; None where a person had stopped the run
    until some time.
    """
    marker = derived.last_marker(snapshot)
    attempts = known(snapshot.attempts, ())
    if not attempts or (marker is not None and marker.reason in {"kill-switch", "pause"}):
        return None
    jobs = (*known(snapshot.jobs, ()), *known(snapshot.operation.ended_jobs, ()))
    ended = [job.end_time for job in jobs if job.end_time is not None and job.state.is_final]
    submitted = [entry.time for entry in known(snapshot.submissions, ())]
    return max(*(attempt.changed for attempt in attempts), *ended, *submitted, 0.0)


def _what_helps(snapshot: Snapshot) -> str:
    """The launch that was last typed, once more; but first a look, where the same launch would fail
    the same way.
    """
    marker = derived.last_marker(snapshot)
    if marker is not None and marker.reason in BAD_REASONS:
        return "logs"
    return last_launch(snapshot)


def last_launch(snapshot: Snapshot) -> str:
    """The launch that was last typed, as words of a command."""
    newest = next(iter(known(snapshot.submissions, ())), None)
    if newest is None:
        return "launch --array 1-10"
    if newest.array is None:
        words = ["launch"]
    else:
        words = ["launch --array", newest.array.partition("%")[0]]
    if newest.scheduler == "local":  # else Slurm would be taken where there is one
        words.append("--scheduler local")
    return " ".join(words)


def _evidence(snapshot: Snapshot) -> Iterator[str]:
    marker = derived.last_marker(snapshot)
    if marker is not None:
        if marker.reason == "refused":
            yield f"the last attempt refused to start: {marker.message}"
        else:
            yield f"the last attempt that left word ended by {marker.reason} at iteration {marker.iteration}"
    newest = next(iter(known(snapshot.submissions, ())), None)
    if newest is None:
        yield "nothing was ever submitted from this run directory"
    elif newest.job_id is None:
        yield f"the scheduler never said whether it took submission {newest.tag}"
    else:
        yield f"the last submission was job {newest.job_id}" + (
            f", array {newest.array}" if newest.array else ""
        )
