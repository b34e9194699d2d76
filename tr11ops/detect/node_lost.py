"""A node of a running job is gone. Without its first node a job has no script left: it stays
RUNNING for ever.

One that only does not answer the scheduler may work on: that is a warning, whatever node it is. A
draining or failing node works on until its job ends: that is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.base.units import timestamp
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.cluster.node_states import is_loss_alone
from tr11ops.detect.down import last_launch
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.unfinished_end import unfinished_attempts
from tr11ops.observe import derived
from tr11ops.observe.lost_host import batch_host, has_lost_its_host
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.observe.training import LaunchEnd

BOUND = "at once"
SEVERITIES = "WARNING, CRITICAL with the batch script's node gone and no next task that runs"
NAME = "node-lost"
NEEDS = ("jobs", "nodes")
HAS_LOST = "has lost"  # in titles: the scheduler, or the run itself, has given the node up


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each node that is lost or silent; CRITICAL when the one that runs the batch
    script is lost.

    Slurm takes a lost node out of the job: then the record of the attempt still tells which one ran
    the script. A WARNING where that one is still gone and the attempt has ended by it, until a
    later one trains.
    """
    nodes = {node.name: node for node in known(snapshot.nodes, ())}
    for job in snapshot.active_jobs:
        # it gives back its nodes: the list holds those that are still to come
        if job.state is JobState.COMPLETING:
            continue
        host = batch_host(snapshot, job) or next(iter(job.nodes), "")
        for name in dict.fromkeys((host, *job.nodes)):
            node = nodes.get(name)
            if node is None:
                continue
            has_left = name == host and has_lost_its_host(snapshot, job)
            if node.is_gone or has_left:
                yield _lost(snapshot, job, node, is_host=name == host)
            elif node.is_silent:
                yield _silent(snapshot, job, node, is_host=name == host)
    for attempt in unfinished_attempts(snapshot):
        node = nodes.get(next(iter(attempt.nodes), ""))
        if attempt.end is None and node is not None and node.is_gone:
            yield _of_ended_attempt(snapshot, attempt, node)


def _lost(snapshot: Snapshot, job: Job, node: Node, is_host: bool) -> Finding:
    title = f"job {job.job_id} {HAS_LOST} {node.name}" + (
        ", which ran its batch script" if is_host else ""
    )
    if not is_host:
        went_on = _went_on_without(snapshot, job, node)
        if went_on is not None:
            title = f"{title}, and went on without it at {timestamp(went_on.time, UTC)}"
        return _finding(
            Severity.WARNING,
            title,
            job,
            node,
            "" if went_on is not None else derived.command(snapshot, "logs"),
        )
    severity, follows = Severity.CRITICAL, ""
    following = [other.job_id for other in snapshot.active_jobs if other.job_id != job.job_id]
    if following:  # it has nodes already, and sees to this one before it trains
        severity, follows = Severity.WARNING, f"job {following[-1]} ends it before it trains"
    found = _finding(
        severity, title, job, node, derived.command(snapshot, "launch --repair"), follows
    )
    is_last = not following and not snapshot.pending_jobs and derived.stop_of(snapshot) is None
    if is_last:
        return replace(found, then=(derived.command(snapshot, last_launch(snapshot)),))
    return found


def _went_on_without(snapshot: Snapshot, job: Job, node: Node) -> LaunchEnd | None:
    """The end of the launch that this node was lost in, where the job has finished iterations
    since; else None.
    """
    ends = [end for end in known(snapshot.training.launch_ends, ()) if end.job_id == job.raw_id]
    last = next((end for end in ends if node.name in end.blamed and is_loss_alone(end.why)), None)
    if last is None:
        return None
    trained = derived.step_times(snapshot, derived.identifiers(job))
    if any(moment > last.time for moment in trained):
        return last
    return None


def _silent(snapshot: Snapshot, job: Job, node: Node, is_host: bool) -> Finding:
    if is_host:
        went_on = None
    else:
        went_on = _went_on_without(snapshot, job, node)
    if went_on is not None:
        when = timestamp(went_on.time, UTC)
        title = f"job {job.job_id} {HAS_LOST} {node.name}, and went on without it at {when}"
        return _finding(Severity.WARNING, title, job, node, "", went_on.why)
    title = (
        f"{node.name} of job {job.job_id} does not answer the scheduler: what runs there may run on"
    )
    follows = ""
    if is_host:
        title = f"{node.name}, which runs the batch script of job {job.job_id}, does not answer the scheduler"
        dies = "a job does not outlive its batch script's node: if it is lost,"
        follows = f"{dies} the next queued task goes on"
        if not snapshot.pending_jobs:
            more = derived.launch_more(snapshot)
            follows = f"{dies} nothing goes on, for nothing is queued; `{more}` queues what does"
    return _finding(Severity.WARNING, title, job, node, derived.command(snapshot, "logs"), follows)


def _finding(
    severity: Severity, title: str, job: Job, node: Node, fix: str, follows: str = ""
) -> Finding:
    evidence = (_state_of(node), follows) if follows else (_state_of(node),)
    return Finding(
        NAME, severity, title, subject=job.job_id, identity=(node.name,), evidence=evidence, fix=fix
    )


def _of_ended_attempt(snapshot: Snapshot, attempt: Attempt, node: Node) -> Finding:
    """The same incident as long as no later attempt trains: the job may have been ended for it
    meanwhile.

    What is queued goes on by itself; where nothing is, the next launch gets other nodes.
    """
    label = attempt.label or attempt.job_id
    title = f"job {label} {HAS_LOST} {node.name}, which ran its batch script, and has ended"
    return Finding(
        NAME,
        Severity.WARNING,
        title,
        subject=label,
        identity=(node.name,),
        evidence=(_state_of(node),),
        fix=derived.command(snapshot, last_launch(snapshot)) if derived.is_idle(snapshot) else "",
        since=attempt.changed,
    )


def _state_of(node: Node) -> str:
    reason = ""
    if node.reason:
        reason = f" ({node.reason})"
    return f"{node.name}: {'+'.join(sorted(node.states))}{reason}"
