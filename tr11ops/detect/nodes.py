"""Nodes: lost ones, jobs that have lost theirs, and nodes that are excluded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from msgspec.structs import replace

from tr11ops.base.observed import known, seen
from tr11ops.base.units import counted, duration, first_few, timestamp
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.nodes_left import (
    bad_nodes,
    cannot_return,
    excluded_in_partition,
    excluded_nodes,
    exclusion_limit,
    fault_of_cap,
    is_last_meant,
    is_spare,
    lost_nodes,
    needed_next,
    nodes_of_partition,
    note_for_site,
    partition_of,
    spare_nodes,
    start_next,
    take_back,
    training_count,
    unusable_nodes,
    usable_nodes,
    what_may_be_lost,
    without_bad_nodes,
)
from tr11ops.detect.unfinished_end import known_ends, unfinished_attempts
from tr11ops.observe import derived
from tr11ops.observe.jobs import standing_holds
from tr11ops.observe.liveness import (
    batch_host,
    has_ended,
    has_lost_its_host,
    is_zombie,
    liveness_of,
    step_times,
)
from tr11ops.observe.observations import LaunchEnd
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.rundir.exclusion import KEY, kept_off, percent_for
from tr11ops.rundir.exclusions import due_for_recheck

NOTHING_QUEUED = "nothing is queued"


@detector(
    "node-lost",
    needs=("jobs", "nodes"),
    bound="at once",
    severities="WARNING, CRITICAL with the batch script's node gone and no next task that runs",
)
def node_lost(snapshot: Snapshot) -> Iterator[Finding]:
    """A node of a running job is gone. Without its first node a job has no script left: it stays
    RUNNING for ever.

    One that only does not answer the scheduler may work on: that is a warning, whatever node it is. A
    draining or failing node works on until its job ends: that is no finding.

    One finding for each node that is lost or silent; CRITICAL when the one that runs the batch
    script is lost.

    Slurm takes a lost node out of the job: then the record of the attempt still tells which one ran
    the script. A WARNING where that one is still gone and the attempt has ended by it, until a
    later one trains.
    """
    for job in snapshot.active_jobs:
        # it gives back its nodes: the list holds those that are still to come
        if job.state is JobState.COMPLETING:
            continue
        host = batch_host(snapshot, job) or next(iter(job.nodes), "")
        for name in dict.fromkeys((host, *job.nodes)):
            node = snapshot.node(name)
            if node is None:
                continue
            has_left = name == host and has_lost_its_host(snapshot, job)
            if node.is_gone or has_left:
                yield _lost(snapshot, job, node, is_host=name == host)
            elif node.is_silent:
                yield _silent(snapshot, job, node, is_host=name == host)
    for attempt in unfinished_attempts(snapshot):
        node = snapshot.node(next(iter(attempt.nodes), ""))
        if attempt.end is not None or _script_ended_by_itself(snapshot, attempt):
            continue
        if node is not None and node.is_gone:
            yield _of_ended_attempt(snapshot, attempt, node)


def _lost(snapshot: Snapshot, job: Job, node: Node, is_host: bool) -> Finding:
    if is_host:
        return _lost_host(snapshot, job, node)
    title = f"job {job.job_id} has lost {node.name}"
    went_on = _went_on_without(snapshot, job, node)
    if went_on is not None:
        return _without(title, job, node, went_on)
    if is_spare(snapshot, job, node.name):
        title = f"job {job.job_id} has lost {node.name}, a spare"
        return _about_node(Severity.WARNING, title, job, node, by_itself=OF_SPARE)
    return _about_node(
        Severity.WARNING,
        title,
        job,
        node,
        fix=derived.command(snapshot, "logs"),
        by_itself=f"The run {_goes_on(snapshot, job)}.",
    )


def _without(title: str, job: Job, node: Node, went_on: LaunchEnd) -> Finding:
    return _about_node(
        Severity.WARNING,
        f"{title}, and went on without it at {timestamp(went_on.time, UTC)}",
        job,
        node,
        evidence=(went_on.why,),
        by_itself="There is nothing to type.",
        since=went_on.time,
    )


def _goes_on(snapshot: Snapshot, job: Job) -> str:
    """What a run does that has lost a node of this job, as far as its nodes and its queue tell."""
    usable, needed, training = usable_nodes(snapshot), needed_next(snapshot), snapshot.run.nodes
    left = len(set(job.nodes) - lost_nodes(snapshot))
    starts_none = usable is not None and needed is not None and usable < needed
    if starts_none and training is not None and left < training:
        return "does not go on by itself: too few nodes are left for it"
    goes_on = "goes on without it by itself: on a spare"
    if derived.startable_jobs(snapshot):
        return f"{goes_on}, or in the next queued task"
    queued = "what is queued does not start by itself" if snapshot.pending_jobs else NOTHING_QUEUED
    return f"{goes_on}, if the attempt has one; {queued}"


def _lost_host(snapshot: Snapshot, job: Job, node: Node) -> Finding:
    """Its job has no script any more: another job that has its nodes ends it, else a person does."""
    found = _about_node(
        Severity.CRITICAL,
        f"job {job.job_id} has lost {node.name}, which ran its batch script",
        job,
        node,
        fix=derived.command(snapshot, "launch --repair"),
    )
    following = _follows(snapshot, job)
    if following is not None:
        ends = f"Job {following.job_id}, which has its own nodes, ends job {job.job_id} before it trains"
        late = f"should job {following.job_id} not come to train, `{found.fix}` does the same"
        by_itself = f"{ends}, and excludes {node.name} as far as the cap allows it."
        return replace(
            found,
            severity=Severity.WARNING,
            fix="",
            evidence=(*found.evidence, late),
            by_itself=by_itself,
        )
    return replace(found, then=_after_repair(snapshot))


# of a job that has nodes, and is not leaving them
_GOING_ON = frozenset({JobState.CONFIGURING, JobState.RUNNING})


def _follows(snapshot: Snapshot, job: Job) -> Job | None:
    """The task of the same array that has nodes already, and ends one that has lost its batch host
    before it trains; None where there is none.

    A job of another launch leaves it alone, and so does one that is leaving; one that trains has
    done what it could.
    """
    for other in reversed(snapshot.active_jobs):
        is_of_array = job.array_id is not None and other.array_id == job.array_id
        if other.job_id == job.job_id or not is_of_array or other.state not in _GOING_ON:
            continue
        has_trained = bool(step_times(snapshot, derived.identifiers(other)))
        if not has_trained and not has_lost_its_host(snapshot, other):
            return other
    return None


OF_SPARE = (
    "No rank runs there. When the scheduler has lost it, the attempt excludes it by itself, and what is "
    "queued waits for the attempt's end: there is nothing to type."
)


def _went_on_without(snapshot: Snapshot, job: Job, node: Node) -> LaunchEnd | None:
    """The end of the launch that this node was lost in, where the job has finished iterations
    since; else None.
    """
    ends = derived.launch_ends(snapshot, (job.raw_id,))
    last = next((end for end in ends if node.name in end.blamed), None)
    if last is None:
        return None
    trained = step_times(snapshot, derived.identifiers(job))
    if any(moment > last.time for moment in trained):
        return last
    return None


def _silent(snapshot: Snapshot, job: Job, node: Node, is_host: bool) -> Finding:
    """What does not answer the scheduler may work on: no word of it promises what is not known."""
    if is_host:
        return _about_node(
            Severity.WARNING,
            f"{node.name}, which runs the batch script of job {job.job_id}, does not answer the scheduler",
            job,
            node,
            evidence=(_life_of(snapshot, job), _behind(snapshot, WITHOUT_SCRIPT)),
        )
    went_on = _went_on_without(snapshot, job, node)
    if went_on is not None:
        return _without(f"job {job.job_id} has lost {node.name}", job, node, went_on)
    if is_spare(snapshot, job, node.name):
        title = f"{node.name}, a spare of job {job.job_id}, does not answer the scheduler"
        return _about_node(Severity.WARNING, title, job, node, by_itself=OF_SPARE)
    return _about_node(
        Severity.WARNING,
        f"{node.name} of job {job.job_id} does not answer the scheduler",
        job,
        node,
        evidence=(f"what runs there may run on; {_life_of(snapshot, job)}",),
        fix=derived.command(snapshot, "logs"),
        by_itself=f"If it is lost, the run {_goes_on(snapshot, job)}.",
    )


def _life_of(snapshot: Snapshot, job: Job) -> str:
    """What is seen of a job's workers."""
    liveness = liveness_of(snapshot, job)
    if liveness is None:
        return "its workers: no sign of life is seen"
    ago = duration(liveness.silent_for(snapshot.time))
    return f"its workers: {liveness.phase}, last sign of life {ago} ago"


