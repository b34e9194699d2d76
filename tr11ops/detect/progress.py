"""Whether the training gets on: ranks that stand still, iterations that do not end, logs that do not
grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration, first_few, size
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.nodes_left import exclude_command
from tr11ops.observe import derived
from tr11ops.observe.liveness import (
    UNLEARNED_SECONDS,
    Liveness,
    beats_of,
    hidden_life,
    learned_patience,
    liveness_of,
    lives_of,
    ranks_of,
    step_times,
    steps_a_line,
    training_patience,
    trains_since,
)
from tr11ops.observe.observations import TRAINING_PHASES
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.attempts import KeptStacks
from trainer.contract.attempt import Heartbeat
from trainer.contract.record import Record


@detector(
    "stalled",
    needs=("jobs", "steps"),
    uses=("heartbeats", "training.phases", "attempts", "training.launch_ends"),
    bound="k iterations and 2 minutes, from the end of the last save or evaluation; no life: an hour",
    severities="CRITICAL",
)
def stalled(snapshot: Snapshot) -> Iterator[Finding]:
    """A job holds its nodes and shows life, or never showed any, but no iteration is finished.

    Ranks that wait for data, for a file system, for each other. (Ranks that stand still are `hung`.)
    What to do: `tr11 logs`, see what they wait for; stop the run when it does not come back.

    Counts from the last iteration, or from the end of the save or evaluation after it; never
    during one.
    """
    for job in snapshot.active_jobs:
        if job.state is not JobState.RUNNING:
            continue
        liveness = liveness_of(snapshot, job)
        if liveness is None:
            yield from _without_liveness(snapshot, job)
        else:
            yield from _without_progress(snapshot, job, liveness)


def _without_liveness(snapshot: Snapshot, job: Job) -> Iterator[Finding]:
    if hidden_life(snapshot) or snapshot.read_errors:
        return
    if job.start_time is None:
        silent = None
    else:
        silent = snapshot.time - job.start_time
    over = derived.marker_of(snapshot, derived.identifiers(job)) is not None
    if silent is not None and silent > UNLEARNED_SECONDS and not over:
        title = (
            f"job {job.job_id} has held its nodes for {duration(silent)} without any sign of life"
        )
        yield _stall(snapshot, job, title, (), since=job.start_time)


class Standstill(Record):
    """That no iteration was finished after `iteration`, since a moment, for longer than `patience`
    seconds; `pace` is the usual length of one.
    """

    iteration: int
    since: float
    patience: float
    pace: float


def standstill(snapshot: Snapshot, job: Job, liveness: Liveness) -> Standstill | None:
    """Whether a job whose ranks show life in training finishes no iteration; None where it does, or
    may.
    """
    if not liveness.is_fresh(snapshot.time) or liveness.phase not in TRAINING_PHASES:
        return None
    names = derived.identifiers(job)
    pace, finished = derived.seconds_per_iteration(snapshot), step_times(snapshot, names)
    if isinstance(snapshot.training.phases, Unknown) or pace is None or not finished:
        return None  # a first step that takes too long is silent: it hangs
    last, facts = known(snapshot.steps, ())[-1].record.iteration, snapshot.run
    if liveness.iteration is not None and liveness.iteration > last + facts.log_interval:
        return None  # it trains on, and the log does not tell: log-not-growing
    since = trains_since(snapshot, names)
    patience = max(
        training_patience(snapshot, pace, steps_a_line(snapshot)),
        learned_patience(lives_of(snapshot, names)),
    )
    # an older trainer, which keeps no phases: there may have been a save or an evaluation
    if since is None:
        since, patience = max(finished), max(patience, UNLEARNED_SECONDS)
    since = max(since, *finished)
    if snapshot.time - since > patience:
        return Standstill(last, since, patience, pace)
    return None


def _without_progress(snapshot: Snapshot, job: Job, liveness: Liveness) -> Iterator[Finding]:
    found = standstill(snapshot, job, liveness)
    if found is None:
        return
    title = (
        f"job {job.job_id}: no iteration after {found.iteration} for {duration(snapshot.time - found.since)}, though"
        f" its ranks show life (normal: up to {duration(found.patience)})"
    )
    beats = beats_of(snapshot, job)
    phases = Counter(beat.phase for beat in beats for _ in beat.stands_for)
    where = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common(3))
    iterations = counted(snapshot.run.watch.stall_iterations, "iteration")
    evidence = [f"normal: up to {iterations} of {found.pace:.3g} s"]
    if where:
        silence = duration(liveness.silent_for(snapshot.time))
        evidence.append(
            f"{counted(ranks_of(beats), 'rank')}: {where}; last sign of life {silence} ago"
        )
    told = _stall(snapshot, job, title, tuple(evidence), since=found.since)
    yield replace(told, patience=found.patience)


def _stall(
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
        stalled.name,
        Severity.CRITICAL,
        title=title,
        subject=job.job_id,
        evidence=evidence,
        fix=fix,
        since=since,
        then=then,
    )


@detector(
    "hung",
    needs=("jobs", "heartbeats", "steps", "training.launch_ends"),
    uses=("training.phases", "attempts"),
    bound="k iterations and 2 minutes; other phases as learned",
    severities="CRITICAL",
)
def hung(snapshot: Snapshot) -> Iterator[Finding]:
    """A training that hangs: ranks that showed life stand still for longer than their phase
    explains.

    It is stronger than a stall, where ranks show life and finish nothing. The evidence names the ranks,
    and their nodes, that do not stand where the others wait, and who holds them up by the stacks that
    the watchdog has taken. What to do: end the job, without the node that causes it; where no stacks
    were taken yet, `tr11 stacks` first.

    Phase-aware: saving, evaluating and start-up are silent for as long as the last attempts'
    were, and more.
    """
    for job in snapshot.active_jobs:
        if job.state is JobState.RUNNING:
            yield from _hangs_of(snapshot, job)


def _hangs_of(snapshot: Snapshot, job: Job) -> Iterator[Finding]:
    liveness = liveness_of(snapshot, job)
    marker = derived.marker_of(snapshot, derived.identifiers(job))
    if liveness is None or (marker is not None and marker.time >= liveness.time):
        return
    beats = beats_of(snapshot, job)
    if not liveness.is_fresh(snapshot.time):
        how = (
            f"no sign of life for {duration(liveness.silent_for(snapshot.time))} while {liveness.phase}"
            f" (normal: up to {duration(liveness.patience)})"
        )
        found = progress_of_ranks(beats, derived.seconds_per_iteration(snapshot))
        yield _hang(
            snapshot,
            job,
            how=how,
            evidence=odd_ranks(found, snapshot.time),
            since=liveness.time,
        )
        return
    still = left_behind(snapshot, beats, liveness.patience)
    if still:
        since = max(beat.time for beat in still)
        how = (
            f"{len(still)} of {counted(len(beats), 'rank')}, on {nodes_of(still)}, stand still for"
            f" {duration(snapshot.time - since)} (normal: up to {duration(liveness.patience)})"
        )
        found = RankProgress(beats, still)
        yield _hang(snapshot, job, how=how, evidence=odd_ranks(found, snapshot.time), since=since)
        return
    yield from _by_stacks(snapshot, job, liveness)


def _by_stacks(snapshot: Snapshot, job: Job, liveness: Liveness) -> Iterator[Finding]:
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
    standing = progress_of_ranks(beats_of(snapshot, job), found.pace)
    yield _hang(
        snapshot, job, how=how, evidence=odd_ranks(standing, snapshot.time), since=found.since
    )


def left_behind(
    snapshot: Snapshot, beats: tuple[Heartbeat, ...], patience: float
) -> tuple[Heartbeat, ...]:
    """Ranks that stopped in training at an iteration that others have passed, for longer than the
    patience; by their own word alone.
    """
    if any(beat.phase not in TRAINING_PHASES for beat in beats):
        return ()
    top = max((beat.iteration for beat in beats), default=0)
    return tuple(
        beat
        for beat in beats
        if beat.is_own and beat.iteration < top and snapshot.time - beat.time > patience
    )


def _hang(
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
        hung.name,
        Severity.CRITICAL,
        title=title,
        subject=job.job_id,
        evidence=evidence,
        fix=fix,
        then=tuple(then),
        since=since,
    )


@detector(
    "log-not-growing",
    needs=("jobs", "heartbeats", "steps"),
    uses=("training.logs",),
    bound="k iterations and 2 minutes",
    severities="WARNING",
)
def log_not_growing(snapshot: Snapshot) -> Iterator[Finding]:
    """The training shows life, but its logs do not tell of it; or the logs tell, and the heartbeats do
    not.

    Half of what watches this run is then blind. What to do: see whether the disk or the quota is full,
    and whether the folder may be written to.

    Compares iterations before times: a clock that is wrong must not look like a log that stands
    still.
    """
    pace = derived.seconds_per_iteration(snapshot)
    for job in snapshot.active_jobs:
        if job.state is JobState.RUNNING and pace is not None:
            patience = training_patience(snapshot, pace, steps_a_line(snapshot))
            yield from _logs_of(snapshot, job, patience)


def _logs_of(snapshot: Snapshot, job: Job, patience: float) -> Iterator[Finding]:
    names = derived.identifiers(job)
    beats = [beat for beat in beats_of(snapshot, job) if beat.phase in TRAINING_PHASES]
    stepped, now = step_times(snapshot, names), snapshot.time
    interval = snapshot.run.log_interval
    if not beats or not stepped:
        return
    done, last = (
        max(beat.iteration for beat in beats),
        known(snapshot.steps, ())[-1].record.iteration,
    )
    beat, line = max(beat.time for beat in beats), max(stepped)
    if done > last + interval and now - line > patience and now - beat <= patience:
        title = f"job {job.job_id} trains iteration {done}, but its log stands at {last}"
        yield _of_logs(snapshot, job, title, f"the last line is {duration(now - line)} old")
    elif now - line <= patience < now - beat and last > done + interval:
        title = f"job {job.job_id} logs iteration {last}, but its heartbeats stand at {done}"
        yield _of_logs(snapshot, job, title, f"the last heartbeat is {duration(now - beat)} old")
    else:
        yield from _of_main_log(snapshot, job, line, patience)


def _of_main_log(snapshot: Snapshot, job: Job, line: float, patience: float) -> Iterator[Finding]:
    """The people's log against the programs' one: both are told of each step."""
    logs = {log.name: log for log in known(snapshot.training.logs, ())}
    main, metrics = logs.get("main_log.txt"), logs.get("metrics.jsonl")
    if main is None or metrics is None or snapshot.time - line > patience:
        return
    behind = metrics.changed - main.changed
    if behind > patience:
        title = f"main_log.txt has not grown for {duration(behind)}, though job {job.job_id} trains"
        yield _of_logs(snapshot, job, title, "metrics.jsonl grows")


def _of_logs(snapshot: Snapshot, job: Job, title: str, reason: str) -> Finding:
    sizes = ", ".join(
        f"{log.name}: {size(log.bytes)}, changed {duration(snapshot.time - log.changed)} ago"
        for log in known(snapshot.training.logs, ())
    )
    evidence = (reason, sizes) if sizes else (reason,)
    return Finding(
        log_not_growing.name,
        Severity.WARNING,
        title,
        subject=job.job_id,
        evidence=evidence,
        fix=derived.command(snapshot, "checkpoint-now --wait"),
        then=(derived.command(snapshot, "kill --wait"), *derived.go_on(snapshot)),
    )


# What the stacks that were kept of a hang say of it.

HANGING = frozenset({"hung", "stalled"})  # detectors of jobs whose workers' stacks say why


def stacks_since(snapshot: Snapshot, job: Job, moment: float | None) -> KeptStacks | None:
    """The stacks of this job that were taken after a moment; None where there are none: older ones
    are of another hang.
    """
    names = derived.identifiers(job)
    found = [one for one in known(snapshot.training.stacks, ()) if one.job_id in names]
    return next((one for one in found if moment is not None and one.time >= moment), None)


def holds_up(kept: KeptStacks | None, since: float | None) -> str:
    """The one node that holds a job up which hangs since then, by its stacks; "" where none or several
    are named, or one only in a single look that may have met a rank on its way.
    """
    if kept is None or since is None or len(kept.nodes) != 1 or not kept.is_confirmed(since):
        return ""
    return kept.nodes[0]


def culprit(kept: KeptStacks | None) -> str:
    """Who holds the others up, in a few words: `rank 5 on node tw07 is stopped (SIGSTOP)`; "" where
    no rank does.
    """
    if kept is None or not kept.ranks:
        return ""
    return kept.sentence.partition(";")[0]


def names_culprit(kept: KeptStacks | None) -> bool:
    """Whether one look at the stacks is enough to say that the ranks of one node hold all others
    up.
    """
    return kept is not None and kept.is_certain and bool(kept.ranks) and len(kept.nodes) == 1


def way_out(snapshot: Snapshot, job: Job, kept: KeptStacks | None) -> tuple[str, ...]:
    """What to type, one command after another: a look while nothing was kept of the hang; to leave
    out the node that surely causes it; to end the job, which cannot save; to go on.
    """
    end = derived.command(snapshot, "kill --now --wait"), *derived.go_on(snapshot)
    if kept is None:
        return derived.command(snapshot, f"stacks --job {job.job_id}"), *end
    if not names_culprit(kept):
        return end
    return exclude_command(snapshot, kept.nodes[0], culprit(kept)), *end


# Which ranks do not stand where the others stand: the first thing to know of a training that hangs.

# per iteration; heartbeats are a second apart at least, so ranks may then show different ones
QUICK_SECONDS = 2.0
# ranks that began the same last step have heartbeats no further apart than that
APART_SECONDS = 1.0


class RankProgress(Record):
    """All ranks' last heartbeats, and those of the odd ones out: fewer than half, behind or in
    another phase.
    """

    beats: tuple[Heartbeat, ...]
    odd: tuple[Heartbeat, ...]

    @property
    def rest(self) -> tuple[Heartbeat, ...]:
        odd = frozenset(self.odd)
        return tuple(beat for beat in self.beats if beat not in odd)


def progress_of_ranks(beats: tuple[Heartbeat, ...], pace: float | None) -> RankProgress:
    """Who is odd among ranks that should be together. `pace`: seconds per iteration, None where it
    is not known.
    """
    if not all(beat.is_own for beat in beats):
        return RankProgress(beats, ())  # what others wrote for them tells none apart
    if not beats:
        return RankProgress((), ())
    top, newest = max(beat.iteration for beat in beats), max(beat.time for beat in beats)
    quick = pace is not None and pace < QUICK_SECONDS
    behind = tuple(
        beat
        for beat in beats
        if beat.iteration < top and (not quick or newest - beat.time > APART_SECONDS)
    )
    if not behind:
        usual = Counter(beat.phase for beat in beats).most_common(1)[0][0]
        behind = tuple(beat for beat in beats if beat.phase != usual)
    elif 2 * len(behind) >= len(beats):  # then a few are ahead
        behind = tuple(beat for beat in beats if beat not in behind)
    return RankProgress(beats, behind if 2 * len(behind) < len(beats) else ())


def nodes_of(beats: tuple[Heartbeat, ...]) -> str:
    """The nodes of these ranks, by name, shortened: `n07, n11`."""
    return first_few(sorted({beat.host for beat in beats}))


def odd_ranks(found: RankProgress, now: float, most: int = 3) -> tuple[str, ...]:
    """Evidence lines: first who is odd, or that no one is; then the ranks that stood still first."""
    shown = found.odd or found.beats
    if found.odd:
        count, rest = len(found.odd), found.rest
        if count == 1:
            who = f"rank {found.odd[0].rank} is"
        else:
            who = f"{count} of {counted(len(found.beats), 'rank')} are"
        first = f"{who} the odd one{'s' * (count > 1)} out, on {nodes_of(found.odd)}; the other {len(rest)}: "
        lines = [first + _place(rest)]
    elif not all(beat.is_own for beat in found.beats):
        every = counted(ranks_of(found.beats), "rank")
        lines = [f"{every}, and no word of their own: their heartbeats name no node"]
    elif len(found.beats) > 1:
        every = f"all {counted(len(found.beats), 'rank')}"
        lines = [f"{every} stand together ({_place(found.beats)}): their heartbeats name no node"]
    else:
        lines = []
    oldest = sorted(shown, key=lambda beat: (beat.iteration, beat.time))[:most]
    return (*lines, *(_line(beat, now) for beat in oldest))


def _place(beats: tuple[Heartbeat, ...]) -> str:
    phases = " or ".join(phase for phase, _ in Counter(beat.phase for beat in beats).most_common(2))
    low, high = min(beat.iteration for beat in beats), max(beat.iteration for beat in beats)
    return f"{phases}, iteration {low}" + (f" to {high}" if high > low else "")


def _line(beat: Heartbeat, now: float) -> str:
    age = duration(now - beat.time)
    if len(beat.stands_for) > 1:
        who = f"ranks {beat.rank} to {beat.stands_for[-1]}"
    else:
        who = f"rank {beat.rank}"
    return f"{who} on {beat.host}: {beat.phase}, iteration {beat.iteration}, {age} ago"
