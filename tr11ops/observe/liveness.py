"""Whether an attempt lives: its last sign of life, how long a silence is normal there, and what
counts of a job whose batch host is lost. Pure.

What is normal is learned from the run's own last attempts, by phase. Before anything was learned, the
bounds are those that suit the largest run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, JobState
from tr11ops.observe import derived
from tr11ops.observe.jobs import CLOCK_SECONDS
from tr11ops.observe.observations import TRAINING_PHASES, LaunchEnd, Phase
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.rundir.attempts import TrainerLife
from trainer.contract.attempt import BAD_REASONS, Heartbeat
from trainer.contract.record import Record

STARTING_PHASE = "starting"
TRAINING_PHASE = "training"
ENDED_PHASE = "ended"
FAILED_REASONS = BAD_REASONS - {"refused"}  # of a trainer that the batch controller may start again

# shorter silences say nothing: files on shared file systems are seen late
UNLEARNED_SECONDS = 3600.0  # start-up, evaluation and saving of the largest run stay well below it
PHASE_FLOOR_SECONDS = 600.0  # a file system that is busy makes a save of seconds one of minutes
LINES_LOOKED_AT = 20  # for how many steps are between two
PHASE_FACTOR = 5.0  # times the longest of the last attempts


def phase_patience(snapshot: Snapshot, phase: str) -> float:
    """Seconds for which a phase that trains nothing may show no sign of life."""
    return _patience(_durations(snapshot, phase))


def longest_phase(snapshot: Snapshot, phase: str) -> float | None:
    """Seconds that the longest seen phase of this name took; None where none was seen to end."""
    return max(_durations(snapshot, phase), default=None)


def first_step_patience(snapshot: Snapshot) -> float:
    """The same for the first step of a launch, which compiles, connects and allocates."""
    return _patience(first_steps(snapshot))


def training_patience(snapshot: Snapshot, pace: float, iterations_a_line: int = 1) -> float:
    """Seconds without a new iteration that are normal at a pace; without a new line where lines are
    rarer.
    """
    iterations = snapshot.run.watch.stall_iterations + iterations_a_line - 1
    return max(60 * snapshot.run.watch.least_silence_minutes, iterations * pace)


def writes_by_line(snapshot: Snapshot) -> bool:
    """Whether heartbeats follow the lines of the trainer's log, as those do that no rank writes."""
    return not all(beat.is_own for beat in known(snapshot.heartbeats, ()))


def lives_of(snapshot: Snapshot, names: frozenset[str]) -> tuple[TrainerLife, ...]:
    """What the keepers of an attempt see of another trainer; none where that is not known."""
    return tuple(one for one in known(snapshot.training.lives, ()) if one.job_id in names)


def learned_patience(lives: Sequence[TrainerLife]) -> float:
    """Twice the longest stage of the kind that another trainer is in, as this run has taught, in
    seconds; 0.0 where none was seen.
    """
    found = [life.learned[life.kind].longest for life in lives if life.kind in life.learned]
    return 2.0 * max(found, default=0.0)


def steps_a_line(snapshot: Snapshot) -> int:
    """Steps from one line of the log to the next, by the card; of a trainer whose card cannot say it,
    the most between the last lines.
    """
    told = snapshot.run.log_interval
    if not writes_by_line(snapshot):
        return told
    last = known(snapshot.steps, ())[-LINES_LOOKED_AT:]
    apart = (after.record.iteration - before.record.iteration for before, after in pairwise(last))
    return max(told, *apart, 1)


def first_steps(snapshot: Snapshot) -> list[float]:
    """How long the first steps of launches took whose first line of the log is still seen."""
    found = []
    steps = known(snapshot.steps, ())
    for launch in _launches(snapshot):
        begun = next((span for span in launch if span.phase in TRAINING_PHASES), None)
        if begun is None:
            continue
        later = (step for step in steps if step.time is not None and step.job_id == begun.job_id)
        first = next(
            (step for step in later if step.time is not None and step.time > begun.began), None
        )
        last_expected = begun.iteration + snapshot.run.log_interval
        if first is not None and first.time is not None and first.record.iteration <= last_expected:
            found.append(first.time - begun.began)
    return found


