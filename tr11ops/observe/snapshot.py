"""What tr11 saw of one run at one moment: frozen, typed, and with *unknown* as a value.

A `Snapshot` holds observations only. Nothing here reads a file, calls the scheduler or looks at a
clock: the moment is in `Snapshot.time`. Times are seconds since the epoch, durations seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import field

from tr11ops.base.observed import (
    Observed,
    Unknown,
    known,
    observed,
    observed_fields,
    unknown_fields,
)
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.observe.observations import (
    OperationObservations,
    Readmission,
    TrainingObservations,
)
from tr11ops.runcard.card import ForeignCard, OwnCard, RunCard
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.runcard.watching import (
    AlertsSection,
    BackupSection,
    FilesystemSection,
    HubSection,
    WatchSection,
)
from tr11ops.rundir.attempts import AttemptEnd, CodeIdentity, why_held
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import RunDirectory, Submission
from tr11ops.rundir.state_files import Damage
from trainer.config.card import CardError, RecoverySection
from trainer.contract.attempt import BAD_REASONS, EndMarker, Heartbeat
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.origin import BranchOrigin
from trainer.contract.record import IterationRange, Record
from trainer.contract.resumable import ResumeNeed
from trainer.schedule.path import parse_ranges, path_of

if TYPE_CHECKING:
    from tr11ops.runcard.exit_duration import ExitPlan
    from tr11ops.trainers.levels import TrainerStanding


# What each step of a training costs against the others: all forecasts of what is left count in it.
# Pure.


class EqualSteps(Record):
    """Consecutive steps that cost the same: `weight` is one step's time against one of the full
    batch and length.
    """

    iterations: int
    weight: float
    batch_size: int = 0


def course_of(card: RunCard) -> tuple[EqualSteps, ...]:
    """What each step of the card's training costs against the others, by its batch and its sequence
    length; empty where it does not say: all alike.
    """
    if not isinstance(card, OwnCard):
        return ()
    from tr11ops.runcard.speed import step_weights

    segments = path_of(card).segments
    weights = step_weights(card, segments)
    return tuple(
        EqualSteps(part.iterations, weight, part.batch_size)
        for part, weight in zip(segments, weights, strict=True)
    )


def work(course: Iterable[EqualSteps], first: int, last: int) -> float:
    """The steps from `first` (not counted) to `last`, in steps of the full batch. Beyond the course
    its last weight.
    """
    done, total, weight = 0, 0.0, 1.0
    for stretch in course:
        weight = stretch.weight
        total += weight * max(0, min(last, done + stretch.iterations) - max(first, done))
        done += stretch.iterations
    return total + weight * max(0, last - max(first, done))


def fits(course: Iterable[EqualSteps], iteration: int, batch_size: int) -> bool:
    """Whether the course tells of the training that was seen: step `iteration` has this batch in
    it.
    """
    done = 0
    for stretch in course:
        done += stretch.iterations
        if iteration <= done:
            return stretch.batch_size == batch_size
    return False


def weight_at(course: Iterable[EqualSteps], iteration: int) -> float:
    """The weight of step `iteration` (from 1)."""
    return work(course, max(0, iteration - 1), max(1, iteration))


def steps_left(course: Iterable[EqualSteps], done: int, total: int) -> float:
    """What is left after step `done` of `total`, in steps as long as that one: times its seconds,
    it is the time.
    """
    course = tuple(course)
    return work(course, done, total) / weight_at(course, done)


class RunFacts(Record, dict=True):
    """What the run card says, as far as watching needs it; what costs is worked out when it is
    asked for.

    `card` is the card as it was typed, `source` what stands in it. `allocated_nodes` are those that
    one attempt asks for, spares included; `least_nodes` those without which it does not start.
    `total_iterations` counts from the card's samples and batch ramp. `need`: what the run
    needs of a checkpoint that it resumes from. `standing`: of a foreign trainer.
    `log_interval`: iterations for each line of the log;
    `checkpoint_minutes`: between two saves, None where iterations alone count. Of a running attempt
    `trains_on` is the number of nodes, None where that is not known; that and how often it saves and
    logs are as the card was when it was launched, which it goes by. `launched`: when jobs
    leave by the cards that they were launched with, under the number of a job that runs, and under
    the tag of its submission.
    """

    name: str
    variant: str
    directory: Path
    kill_switch: Path
    card: str = ""
    nodes: int | None = None
    trains_on: int | None = None
    total_iterations: int | None = None
    checkpoint_interval: int | None = None
    checkpoint_minutes: float | None = None
    log_interval: int = 1
    launched: Mapping[str, ExitPlan] = {}
    watch: WatchSection = field(default_factory=WatchSection)
    resilience: ResilienceSection = field(default_factory=ResilienceSection)
    recovery: RecoverySection = field(default_factory=RecoverySection)
    partition: str = ""
    allocated_nodes: int | None = None
    least_nodes: int | None = None
    backup: BackupSection = field(default_factory=BackupSection)
    hub: HubSection = field(default_factory=HubSection)
    alerts: AlertsSection = field(default_factory=AlertsSection)
    filesystems: tuple[FilesystemSection, ...] = ()
    need: ResumeNeed = ResumeNeed()
    standing: TrainerStanding | None = None
    source: RunCard | None = None

    @property
    def excluded_nodes(self) -> frozenset[str]:
        """The nodes that the card never uses."""
        if self.source is None:
            return frozenset()
        return frozenset(self.source.slurm.excluded_nodes)

    @property
    def is_watched(self) -> bool:
        """Whether someone else has submitted it, and tr11 only looks."""
        return self.standing is not None and self.standing.is_watched

    @property
    def evaluates(self) -> bool:
        """Whether the training is evaluated on other texts; also where no card says."""
        return not isinstance(self.source, OwnCard) or self.source.evaluation.iterations > 0

    @property
    def copies(self) -> BackupSection | None:
        """Which checkpoints are copied away; None where there is no archive."""
        if self.backup.store or self.backup.url:
            return self.backup
        return None

    @property
    def sync_seconds(self) -> float | None:
        """Between two copies of the logs; None where they have no repository."""
        if self.hub.repository:
            return 60.0 * self.hub.interval_minutes
        return None

    @cached_property
    def start_of_watchdog(self) -> str:
        """The words of tr11 that start a watchdog on this machine."""
        from tr11ops.cluster.select import start_of_watchdog

        return start_of_watchdog()

    @cached_property
    def used_files(self) -> tuple[Path, ...]:
        """Datasets and tokenizer, which a purge would take as well. Reads files; empty where
        nothing is purged.
        """
        if self.source is None or self.source.watch.scratch_purge_days is None:
            return ()
        if isinstance(self.source, ForeignCard):
            return tuple(map(Path, self.source.trainer.needs))
        if isinstance(self.source, OwnCard):
            return tuple(_used_files(self.source))
        return ()

    @cached_property
    def periodic_jobs(self) -> tuple[str, ...] | None:
        """The periodic jobs that the card wants; None: any. Reads the heads of the drop-in scripts."""
        from tr11ops.cron.jobs import every_job

        card = self.source
        if card is None:
            return None
        try:
            jobs = every_job(
                card, RunDirectory(card.paths, card.kill_switch), Path(self.card).parent
            )
        except CardError:
            # `tr11 cron` says what is wrong with it; what ran once is watched all the same
            return None
        return tuple(job.name for job in jobs if not job.unwanted)

    @cached_property
    def exit_plan(self) -> ExitPlan | None:
        """When an attempt leaves by the card as it is now; None without one."""
        from tr11ops.runcard.exit_duration import exit_plan

        if self.source is None:
            return None
        return exit_plan(self.source)

    @cached_property
    def skip_ranges(self) -> tuple[IterationRange, ...]:
        """The iterations whose data the card passes over."""
        if not isinstance(self.source, OwnCard):
            return ()
        return parse_ranges(self.source.data.skip_ranges)

    @cached_property
    def course(self) -> tuple[EqualSteps, ...]:
        """What the steps cost against each other; empty: all alike."""
        if self.source is None:
            return ()
        return course_of(self.source)


def _used_files(card: OwnCard) -> Iterator[Path]:
    from tr11ops.rundir.datasets import prefixes_of, tokenizer_place, workers_environment

    prefixes = observed(prefixes_of, card.data)
    for prefix in known(prefixes, card.data.prefixes):
        yield Path(f"{prefix}.bin")
        yield Path(f"{prefix}.idx")
    tokenizer = observed(lambda: tokenizer_place(card, workers_environment(card, os.environ)))
    if isinstance(tokenizer, Path):
        yield tokenizer
    for text in (card.tokenizer.vocabulary_file, card.tokenizer.merges_file):
        if text is not None:
            yield Path(text)


SOUND_LOSSES = 10  # losses in a row that are numbers: so many, and the training is sound


class Step(Record):
    """One logged step. `time` and `job_id` are None and empty where only `main_log.txt` could be
    read.
    """

    record: MeasuredStep
    time: float | None = None
    job_id: str = ""


class Attempt(Record):
    """One allocation's folder in the run directory.

    `end` is None when the trainer left no end marker; `failure` is then what the batch script found
    instead ("" if it found nothing either). `changed`: when it ended, by the end marker or as
    `rundir.attempt_end` dates it; of one that lives, its last sign of life. `is_told`: someone has
    said so; else it is its last word. `changes`: what it has otherwise than the attempt before it.
    Of one that ended badly, `cause` is the class of its fault ("storage", "node", ...), `fault` its
    name, that of its last launch, and `blamed` the nodes found bad, as in `AttemptVerdict`, and
    `held_because` why it let nothing follow; "" where the batch script wrote none. `gave_way`: it
    found another attempt of the run training, and launched nothing. `evidence`: what it printed
    last, where it could not start.
    """

    job_id: str
    changed: float
    end: Observed[EndMarker | None]
    label: str = ""  # the id as people type it, e.g. "1234_7"
    start: float | None = None
    nodes: tuple[str, ...] = ()
    failure: str = ""
    changes: tuple[str, ...] = ()
    code: CodeIdentity | None = None  # None: not recorded
    versions: Mapping[str, str] = {}
    cause: str = ""
    fault: str = ""
    blamed: tuple[str, ...] = ()
    held_because: str = ""
    gave_way: bool = False
    is_told: bool = True
    evidence: tuple[str, ...] = ()

    @property
    def ended(self) -> AttemptEnd:
        """When it ended, of one that is over."""
        return AttemptEnd(self.changed, self.is_told)

    @property
    def why(self) -> str:
        """Why it ended badly, as far as that is known; "" where it did not, or where nothing says."""
        if isinstance(self.end, Unknown) or self.gave_way:
            return ""
        if self.end is None:
            return why_held(self.held_because, self.failure)
        if self.end.reason in BAD_REASONS:
            return why_held(self.held_because, self.end.message)
        return ""


def newest_attempt(attempts: Iterable[Attempt]) -> Attempt | None:
    """The one that began last, of those that launched something: one that gave way says nothing of
    the run.
    """
    return max((one for one in attempts if not one.gave_way), key=began, default=None)


def began(attempt: Attempt) -> float:
    """When an attempt began, else its last sign of life."""
    if attempt.start is None:
        return attempt.changed
    return attempt.start


class Checkpoint(Record):
    """One checkpoint folder. It is complete when it has a manifest; `faults`: why no training
    resumes from it.

    `verified` says what was compared with the manifest: "sizes", "digests", or "" when nothing was.
    """

    step: int
    complete: bool
    created: float | None = None
    bytes: int | None = None
    verified: str = ""
    faults: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return self.complete and not self.faults


class Checkpoints(Record):
    """All steps that have a folder (ascending), the step that `latest` names, and the newest
    folders, looked into.

    `examined` is newest first; it ends at the first sound checkpoint.
    """

    steps: tuple[int, ...]
    latest: Observed[int | None]
    examined: tuple[Checkpoint, ...]

    @property
    def newest_sound(self) -> Checkpoint | None:
        return next((checkpoint for checkpoint in self.examined if checkpoint.is_sound), None)


class KillSwitch(Record):
    """The stop file that was found. Who and why are empty where the file does not say."""

    path: Path
    who: str = ""
    time: float | None = None
    why: str = ""


class Snapshot(Record, kw_only=True, dict=True):
    """One run at one moment.

    `time`, and every moment in it, is by the run's clock (see clock.py).

    `jobs` are this run's alone; `namesakes` carry its name without belonging to it. `read_errors`
    are the read failures that left a part of an otherwise known observation out.
    """

    time: float
    run: RunFacts
    scheduler: str
    jobs: Observed[tuple[Job, ...]]
    nodes: Observed[tuple[Node, ...]]
    steps: Observed[tuple[Step, ...]]
    heartbeats: Observed[tuple[Heartbeat, ...]]
    attempts: Observed[tuple[Attempt, ...]]
    checkpoints: Observed[Checkpoints]
    kill_switch: Observed[KillSwitch | None]
    exclusions: Observed[tuple[Exclusion, ...]]
    submissions: Observed[tuple[Submission, ...]]
    training: TrainingObservations = TrainingObservations()
    operation: OperationObservations = OperationObservations()
    namesakes: tuple[Job, ...] = ()
    read_errors: tuple[str, ...] = ()
    # this machine's clock, of the one that `time` is by (below zero: behind)
    clock_ahead: Observed[float] = 0.0
    # a file like the kill switch: the present attempt is the last one
    pause: Observed[KillSwitch | None] = None
    damaged_files: Observed[tuple[Damage, ...]] = ()  # of those in which the run keeps its state
    switch_fault: Observed[str] = ""  # why the kill switch seen here is not known to be the run's
    origin: Observed[BranchOrigin | None] = (
        None  # the checkpoint of another run that this one began with
    )
    # since the oldest blame of a node that may still count
    readmissions: Observed[tuple[Readmission, ...]] = ()
    # why the run directory seen here is not the one that the jobs were queued from, or does not
    # answer; all is unknown
    unmounted: str = ""
    is_silent: bool = False  # it is `unmounted` as it does not answer
    # how often the watchdog did so in 24 hours; counted where the card lets it
    resubmitted: Observed[int] = 0

    @cached_property
    def active_jobs(self) -> tuple[Job, ...]:
        """Jobs of this run that hold an allocation; empty also where jobs are unknown."""
        return tuple(job for job in known(self.jobs, ()) if job.state.is_active)

    @cached_property
    def pending_jobs(self) -> tuple[Job, ...]:
        """Jobs of this run in the queue; the waiting tasks of an array are one job."""
        return tuple(job for job in known(self.jobs, ()) if job.state is JobState.PENDING)

    @property
    def newest_sound(self) -> Checkpoint | None:
        """The newest sound checkpoint; None also where checkpoints are unknown."""
        if isinstance(self.checkpoints, Unknown):
            return None
        return self.checkpoints.newest_sound

    def node(self, name: str) -> Node | None:
        """The node of that name as the scheduler shows it; None where it does not."""
        return next((node for node in known(self.nodes, ()) if node.name == name), None)

    @property
    def examined(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that were looked into, newest first; none where they are unknown."""
        if isinstance(self.checkpoints, Unknown):
            return ()
        return self.checkpoints.examined

    @property
    def last_end(self) -> Observed[EndMarker | None]:
        """The end marker of the newest attempt; None where it left none, or where there is no
        attempt.
        """
        if isinstance(self.attempts, Unknown):
            return self.attempts
        newest = newest_attempt(self.attempts)
        if newest is None:
            return None
        return newest.end

    def unknowns(self) -> tuple[str, ...]:
        """Everything that could not be observed, as `what: why`, one line each."""
        return tuple(self._unknowns())

    def _unknowns(self) -> Iterator[str]:
        yield from unknown_fields(self, self.training, self.operation)
        for attempt in known(self.attempts, ()):
            if isinstance(attempt.end, Unknown):
                yield f"end of attempt {attempt.label or attempt.job_id}: {attempt.end.why}"
        if not isinstance(self.checkpoints, Unknown) and isinstance(
            self.checkpoints.latest, Unknown
        ):
            yield f"latest: {self.checkpoints.latest.why}"
        yield from self.read_errors


SNAPSHOT_NAMES = frozenset(  # heads of the lines of `unknowns`
    {*observed_fields(Snapshot, TrainingObservations, OperationObservations).values(), "latest"}
)
