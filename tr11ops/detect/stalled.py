"""A job holds its nodes and shows life, or never showed any, but no iteration is finished.

Ranks that wait for data, for a file system, for each other. (Ranks that stand still are `hung`.)
What to do: `tr11 logs`, see what they wait for; stop the run when it does not come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.kept_stacks import culprit, stacks_since
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import TRAINING_PHASES
from trainer.contract.record import Record

BOUND = "k iterations and 2 minutes, from the end of the last save or evaluation; no life: an hour"
SEVERITIES = "CRITICAL"
NAME = "stalled"
NEEDS = ("jobs", "heartbeats", "steps", "training.phases", "attempts", "training.launch_ends")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Counts from the last iteration, or from the end of the save or evaluation after it; never
    during one.
    """
    for job in snapshot.active_jobs:
        if job.state is not JobState.RUNNING:
            continue
        liveness = derived.liveness_of(snapshot, job)
        if liveness is None:
            yield from _without_liveness(snapshot, job)
        else:
            yield from _without_progress(snapshot, job, liveness)


def _without_liveness(snapshot: Snapshot, job: Job) -> Iterator[Finding]:
    if derived.hidden_life(snapshot) or snapshot.read_errors:
        return
    if job.start_time is None:
        silent = None
    else:
        silent = snapshot.time - job.start_time
    over = derived.marker_of(snapshot, derived.identifiers(job)) is not None
    if silent is not None and silent > normal_silence.UNLEARNED_SECONDS and not over:
        title = (
            f"job {job.job_id} has held its nodes for {duration(silent)} without any sign of life"
        )
        yield _finding(snapshot, job, title, (), since=job.start_time)


class Standstill(Record):
    """That no iteration was finished after `iteration`, since a moment, for longer than `patience`
    seconds; `pace` is the usual length of one.
    """

    iteration: int
    since: float
    patience: float
    pace: float


def standstill(snapshot: Snapshot, job: Job, liveness: derived.Liveness) -> Standstill | None:
    """Whether a job whose ranks show life in training finishes no iteration; None where it does, or
    may.
    """
    if not liveness.is_fresh(snapshot.time) or liveness.phase not in TRAINING_PHASES:
        return None
    names = derived.identifiers(job)
    pace, finished = derived.seconds_per_iteration(snapshot), derived.step_times(snapshot, names)
    if isinstance(snapshot.training.phases, Unknown) or pace is None or not finished:
        return None  # a first step that takes too long is silent: it hangs
    last, facts = known(snapshot.steps, ())[-1].record.iteration, snapshot.run
    if liveness.iteration is not None and liveness.iteration > last + facts.log_interval:
        return None  # it trains on, and the log does not tell: log-not-growing
    since = normal_silence.trains_since(snapshot, names)
    patience = normal_silence.training_patience(snapshot, pace, facts.log_interval)
    # an older trainer, which keeps no phases: there may have been a save or an evaluation
    if since is None:
        since, patience = max(finished), max(patience, normal_silence.UNLEARNED_SECONDS)
    since = max(since, *finished)
    if snapshot.time - since > patience:
        return Standstill(last, since, patience, pace)
    return None


def _without_progress(
    snapshot: Snapshot, job: Job, liveness: derived.Liveness
) -> Iterator[Finding]:
    found = standstill(snapshot, job, liveness)
    if found is None:
        return
    title = (
        f"job {job.job_id}: no iteration after {found.iteration} for {duration(snapshot.time - found.since)}, though"
        f" its ranks show life (normal: up to {duration(found.patience)})"
    )
    beats = derived.beats_of(snapshot, job)
    phases = Counter(beat.phase for beat in beats)
    where = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common(3))
    iterations = counted(snapshot.run.watch.stall_iterations, "iteration")
    evidence = [f"normal: up to {iterations} of {found.pace:.3g} s"]
    if where:
        silence = duration(liveness.silent_for(snapshot.time))
        evidence.append(f"{counted(len(beats), 'rank')}: {where}; last sign of life {silence} ago")
    told = _finding(snapshot, job, title, tuple(evidence), since=found.since)
    yield replace(told, patience=found.patience)


def _finding(
    snapshot: Snapshot, job: Job, title: str, evidence: tuple[str, ...], since: float | None
) -> Finding:
    """With who holds the others up, where the stacks have told."""
    kept = stacks_since(snapshot, job, since)
    who = culprit(kept)
    if kept is not None:
        evidence = (f"the workers' stacks: {kept.sentence}", *evidence)
    if who:
        evidence, title = (title, *evidence), f"job {job.job_id} finishes no iteration: {who}"
    fix, then = derived.command(snapshot, "kill --wait"), derived.go_on(snapshot)
    return Finding(
        NAME, Severity.CRITICAL, title, job.job_id, evidence, fix, since=since, then=then
    )
