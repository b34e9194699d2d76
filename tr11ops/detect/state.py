"""The state of the run: directories and switches that are not seen, damaged files, and namesakes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tr11ops.base.observed import seen
from tr11ops.base.units import counted, duration, first_few
from tr11ops.cluster.base import JobState
from tr11ops.detect.detector import HELD_FOR_FAULT, Finding, Severity, detector
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.hold_store import marked_holds


@detector(
    "directory-unseen",
    needs=("jobs",),
    bound="at once",
    severities="CRITICAL, WARNING while a job runs, which may see it on its own nodes",
)
def directory_unseen(snapshot: Snapshot) -> Iterator[Finding]:
    """The run directory that is seen here is not the one that the run's jobs were queued from: it is
    not mounted, or its file system does not answer.

    A job carries the directory's mark, and no launch is on record there: nothing that is read
    there is the run's.
    """
    if not snapshot.unmounted:
        return
    directory = shlex.quote(str(snapshot.run.directory))
    lack, look = "is not mounted here", f"findmnt --target {directory}"
    there = "a task that starts on a node without it ends at once and holds the rest"
    if snapshot.is_silent:
        lack, look = "does not answer here", f"timeout -s KILL 10 df {directory}"
        there = "where it does not answer on the nodes either, what trains waits at its next save"
    title = f"the run directory {lack}: where the run stands is not known"
    evidence = [snapshot.unmounted]
    then, fault = [derived.command(snapshot, "pulse")], ""
    # what a task held that could not start says so in the queue itself
    held = [hold for hold in marked_holds(snapshot.pending_jobs, ()) if hold.is_for_fault]
    if held and not snapshot.active_jobs:
        title = f"the run directory {lack}: nothing trains, and what is queued is held"
        since = min(hold.time or snapshot.time for hold in held)
        age = max(0.0, snapshot.time - since)
        evidence.append(f"what is queued is held, for {duration(age)} now: {held[0].why}")
        then.insert(0, derived.command(snapshot, "resume"))
        fault = HELD_FOR_FAULT
    yield Finding(
        directory_unseen.name,
        Severity.WARNING if snapshot.active_jobs else Severity.CRITICAL,
        title,
        evidence=(
            *evidence,
            f"{there}; what is held stays held",
            "nothing was changed, and `tr11 launch` and `tr11 resume` refuse until it is there again",
        ),
        fix=look,
        then=tuple(then),
        fault=fault,
    )


@detector(
    "switch-unseen",
    needs=("switch_fault",),
    bound="at once",
    severities="WARNING",
)
def switch_unseen(snapshot: Snapshot) -> Iterator[Finding]:
    """The kill switch cannot be seen from here: its file system is not mounted, or what lies there is
    not the run's.

    WARNING: the run trains on, but `tr11 kill` does not reach it from here, and nothing is known
    of a stop.
    """
    fault = seen(snapshot.switch_fault)
    if not fault:
        return
    yield Finding(
        switch_unseen.name,
        Severity.WARNING,
        "the kill switch cannot be seen from here: whether the run was stopped is not known",
        evidence=(fault, "`tr11 kill` sets nothing here, and says how else the run is stopped"),
        fix=derived.command(snapshot, "kill --dry-run"),
    )


# a queued job keeps its place in the queue for as long; sites do not like it for ever
FORGOTTEN_SECONDS = derived.DAY


@detector(
    "kill-switch-left-on",
    needs=("kill_switch", "jobs"),
    bound="at once; held work: a day; a running job: an hour",
    severities="WARNING, CRITICAL",
)
def kill_switch_left_on(snapshot: Snapshot) -> Iterator[Finding]:
    """The kill switch is set while work is queued, or the training runs on in spite of it.

    WARNING while queued tasks would start and leave at once, one after another, or while work
    has waited for a day.

    CRITICAL when a job runs on long after the switch was set.
    """
    switch = seen(snapshot.kill_switch)
    if switch is None:
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
            kill_switch_left_on.name,
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
            kill_switch_left_on.name,
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
                kill_switch_left_on.name,
                Severity.CRITICAL,
                f"job {job.job_id} still runs {duration(age)} after the kill switch was set",
                subject=job.job_id,
                identity=("still runs",),
                evidence=evidence,
                fix=derived.command(snapshot, "logs"),
            )


MOST_NAMED = 3


@detector(
    "damaged-state",
    needs=("damaged_files",),
    bound="at once",
    severities="WARNING",
)
def damaged_state(snapshot: Snapshot) -> Iterator[Finding]:
    """A state file of the run directory is damaged: what it said is missing, and nothing says so but
    this.

    WARNING, one for all files, as long as one is damaged.
    """
    damaged = sorted(seen(snapshot.damaged_files), key=lambda entry: entry.is_newer)
    if not damaged:
        return
    more = ""
    if len(damaged) > 1:
        more = f" and {len(damaged) - 1} more"
    head = "a state file:" if damaged[0].is_newer else "a state file is damaged:"
    lines = [f"{entry.path} {entry.what}: {entry.without}" for entry in damaged[:MOST_NAMED]]
    is_moved = any(entry.is_set_aside for entry in damaged)
    yield Finding(
        damaged_state.name,
        Severity.WARNING,
        f"{head} {damaged[0].path} {damaged[0].what}{more}",
        evidence=tuple(lines),
        fix=derived.command(snapshot, "pulse --act --no-email") if is_moved else "",
    )


NAMED = 3


@detector(
    "namesake",
    uses=("jobs",),
    bound="at once",
    severities="INFO",
)
def namesake(snapshot: Snapshot) -> Iterator[Finding]:
    """A job carries this run's name but does not belong to it: easily mistaken for the run, by people
    and by tools.

    One remark for all jobs of that name that still run or wait, which count for nothing else;
    and one for those of the run that train another variant of it: they hold its lease, and its kill
    switch stops them.
    """
    for job_id, variant in list(derived.other_variants(snapshot).items())[:1]:
        yield Finding(
            namesake.name,
            Severity.INFO,
            f"job {job_id} trains variant {variant} of this run: its log and checkpoints are that variant's",
            subject=job_id,
        )
    strangers = [job for job in snapshot.namesakes if not job.state.is_final]
    if strangers:
        named = first_few((f"{job.job_id} of {job.user}" for job in strangers), NAMED)
        yield Finding(
            namesake.name,
            Severity.INFO,
            f"not of this run, though of its name: {named}",
            subject=strangers[0].job_id,
            evidence=tuple(
                f"{job.job_id}: {job.working_directory or job.comment or 'no directory'}"
                for job in strangers[:NAMED]
            ),
        )