def launch_began(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """When the newest launch of an attempt began; None where its phases do not tell."""
    spans = [span for span in known(snapshot.training.phases, ()) if span.job_id in names]
    newest = max((span.launch for span in spans), default=None)
    return next((span.began for span in spans if span.launch == newest), None)


def launch_trained_since(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """When the newest launch of an attempt began to train; None where its phases do not tell."""
    began = launch_began(snapshot, names)
    spans = [
        span
        for span in known(snapshot.training.phases, ())
        if span.job_id in names and span.phase in TRAINING_PHASES
    ]
    return next((span.began for span in spans if began is not None and span.began >= began), None)


def trains_since(snapshot: Snapshot, names: frozenset[str]) -> float | None:
    """Since when an attempt has done nothing but train; None where that is not known, or it does
    something else.
    """
    began = None
    for span in known(snapshot.training.phases, ()):
        if span.job_id in names:
            if span.phase not in TRAINING_PHASES:
                began = None
            elif began is None:
                began = span.began
    return began


def _patience(durations: list[float]) -> float:
    if durations:
        return max(PHASE_FLOOR_SECONDS, PHASE_FACTOR * max(durations))
    return UNLEARNED_SECONDS


def _durations(snapshot: Snapshot, phase: str) -> list[float]:
    spans = [span for span in known(snapshot.training.phases, ()) if span.phase == phase]
    return [max(0.0, span.ended - span.began) for span in spans if span.ended is not None]


def _launches(snapshot: Snapshot) -> list[list[Phase]]:
    grouped: dict[tuple[str, int], list[Phase]] = {}
    for span in known(snapshot.training.phases, ()):
        grouped.setdefault((span.job_id, span.launch), []).append(span)
    return list(grouped.values())


# ----------------------------------------------------------------------------- signs of life
class Liveness(Record):
    """The last sign of life of one attempt: when, in which phase, and how long silence is normal
    there.
    """

    time: float
    phase: str
    iteration: int | None
    patience: float
    job_id: str
    ranks: int = 0

    def silent_for(self, now: float) -> float:
        """Seconds since the sign; clocks of two nodes may differ, so never below zero."""
        return max(0.0, now - self.time)

    def is_fresh(self, now: float) -> bool:
        return self.silent_for(now) <= self.patience


def beats_of(snapshot: Snapshot, job: Job | None) -> tuple[Heartbeat, ...]:
    """The heartbeats of one job's attempt; without a job, those of the attempt that beat last."""
    beats = known(snapshot.heartbeats, ())
    if job is not None:
        names = derived.identifiers(job)
        return tuple(beat for beat in beats if beat.job_id in names)
    newest = max(beats, key=lambda beat: beat.time, default=None)
    return tuple(beat for beat in beats if newest is not None and beat.job_id == newest.job_id)


def ranks_of(beats: Iterable[Heartbeat]) -> int:
    """How many ranks these heartbeats tell of."""
    return sum(len(beat.stands_for) for beat in beats)


def liveness_of(snapshot: Snapshot, job: Job | None) -> Liveness | None:
    """The last sign of life of a job's attempt (without a job: of the newest attempt), or None when
    there is none.

    Ranks in different phases get the patience of the most patient phase: the others wait for it.
    """
    beats = beats_of(snapshot, job)
    if job is not None:
        names = derived.identifiers(job)
    else:
        names = frozenset(beat.job_id for beat in beats)
    stepped = step_times(snapshot, names)
    if beats:
        last = max(beats, key=lambda beat: beat.time)
        between = None
        if job is not None and derived.marker_of(snapshot, names) is None:
            between = last_launch_end(snapshot, job)
        if between is not None and not between.is_last:
            done = max(beat.iteration for beat in beats)
            return Liveness(
                between.time,
                STARTING_PHASE,
                iteration=done,
                patience=phase_patience(snapshot, STARTING_PHASE),
                job_id=last.job_id,
            )
        learned = learned_patience(lives_of(snapshot, names))
        patience = {
            phase: max(patience_in(snapshot, phase, bool(stepped)), learned)
            for phase in {beat.phase for beat in beats}
        }
        slowest = max(beats, key=lambda beat: patience[beat.phase])
        return Liveness(
            time=max([last.time, *stepped]),
            phase=slowest.phase,
            iteration=max(beat.iteration for beat in beats),
            patience=patience[slowest.phase],
            job_id=last.job_id,
            ranks=ranks_of(beats),
        )
    if stepped:
        patience_of_steps = patience_in(snapshot, TRAINING_PHASE, stepped=True)
        newest = known(snapshot.steps, ())[-1].job_id
        return Liveness(
            max(stepped),
            TRAINING_PHASE,
            iteration=derived.iteration(snapshot),
            patience=patience_of_steps,
            job_id=newest,
        )
    return None


def has_ended(snapshot: Snapshot, job: Job) -> bool:
    """Whether the last sign of a job is that its workers ended."""
    liveness = liveness_of(snapshot, job)
    return liveness is not None and liveness.phase == ENDED_PHASE


def last_launch_end(snapshot: Snapshot, job: Job) -> LaunchEnd | None:
    """How the last launch of a job ended, if its workers have shown no life since. Ask for jobs that
    hold an allocation alone.
    """
    names = derived.identifiers(job)
    ends = derived.launch_ends(snapshot, names)
    signs = [*(beat.time for beat in beats_of(snapshot, job)), *step_times(snapshot, names)]
    if not ends or ends[-1].time < max(signs, default=0.0):
        return None
    return ends[-1]


def to_be_relaunched(snapshot: Snapshot, job: Job) -> LaunchEnd | None:
    """The end of a running job's last launch, where its batch controller starts another one, or has yet
    to decide (its `decision` is ""); None where the workers live, where it has decided that none
    follows, and where it was told to stop, or is lost.

    An end marker that says the trainer failed is no end of the attempt before the controller,
    which lives as long as its job has its batch host, has looked whether another launch helps.
    """
    names, stop = derived.identifiers(job), derived.stop_of(snapshot)
    is_held_up = stop is not None or snapshot.run.is_watched or has_lost_its_host(snapshot, job)
    if job.state is not JobState.RUNNING or is_held_up:
        return None
    own = (attempt for attempt in known(snapshot.attempts, ()) if attempt.job_id in names)
    if any(attempt.cause or attempt.held_because for attempt in own):
        return None  # its verdict is written: it leaves
    marker, end = derived.marker_of(snapshot, names), last_launch_end(snapshot, job)
    if marker is not None and (marker.reason not in FAILED_REASONS or not marker.launch):
        return None
    if end is not None and not end.is_last:
        return end
    if end is not None or marker is None:
        return None
    if snapshot.time - marker.time > derived.LEAVING_SECONDS:
        return None
    why = f"its workers have ended ({marker.reason}: {marker.message}), and may be started again"
    return LaunchEnd(marker.job_id, marker.launch, marker.time, why)


def is_leaving(snapshot: Snapshot, job: Job) -> bool:
    """Whether a started job trains no more, though the scheduler still has it: it has written its end,
    has decided that no other launch follows, or is being ended.
    """
    if job.state is JobState.COMPLETING:
        return True
    if to_be_relaunched(snapshot, job) is not None:
        return False
    names = derived.identifiers(job)
    marker, last = derived.marker_of(snapshot, names), last_launch_end(snapshot, job)
    if marker is None:
        return last is not None and last.is_last
    liveness = liveness_of(snapshot, job)
    return liveness is None or liveness.time <= marker.time or liveness.phase == ENDED_PHASE


def may_start_again(snapshot: Snapshot, job: Job) -> bool:
    """Whether the workers of a job have ended, and it is not decided yet whether others follow."""
    end = to_be_relaunched(snapshot, job)
    if end is None:
        return has_ended(snapshot, job)
    return not end.decision


def step_times(snapshot: Snapshot, names: frozenset[str]) -> list[float]:
    """When the newest launch of an attempt finished its steps, as far as they are seen."""
    began = launch_began(snapshot, names)
    found = [
        step.time
        for step in known(snapshot.steps, ())
        if step.time is not None and step.job_id in names
    ]
    return [time for time in found if began is None or time >= began]


def patience_in(snapshot: Snapshot, phase: str, stepped: bool) -> float:
    """Silence that is normal in a phase. Before a launch's first finished step even `training`
    takes its time.
    """
    pace = derived.seconds_per_iteration(snapshot)
    if phase not in TRAINING_PHASES:
        return phase_patience(snapshot, phase)
    if not stepped or pace is None:
        return first_step_patience(snapshot)
    if writes_by_line(snapshot):
        return training_patience(snapshot, pace, steps_a_line(snapshot))
    return training_patience(snapshot, pace)


def hidden_life(snapshot: Snapshot) -> str:
    """Why a sign of life may have been missed; "" when none was. The end of a launch is one: the
    next is on its way.
    """
    signs = (snapshot.heartbeats, snapshot.steps, snapshot.training.launch_ends)
    return next((value.why for value in signs if isinstance(value, Unknown)), "")


def may_live_outside(snapshot: Snapshot) -> bool:
    """Whether a training in the foreground may have been missed: heartbeats tell, or steps where
    there are none.
    """
    unseen = isinstance(snapshot.heartbeats, Unknown)
    return unseen or (isinstance(snapshot.steps, Unknown) and not snapshot.heartbeats)


def liveness_outside(snapshot: Snapshot) -> Liveness | None:
    """A fresh sign of life of an attempt that no job of the scheduler stands for (a training in the
    foreground).
    """
    liveness = liveness_of(snapshot, None)
    if liveness is None or liveness.phase == ENDED_PHASE or not liveness.is_fresh(snapshot.time):
        return None
    if any(liveness.job_id in (job.job_id, job.raw_id) for job in known(snapshot.jobs, ())):
        return None
    if derived.marker_of(snapshot, frozenset({liveness.job_id})) is None:
        return liveness
    return None


def iteration_of(snapshot: Snapshot, jobs: Iterable[Job]) -> int | None:
    """The last iteration that the newest launch of these jobs finished, since the last roll-back;
    None without one.

    A log that does not name attempts is taken to be theirs.
    """
    names = frozenset().union(*(derived.identifiers(job) for job in jobs))
    newest = next(iter(known(snapshot.steps, ())[-1:]), None)
    if newest is None or newest.job_id not in {"", *names} or derived.is_rolled_back(snapshot):
        return None
    began = launch_began(snapshot, names)
    if began is not None and newest.time is not None and newest.time < began:
        return None
    return newest.record.iteration


# ----------------------------------------------------------------------------- a lost batch host
SILENCE_SECONDS = 120.0  # of trainers whose pace is not known
SHORTEST_SILENCE_SECONDS = 30.0  # files on a shared file system are seen late
# a trainer that lives shows it at each step, whatever has become of its batch script
STEPS_OF_SILENCE = 3


def batch_host(snapshot: Snapshot, job: Job) -> str:
    """The node that runs the job's batch script, the first of the allocation; "" where no attempt
    tells, or only one of an earlier start of the job: a job that was put back into the queue has
    other nodes at its next start.
    """
    names = derived.identifiers(job)
    for attempt in known(snapshot.attempts, ()):
        if attempt.job_id in names and attempt.nodes and not _is_of_earlier_start(attempt, job):
            return attempt.nodes[0]
    return ""


def _is_of_earlier_start(attempt: Attempt, job: Job) -> bool:
    """Whether the attempt's record was written before the job started as it runs now."""
    if attempt.start is None or job.start_time is None:
        return False
    return attempt.start < job.start_time - CLOCK_SECONDS


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
    if host is not None and host.is_gone:
        return host.name
    return ""


def silent_host(snapshot: Snapshot, job: Job) -> str:
    """The job's batch host where it does not answer the scheduler, so that its script may be gone;
    "" where it does.
    """
    host = snapshot.node(batch_host(snapshot, job))
    if host is not None and host.is_silent:
        return host.name
    return ""


def seconds_to_wait(snapshot: Snapshot, job: Job) -> float:
    """How much longer the job's trainers must be silent before they count as gone; 0 when they do.

    Trainers that cannot be seen are not gone: their silence begins when they can.
    """
    if hidden_life(snapshot):
        return _patience_without_host(snapshot)
    liveness = liveness_of(snapshot, job)
    if liveness is None:
        return 0.0
    return max(0.0, _patience_without_host(snapshot) - liveness.silent_for(snapshot.time))


def is_zombie(snapshot: Snapshot, job: Job) -> bool:
    """It has lost its batch host, and no trainer of it shows life: only the host's daemon may have
    died.
    """
    return has_lost_its_host(snapshot, job) and seconds_to_wait(snapshot, job) == 0.0


def _patience_without_host(snapshot: Snapshot) -> float:
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        return SILENCE_SECONDS
    return max(SHORTEST_SILENCE_SECONDS, STEPS_OF_SILENCE * pace)
