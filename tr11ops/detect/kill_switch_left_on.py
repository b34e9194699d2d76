"""The kill switch is set while work is queued, or the training runs on in spite of it."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.snapshot import KillSwitch, Snapshot

BOUND = "at once; held work: a day; a running job: an hour"
SEVERITIES = "WARNING, CRITICAL"
NAME = "kill-switch-left-on"
NEEDS = ("kill_switch", "jobs")

# a queued job keeps its place in the queue for as long; sites do not like it for ever
FORGOTTEN_SECONDS = derived.DAY


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING while queued tasks would start and leave at once, one after another, or while work
    has waited for a day.

    CRITICAL when a job runs on long after the switch was set.
    """
    switch = snapshot.kill_switch
    if not isinstance(switch, KillSwitch):
        return
    release = derived.command(snapshot, "resume")
    evidence = (
        f"{switch.path}: set by {switch.who or 'someone'}"
        + (f", because: {switch.why}" if switch.why else ""),
    )
    queued = derived.queued_tasks(derived.startable_jobs(snapshot))
    if queued:
        if queued == 1:
            word = "the queued task"
        else:
            word = f"all {queued} queued tasks"
        yield Finding(
            NAME,
            Severity.WARNING,
            f"the kill switch is set: {word} will leave at once",
            evidence=evidence,
            fix=release,
        )
    if switch.time is None:
        age = None
    else:
        age = snapshot.time - switch.time
    held = snapshot.pending_jobs
    tasks = counted(derived.queued_tasks(held), "task")
    if not queued and held and age is not None and age > FORGOTTEN_SECONDS:
        yield Finding(
            NAME,
            Severity.WARNING,
            f"the kill switch has been set for {duration(age)} and work of the run ({tasks}) is held",
            evidence=evidence,
            fix=release,
        )
    for job in snapshot.active_jobs:
        if (
            job.state is JobState.RUNNING
            and age is not None
            and age > normal_silence.UNLEARNED_SECONDS
        ):
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} still runs {duration(age)} after the kill switch was set",
                subject=job.job_id,
                identity=("still runs",),
                evidence=evidence,
                fix=derived.command(snapshot, "logs"),
            )
