"""A training that hangs: ranks that showed life stand still for longer than their phase explains.

It is stronger than a stall, where ranks show life and finish nothing. The evidence names the ranks,
and their nodes, that do not stand where the others wait, and who holds them up by the stacks that
the watchdog has taken. What to do: end the job, without the node that causes it; where no stacks
were taken yet, `tr11 stacks` first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect import ranks
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.kept_stacks import culprit, names_culprit, stacks_since, way_out
from tr11ops.detect.stalled import standstill
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import TRAINING_PHASES
from trainer.contract.phases import Heartbeat

BOUND = "k iterations and 2 minutes; other phases as learned"
SEVERITIES = "CRITICAL"
NAME = "hung"
NEEDS = ("jobs", "heartbeats", "steps", "training.phases", "attempts", "training.launch_ends")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Phase-aware: saving, evaluating and start-up are silent for as long as the last attempts'
    were, and more.
    """
    for job in snapshot.active_jobs:
        if job.state is JobState.RUNNING:
            yield from _of_job(snapshot, job)


def _of_job(snapshot: Snapshot, job: Job) -> Iterator[Finding]:
    if derived.hidden_life(snapshot):
        return  # either shows life
    liveness = derived.liveness_of(snapshot, job)
    marker = derived.marker_of(snapshot, derived.identifiers(job))
    if liveness is None or (marker is not None and marker.time >= liveness.time):
        return
    beats = derived.beats_of(snapshot, job)
    if not liveness.is_fresh(snapshot.time):
        how = (
            f"no sign of life for {duration(liveness.silent_for(snapshot.time))} while {liveness.phase}"
            f" (normal: up to {duration(liveness.patience)})"
        )
        found = ranks.standing(beats, derived.seconds_per_iteration(snapshot))
        yield _finding(snapshot, job, how, ranks.describe(found, snapshot.time), liveness.time)
        return
    still = left_behind(snapshot, beats, liveness.patience)
    if still:
        since = max(beat.time for beat in still)
        how = (
            f"{len(still)} of {counted(len(beats), 'rank')}, on {ranks.nodes_of(still)}, stand still for"
            f" {duration(snapshot.time - since)} (normal: up to {duration(liveness.patience)})"
        )
        found = ranks.RankProgress(beats, still)
        yield _finding(snapshot, job, how, ranks.describe(found, snapshot.time), since)
        return
    yield from _by_stacks(snapshot, job, liveness)


def _by_stacks(snapshot: Snapshot, job: Job, liveness: derived.Liveness) -> Iterator[Finding]:
    """A job that finishes no iteration, and whose stacks surely name who holds all up: its other
    ranks show life only because they have waited for a shorter time than they may.
    """
    found = standstill(snapshot, job, liveness)
    if found is None or not names_culprit(stacks_since(snapshot, job, found.since)):
        return
    how = (
        f"no iteration after {found.iteration} for {duration(snapshot.time - found.since)}"
        f" (normal: up to {duration(found.patience)})"
    )
    standing = ranks.standing(derived.beats_of(snapshot, job), found.pace)
    yield _finding(snapshot, job, how, ranks.describe(standing, snapshot.time), found.since)


def left_behind(
    snapshot: Snapshot, beats: tuple[Heartbeat, ...], patience: float
) -> tuple[Heartbeat, ...]:
    """Ranks that stopped in training at an iteration that others have passed, for longer than the
    patience.
    """
    if any(beat.phase not in TRAINING_PHASES for beat in beats):
        return ()
    top = max((beat.iteration for beat in beats), default=0)
    return tuple(
        beat for beat in beats if beat.iteration < top and snapshot.time - beat.time > patience
    )


def _finding(
    snapshot: Snapshot, job: Job, how: str, evidence: tuple[str, ...], since: float
) -> Finding:
    """Who holds the others up leads, where the stacks have told; `how` the hang shows is then
    evidence.
    """
    kept = stacks_since(snapshot, job, since)
    who = culprit(kept)
    if kept is not None:
        evidence = (f"the workers' stacks: {kept.sentence}", *evidence)
    if who:
        evidence = (how, *evidence)
    title = f"job {job.job_id} hangs: {who or how}"
    fix, *then = way_out(snapshot, job, kept)
    return Finding(
        NAME, Severity.CRITICAL, title, job.job_id, evidence, fix, then=tuple(then), since=since
    )