WITHOUT_SCRIPT = "without its batch script's node a job does not go on"


def _behind(snapshot: Snapshot, end: str) -> str:
    """What could go on when an attempt ends, and how it may `end`."""
    for job in derived.startable_jobs(snapshot):
        return f"{end}; behind it is queued: job {job.job_id}"
    if not snapshot.pending_jobs:
        more = derived.launch_more(snapshot)
        return f"{end}, and {NOTHING_QUEUED} behind it: `{more}` queues more"
    then = ", then ".join(f"`{line}`" for line in start_next(snapshot))
    return f"{end}, and what is queued behind it does not start by itself: {then}"


def _about_node(
    severity: Severity,
    title: str,
    job: Job,
    node: Node,
    *,
    evidence: tuple[str, ...] = (),
    fix: str = "",
    by_itself: str = "",
    since: float | None = None,
) -> Finding:
    return Finding(
        node_lost.name,
        severity,
        title,
        subject=job.job_id,
        identity=(node.name,),
        evidence=(node.words, *evidence),
        fix=fix,
        by_itself=by_itself,
        since=since,
    )


def _script_ended_by_itself(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Whether the scheduler has the exit code of its script: the node that ran it was there then,
    whatever has become of it since.
    """
    job = known_ends(snapshot).get(attempt.job_id)
    if job is None or job.exit_signal:
        return False
    return job.state in {JobState.FAILED, JobState.COMPLETED}


def _of_ended_attempt(snapshot: Snapshot, attempt: Attempt, node: Node) -> Finding:
    """The same incident as long as no later attempt trains: the job may have been ended for it
    meanwhile.

    What is queued goes on by itself, or by what starts it; where nothing is, the next launch gets
    other nodes.
    """
    label = attempt.label or attempt.job_id
    title = f"job {label} has lost {node.name}, which ran its batch script, and has ended"
    goes_on = _job_after(snapshot, attempt)
    commands = () if goes_on else start_next(snapshot)
    return Finding(
        node_lost.name,
        Severity.WARNING,
        title,
        subject=label,
        identity=(node.name,),
        evidence=(node.words,),
        fix="".join(commands[:1]),
        then=commands[1:],
        by_itself=goes_on,
        since=attempt.changed,
    )


def _job_after(snapshot: Snapshot, attempt: Attempt) -> str:
    """That the run goes on in another job, which has nodes already or starts by itself; "" where none
    does.
    """
    for job in reversed(snapshot.active_jobs):
        if job.state in _GOING_ON and attempt.job_id not in derived.identifiers(job):
            return f"The run goes on in job {job.job_id} by itself: there is nothing to type."
    for job in derived.sure_jobs(snapshot):
        if derived.stop_of(snapshot) is None:
            return f"The run goes on in job {job.job_id}, which is queued, by itself: there is nothing to type."
    return ""


@detector(
    "zombie",
    needs=("jobs", "heartbeats", "steps", "training.launch_ends"),
    uses=("nodes", "attempts"),
    bound="3 iterations and 30 s; 2 minutes",
    severities="CRITICAL, WARNING where another job has its nodes and ends it",
)
def zombie(snapshot: Snapshot) -> Iterator[Finding]:
    """An allocation without its batch script: the batch host is lost, the job lives on for ever on its
    other nodes.

    Nothing will end such a job but its time limit, and the next task waits for it.
    """
    for job in snapshot.active_jobs:
        if is_zombie(snapshot, job):
            liveness = liveness_of(snapshot, job)
            if liveness is None:
                silence = ""
            else:
                silence = (
                    f"; the last sign of life is {duration(liveness.silent_for(snapshot.time))} old"
                )
            is_seen_to = _follows(snapshot, job) is not None
            yield Finding(
                zombie.name,
                Severity.WARNING if is_seen_to else Severity.CRITICAL,
                f"job {job.job_id} runs on without its batch script: its host {batch_host(snapshot, job)} is lost",
                subject=job.job_id,
                identity=(batch_host(snapshot, job),),
                evidence=(
                    f"{counted(job.node_count or len(job.nodes), 'node is', 'nodes are')} held{silence}",
                ),
                fix="" if is_seen_to else derived.command(snapshot, "launch --repair"),
                then=_after_repair(snapshot),
                since=None if liveness is None else liveness.time,
            )


def _after_repair(snapshot: Snapshot) -> tuple[str, ...]:
    """What starts the next attempt when a repair has ended the job, which releases what tr11 holds."""
    if len(snapshot.active_jobs) > 1 or standing_holds(snapshot):
        return ()
    return start_next(snapshot)


NODES_NAMED = 6


@detector(
    "no-spare",
    needs=("jobs", "nodes", "exclusions", "attempts", "training.launch_nodes"),
    uses=("training.launch_ends", "heartbeats", "steps"),
    bound="the last one",
    severities="INFO",
)
def no_spare(snapshot: Snapshot) -> Iterator[Finding]:
    """The running attempt has lost the last spare node that it began with: the next loss ends it.

    INFO, with what goes on then, by the queue as it is now.
    """
    newest, training = derived.last_attempt(snapshot), training_count(snapshot)
    if newest is None or training is None or len(newest.nodes) <= training:
        return
    if spare_nodes(snapshot) != (0, True):
        return
    for job in snapshot.active_jobs:
        if newest.job_id in derived.identifiers(job) and not has_ended(snapshot, job):
            launched = known(snapshot.training.launch_nodes, None) or ()
            meant = excluded_nodes(snapshot).intersection(launched) - lost_nodes(snapshot)
            usable = {*job.nodes} - unusable_nodes(snapshot)
            gone = [name for name in newest.nodes if name not in usable | meant]
            began = f"it began with {counted(len(newest.nodes), 'node')} and trains on {training}"
            for word, names in (("lost", gone), ("excluded while it trains there", sorted(meant))):
                if names:
                    began += f"; {word}: {first_few(names, NODES_NAMED)}"
            yield Finding(
                no_spare.name,
                Severity.INFO,
                f"job {job.job_id} runs on without a spare node: at the next loss it ends",
                subject=job.job_id,
                evidence=(
                    began,
                    _behind(snapshot, "what it has not saved by then is trained again"),
                ),
            )


@detector(
    "exclusion-cap",
    needs=("exclusions", "nodes", "jobs"),
    uses=("readmissions",),
    bound="one left; none left",
    severities="INFO, WARNING; INFO where a person excluded the last of them within the last day",
)
def exclusion_cap(snapshot: Snapshot) -> Iterator[Finding]:
    """As many nodes are excluded as may be, or nearly; and bad nodes that the cap leaves in use.

    INFO when one more exclusion is allowed, WARNING when none is; silent where no node is
    excluded.

    A WARNING for each node that was found bad and could not be excluded any more; INFO while it is
    down.
    """
    yield from _left_in_use(snapshot)
    yield from _near(snapshot)


def _left_in_use(snapshot: Snapshot) -> Iterator[Finding]:
    limit, dead = exclusion_limit(snapshot), lost_nodes(snapshot)
    for node, why in sorted(bad_nodes(snapshot).items()):
        what = f"{node} was found bad and is not excluded"
        found = Finding(
            exclusion_cap.name,
            Severity.INFO,
            f"{what}: the scheduler gives it to no one while it is down",
            subject=node,
            evidence=tuple(filter(None, [why, str(limit)])),
            identity=(node,),
            fault=fault_of_cap(snapshot),
        )
        if node in dead:
            yield found
            continue
        fix, *then = without_bad_nodes(snapshot, [node])
        yield replace(
            found,
            severity=Severity.WARNING,
            title=f"{what}: the next attempt may get it",
            fix=fix,
            then=tuple(then),
        )


def _near(snapshot: Snapshot) -> Iterator[Finding]:
    names, limit = excluded_in_partition(snapshot), exclusion_limit(snapshot)
    if not names or limit is None:
        return
    left = limit.most - len(names)
    usable = usable_nodes(snapshot)
    if left > 1:
        return
    partition_nodes = len(nodes_of_partition(snapshot, partition_of(snapshot)))
    named, there = counted(len(names), "node is", "nodes are"), counted(partition_nodes, "node")
    evidence: tuple[str, ...] = (
        f"excluded: {first_few(names, NODES_NAMED)}",
        f"{there}, {usable} usable, {limit.needed} needed; at most {limit.most} may be excluded",
    )
    if left < 1:
        title = f"{named} excluded, no more may be: {what_may_be_lost(snapshot)}"
        severity = Severity.INFO if is_last_meant(snapshot, names) else Severity.WARNING
    else:
        title, severity = f"{named} excluded, one more may be", Severity.INFO
    fix = take_back(snapshot, names)
    if not fix:
        evidence = (
            *evidence,
            f"none can come back now: {first_few(cannot_return(snapshot, names), NODES_NAMED)}",
        )
        fix = note_for_site(snapshot, names)
    most = max(limit.most, len(names))
    evidence = (*evidence, _how_more_may_be(snapshot, partition_nodes, limit.needed, most))
    since = max(
        (
            entry.since
            for entry in known(snapshot.exclusions, ())
            if entry.node in names and entry.since
        ),
        default=None,
    )
    # since the last of them
    yield Finding(
        exclusion_cap.name,
        severity,
        title,
        evidence=evidence,
        fix=fix,
        since=since,
        fault=fault_of_cap(snapshot),
    )


def _how_more_may_be(snapshot: Snapshot, partition_nodes: int, needed: int, most: int) -> str:
    """What a person may do so that tr11 excludes by itself again, the queued tasks among it; or
    that nothing does.
    """
    percent = percent_for(partition_nodes, needed, most + 1)
    if percent is None:
        return f"a greater {KEY} would not help: an attempt needs all others"
    command = derived.command(snapshot, f"launch --replace --set {KEY}={percent}")
    return (
        f"so that more may be: {KEY} = {percent} in the card; for what is queued now, `{command}`"
    )


DUE_NAMED = 4
GRACE_SECONDS = derived.DAY  # the periodic check comes round several times in it


@detector(
    "exclusion-due",
    needs=("exclusions",),
    bound="a day",
    severities="INFO",
)
def exclusion_due(snapshot: Snapshot) -> Iterator[Finding]:
    """Excluded nodes that should have been checked again by now: each may be fine, and is missing.

    INFO, one for all nodes whose time has been over for more than a day.
    """
    late = due_for_recheck(seen(snapshot.exclusions), snapshot.time - GRACE_SECONDS)
    if not late:
        return
    if len(late) == 1:
        word = "an excluded node waits"
    else:
        word = f"{len(late)} excluded nodes wait"
    evidence = tuple(
        f"{entry.node}: due for {duration(snapshot.time - (entry.until or snapshot.time))}"
        + (f", {kept_off(entry.state)} because {entry.why}" if entry.why else "")
        for entry in late[:DUE_NAMED]
    )
    yield Finding(
        exclusion_due.name,
        Severity.INFO,
        f"{word} for a check: {first_few((entry.node for entry in late), DUE_NAMED)}",
        evidence=evidence,
        fix=derived.command(snapshot, "nodes check --due"),
    )
