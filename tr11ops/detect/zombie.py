"""An allocation without its batch script: the batch host is lost, the job lives on for ever on its
other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import counted, duration
from tr11ops.detect.down import last_launch
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.lost_host import batch_host, is_zombie
from tr11ops.observe.snapshot import Snapshot

BOUND = "3 iterations and 30 s; 2 minutes"
SEVERITIES = "CRITICAL"
NAME = "zombie"
NEEDS = ("jobs", "nodes", "attempts", "heartbeats", "steps")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Nothing will end such a job but its time limit, and the next task waits for it."""
    for job in snapshot.active_jobs:
        if is_zombie(snapshot, job):
            liveness = derived.liveness_of(snapshot, job)
            if liveness is None:
                silence = ""
            else:
                silence = (
                    f"; the last sign of life is {duration(liveness.silent_for(snapshot.time))} old"
                )
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} runs on without its batch script: its host {batch_host(snapshot, job)} is lost",
                subject=job.job_id,
                identity=(batch_host(snapshot, job),),
                evidence=(
                    f"{counted(job.node_count or len(job.nodes), 'node is', 'nodes are')} held{silence}",
                ),
                fix=derived.command(snapshot, "launch --repair"),
                then=(derived.command(snapshot, last_launch(snapshot)),)
                if _is_last(snapshot)
                else (),
                since=None if liveness is None else liveness.time,
            )


def _is_last(snapshot: Snapshot) -> bool:
    """Whether nothing goes on by itself when the job is ended, though the run is to go on."""
    return (
        not snapshot.pending_jobs
        and len(snapshot.active_jobs) == 1
        and derived.stop_of(snapshot) is None
    )
