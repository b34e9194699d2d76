"""The kill switch is set while work is queued, or the training runs on in spite of it."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import JobState
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import KillSwitch, Snapshot
from tr11ops.units import duration


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """A set switch makes every queued task leave at once, one after another, until the queue is empty."""
    switch = snapshot.kill_switch
    if not isinstance(switch, KillSwitch):
        return
    release = signs.command(snapshot, "resume")
    evidence = (
        f"{switch.path}: set by {switch.who or 'someone'}" + (f", because: {switch.why}" if switch.why else ""),
    )
    queued = signs.queued_tasks(signs.startable_jobs(snapshot))
    if queued:
        word = "the queued task" if queued == 1 else f"all {queued} queued tasks"
        yield Finding(
            "kill-switch-left-on",
            Severity.WARNING,
            f"the kill switch is set: {word} will leave at once",
            evidence=evidence,
            fix=release,
        )
    age = None if switch.time is None else snapshot.time - switch.time
    for job in signs.active_jobs(snapshot):
        if job.state is JobState.RUNNING and age is not None and age > signs.OTHER_PHASE_SECONDS:
            yield Finding(
                "kill-switch-left-on",
                Severity.CRITICAL,
                f"job {job.job_id} still runs {duration(age)} after the kill switch was set",
                subject=job.job_id,
                evidence=evidence,
                fix=signs.command(snapshot, "logs"),
            )
