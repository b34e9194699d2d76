"""A job whose batch host is lost: is it, and have its trainers been silent long enough to be gone?
Pure.
"""

from __future__ import annotations

from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

SILENCE_SECONDS = 120.0  # of trainers whose pace is not known
SHORTEST_SILENCE_SECONDS = 30.0  # files on a shared file system are seen late
# a trainer that lives shows it at each step, whatever has become of its batch script
STEPS_OF_SILENCE = 3


def batch_host(snapshot: Snapshot, job: Job) -> str:
    """The node that runs the job's batch script, the first of the allocation; "" where no attempt
    tells.
    """
    names = derived.identifiers(job)
    for attempt in known(snapshot.attempts, ()):
        if attempt.job_id in names and attempt.nodes:
            return attempt.nodes[0]
    return ""


def has_lost_its_host(snapshot: Snapshot, job: Job) -> bool:
    """RUNNING, with its batch host gone or out of the allocation. Only a job that survives its
    nodes gets there.
    """
    host = batch_host(snapshot, job)
    if job.state is not JobState.RUNNING or not host:
        return False
    return gone_host(snapshot, job) != "" or bool(job.nodes and host not in job.nodes)


def gone_host(snapshot: Snapshot, job: Job) -> str:
    """The job's batch host where the scheduler says at this moment that it is gone; "" where it
    does not.
    """
    host = snapshot.node(batch_host(snapshot, job))
    return host.name if host is not None and host.is_gone else ""


def silent_host(snapshot: Snapshot, job: Job) -> str:
    """The job's batch host where it does not answer the scheduler, so that its script may be gone;
    "" where it does.
    """
    host = snapshot.node(batch_host(snapshot, job))
    return host.name if host is not None and host.is_silent else ""


def seconds_to_wait(snapshot: Snapshot, job: Job) -> float:
    """How much longer the job's trainers must be silent before they count as gone; 0 when they do.

    Trainers that cannot be seen are not gone: their silence begins when they can.
    """
    if derived.hidden_life(snapshot):
        return _patience(snapshot)
    liveness = derived.liveness_of(snapshot, job)
    if liveness is None:
        return 0.0
    return max(0.0, _patience(snapshot) - liveness.silent_for(snapshot.time))


def is_zombie(snapshot: Snapshot, job: Job) -> bool:
    """It has lost its batch host, and no trainer of it shows life: only the host's daemon may have
    died.
    """
    return has_lost_its_host(snapshot, job) and seconds_to_wait(snapshot, job) == 0.0


def _patience(snapshot: Snapshot) -> float:
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        return SILENCE_SECONDS
    return max(SHORTEST_SILENCE_SECONDS, STEPS_OF_SILENCE * pace)
