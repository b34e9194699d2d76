"""One look at a run, with all that follows from it: screen, report, hand-over and published status
are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.units import finite
from tr11ops.cluster.base import Job, Overview
from tr11ops.detect.copies import missing_copies
from tr11ops.detect.detector import Finding, commands_after, first_cause
from tr11ops.detect.nodes_left import bad_nodes, leaving_nodes
from tr11ops.detect.registry import detect_all, page_for
from tr11ops.detect.unfinished_end import how_it_ended, is_bad
from tr11ops.detect.watch import is_overdue, is_wanted
from tr11ops.observe import derived
from tr11ops.observe.clock import Moment
from tr11ops.observe.forecast import (
    end_of,
    next_checkpoint,
    no_cover,
    queue_coverage_seconds,
    speed_of,
)
from tr11ops.observe.jobs import standing_holds
from tr11ops.observe.liveness import liveness_outside
from tr11ops.observe.look import look_now, observe, unseen
from tr11ops.observe.observations import LaunchEnd
from tr11ops.observe.snapshot import Attempt, KillSwitch, RunFacts, Snapshot
from tr11ops.rundir.disk_usage import Forecast, forecast, newest
from tr11ops.status.answer import SleepAnswer, answer, watchdog_missing
from tr11ops.status.document import (
    CardWishes,
    DoneAgain,
    Finish,
    LossCourse,
    RunName,
    ShownAttempt,
    ShownCheckpoint,
    ShownFilesystem,
    ShownFinding,
    ShownPeriodicJob,
    Status,
    StopFile,
    step_values,
)
from tr11ops.status.extra_observations import ExtraObservations, node_use
from tr11ops.watchdog.since import since_when
from tr11ops.watchdog.verdict import (
    Verdict,
    VerdictWord,
    judge,
    main_fault,
    with_severity_of,
    with_what_resumes,
)
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.detect.node_progress import NodeProgress, SlowNodes
    from tr11ops.rundir.hold_store import HoldRecord
    from tr11ops.rundir.paths import RunDirectory


class Assessment(Record, dict=True):
    """A Snapshot, what the detectors found in it, the verdict, and what was observed beside it."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    extra: ExtraObservations

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    @property
    def answer(self) -> SleepAnswer:
        """May a person sleep?"""
        return answer(self.snapshot, self.findings, self.verdict, self.extra)

    @cached_property
    def status(self) -> Status:
        """All of it as one document: what the screens are drawn from."""
        return status_of(self.snapshot, self.findings, self.verdict, self.extra)

    @property
    def slow_node_lines(self) -> tuple[str, ...]:
        """Which nodes are slow, in sentences, for screens about nodes; () where there is no more to
        say.
        """
        slow, named, said = self.status.slow_nodes, tuple[str, ...](), list[str]()
        if slow is not None and slow.words:
            named, said = slow.nodes, [f"Which node is slow? {slow.text}"]
        said += [
            f"{one.title}."
            for one in self.findings
            if one.detector == "slow-node" and one.subject not in named
        ]
        return tuple(said)

    def document(self) -> dict[str, Any]:
        """What `tr11 status --json` prints, and the published status and the metrics are made of."""
        return self.status.document()


def assess(
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Overview | Unknown,
    look_beside: Callable[[Snapshot], ExtraObservations],
    now: float | None = None,
    read_digests: bool = False,
) -> Assessment:
    """Look at the run once. `now`: the moment by the run's clock, which is asked for it where none
    is given.

    `look_beside` observes what belongs to no snapshot.
    """
    if now is None:
        moment = look_now(directory, facts, scheduler)
    else:
        moment = Moment(now)
    snapshot = observe(directory, facts, scheduler=scheduler, now=moment, read_digests=read_digests)
    findings = detect_all(snapshot)
    extra = look_beside(snapshot)
    speed = speed_of(snapshot, known(extra.best, None))
    verdict = judge(snapshot, findings, None if speed is None else speed.throughput)
    extra = extra.seen_with(snapshot, findings, verdict)
    findings = with_what_resumes(snapshot, with_severity_of(verdict, findings), verdict)
    return Assessment(snapshot, findings, verdict, extra)


def nothing_seen(facts: RunFacts, now: float, why: Unknown) -> Assessment:
    """An assessment of a look that saw nothing, for one reason."""
    snapshot = unseen(facts, Moment(now), why)
    return Assessment(snapshot, (), judge(snapshot, ()), ExtraObservations(alerts=why))


def status_of(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    extra: ExtraObservations = ExtraObservations(),  # noqa: B008  frozen
) -> Status:
    """The status of one look. What could not be observed is None, and has a line in `unknown`."""
    steps = known(snapshot.steps, ())
    sleep = answer(snapshot, findings, verdict, extra)
    facts, seen = snapshot.run, snapshot.operation
    last_step: dict[str, Any] = {}
    if steps:
        last_step = {**step_values(steps[-1].record), "tflops": finite(steps[-1].record.tflops)}
    nodes, slow = _node_progress(snapshot)
    speed = speed_of(snapshot, known(extra.best, None))
    told = derived.newest_loss(steps)
    if told is not None:
        last_step["loss"] = finite(told.record.lm_loss)
        last_step["loss_is_finite"] = told.record.loss_is_finite
    return Status(
        time=snapshot.time,
        run=RunName(facts.name, facts.variant, str(facts.directory), facts.nodes),
        verdict=verdict.word,
        why=verdict.why,
        exit_code=verdict.exit_code,
        main_fault=main_fault(verdict, findings),
        verdict_since=since_when(snapshot, findings, verdict, extra.verdict),
        may_sleep=sleep.may_sleep,
        answer=sleep.text,
        sleep_needs=sleep.needs,
        scheduler=snapshot.scheduler or None,
        jobs=known(snapshot.jobs, None),
        nodes=_nodes(snapshot),
        node_use=node_use(snapshot),
        iteration=derived.iteration(snapshot),
        total_iterations=derived.total_iterations(snapshot),
        last_step_time=steps[-1].time if steps else None,
        seconds_per_iteration=None if speed is None else speed.seconds,
        throughput=None if speed is None else speed.throughput,
        finish=_finish(snapshot),
        queue_coverage_seconds=queue_coverage_seconds(snapshot),
        queue_sure_seconds=queue_coverage_seconds(snapshot, only_sure=True),
        no_cover=no_cover(snapshot),
        last_attempts=_attempts(snapshot),
        last_checkpoint=_checkpoint(snapshot),
        next_checkpoint=next_checkpoint(snapshot),
        backup=known(seen.backup, None),
        sync=known(seen.sync, None),
        copies_missing=_copies_missing(snapshot),
        copies_damaged=_damaged_copies(snapshot),
        copying=known(extra.copying, None),
        restore_drill=known(extra.drill, None),
        trainer=facts.standing,
        kill_switch=_stop_file(snapshot.kill_switch, facts.kill_switch),
        pause=_stop_file(
            snapshot.pause, RunPaths(facts.directory, facts.name, facts.variant).pause
        ),
        holds=_holds(snapshot),
        exclusions=known(snapshot.exclusions, None),
        findings=tuple(_finding(finding, findings) for finding in findings),
        alerts=known(extra.alerts, None),
        untold=extra.untold,
        on_call=extra.on_call,
        periodic_jobs=_periodic_jobs(snapshot),
        chains=known(seen.chains, None),
        filesystems=_filesystems(snapshot),
        card=_wishes(facts),
        loss_course=LossCourse.of(step.record for step in steps),
        done_again=_done_again(snapshot) if verdict.word is VerdictWord.STARTING else None,
        relaunches=tuple(_relaunches(snapshot)),
        bad_nodes=tuple(sorted(bad_nodes(snapshot))),
        leaving_nodes=tuple(leaving_nodes(snapshot)),
        node_progress=nodes,
        slow_nodes=slow,
        checkpoint_folders=None
        if isinstance(snapshot.checkpoints, Unknown)
        else len(snapshot.checkpoints.steps),
        watchdog_fault=_watchdog_fault(snapshot, extra),
        watchdog_acts=facts.watch.act,
        origin=known(snapshot.origin, None),
        unknown=(*snapshot.unknowns(), *extra.unknowns()),
        **last_step,
    )


def _wishes(facts: RunFacts) -> CardWishes:
    copies = []
    wanted = facts.copies
    if wanted is not None and wanted.copies_checkpoints:
        copies.append("backup")
    if facts.sync_seconds is not None:
        copies.append("sync")
    return CardWishes(facts.card, tuple(copies), tuple(rule.name for rule in facts.filesystems))


def _watchdog_fault(snapshot: Snapshot, extra: ExtraObservations) -> str | None:
    """Why no watchdog looks; None where one does, or where that is unknown."""
    if isinstance(snapshot.operation.periodic_jobs, Unknown):
        return None
    return watchdog_missing(snapshot, extra) or None


def _nodes(snapshot: Snapshot) -> tuple[str, ...] | None:
    if isinstance(snapshot.jobs, Unknown):
        return None
    return tuple(sorted({node for job in snapshot.active_jobs for node in job.nodes}))


def _node_progress(snapshot: Snapshot) -> tuple[tuple[NodeProgress, ...], SlowNodes | None]:
    """Of each node, and which of them is slow. Loaded where something runs alone."""
    if not snapshot.active_jobs:
        return (), None

    from tr11ops.detect.node_progress import node_progress, slow_nodes

    found = node_progress(snapshot)
    return found, slow_nodes(snapshot, found)


def _finding(finding: Finding, findings: tuple[Finding, ...]) -> ShownFinding:
    cause = first_cause(finding, findings)
    consequences = (
        other
        for other in findings
        if other is not finding and first_cause(other, findings) is finding
    )
    return ShownFinding(
        detector=finding.detector,
        severity=finding.severity.name.lower(),
        title=finding.title,
        subject=finding.subject,
        evidence=finding.evidence,
        fix=finding.fix or None,
        runbook=page_for(finding, consequences),
        then=commands_after(finding, findings),
        fingerprint=finding.fingerprint,
        follows_from=None if cause is finding else cause.fingerprint,
    )


def _checkpoint(snapshot: Snapshot) -> ShownCheckpoint | None:
    sound = snapshot.newest_sound
    if sound is None or isinstance(snapshot.checkpoints, Unknown):
        return None
    return ShownCheckpoint(
        step=sound.step,
        age_seconds=None if sound.created is None else max(0.0, snapshot.time - sound.created),
        verified=sound.verified or None,
        bytes=sound.bytes,
        latest=known(snapshot.checkpoints.latest, None),
        count=len(snapshot.checkpoints.steps),
    )


def _done_again(snapshot: Snapshot) -> DoneAgain | None:
    """While the training starts, the log still ends with what was lost."""
    done, newest = derived.iteration(snapshot), snapshot.newest_sound
    if done is None or newest is None or newest.step >= done:
        return None
    return DoneAgain(newest.step, done - newest.step)


def _stop_file(stop: Observed[KillSwitch | None], path: Path) -> StopFile | None:
    if isinstance(stop, Unknown):
        return None
    return StopFile(str(path if stop is None else stop.path), stop)


# ----------------------------------------------------------------------------- what comes next
def _finish(snapshot: Snapshot) -> Finish | None:
    end = end_of(snapshot)
    if end is None:
        return None
    return Finish(
        earliest=snapshot.time + end.earliest,
        likely=None if end.likely is None else snapshot.time + end.likely,
        earliest_seconds=end.earliest,
        likely_seconds=end.likely,
        window_seconds=end.window,
        useful_share=end.share,
        usual_seconds=end.usual,
    )


# ----------------------------------------------------------------------------- the operation
def _copies_missing(snapshot: Snapshot) -> int | None:
    """Copies that the card wants of checkpoints that are here, and that are not on record; None
    where it is unknown.
    """
    if isinstance(snapshot.operation.backup, Unknown) or isinstance(snapshot.checkpoints, Unknown):
        return None
    return len(missing_copies(snapshot, snapshot.operation.backup))


def _damaged_copies(snapshot: Snapshot) -> int | None:
    """Copies that were found damaged; None where it is unknown."""
    if isinstance(snapshot.operation.backup, Unknown):
        return None
    if snapshot.operation.backup is None:
        return 0
    return len(snapshot.operation.backup.damaged)


def _holds(snapshot: Snapshot) -> tuple[HoldRecord, ...] | None:
    if isinstance(snapshot.operation.holds, Unknown):
        return None
    return tuple(standing_holds(snapshot))


def _periodic_jobs(snapshot: Snapshot) -> tuple[ShownPeriodicJob, ...] | None:
    if isinstance(snapshot.operation.periodic_jobs, Unknown):
        return None
    return tuple(
        ShownPeriodicJob(job, is_overdue(job, snapshot.time), is_wanted(snapshot, job))
        for job in snapshot.operation.periodic_jobs
    )


def _filesystems(snapshot: Snapshot) -> tuple[ShownFilesystem, ...] | None:
    usages = snapshot.operation.usage
    if isinstance(usages, Unknown):
        return None
    if not usages:
        return ()
    from tr11ops.runcard.watching import FilesystemSection

    rules = {rule.name: rule for rule in snapshot.run.filesystems}
    return tuple(
        ShownFilesystem(
            usage,
            rules.get(name) or FilesystemSection.model_construct(name=name),
            forecast_of(snapshot, name).full_at,
        )
        for name, usage in newest(usages).items()
    )


def forecast_of(snapshot: Snapshot, name: str) -> Forecast:
    """When the file system of this name will be full."""
    return forecast(
        (usage for usage in known(snapshot.operation.usage, ()) if usage.name == name),
        snapshot.time,
    )


# ----------------------------------------------------------------------------- the attempts
def _attempts(snapshot: Snapshot) -> tuple[ShownAttempt, ...] | None:
    """The attempts on record, in their order (the newest first), and how each ended."""
    if isinstance(snapshot.attempts, Unknown):
        return None
    wanted = {attempt.job_id for attempt in snapshot.attempts}
    jobs = {
        name: job
        for job in known(snapshot.jobs, ())
        for name in (job.job_id, job.raw_id)
        if name in wanted
    }
    return tuple(
        _attempt(snapshot, attempt, jobs.get(attempt.job_id)) for attempt in snapshot.attempts
    )


def _attempt(snapshot: Snapshot, attempt: Attempt, job: Job | None) -> ShownAttempt:
    outside = liveness_outside(snapshot)
    is_over = attempt.end is not None
    if not is_over and (outside is None or outside.job_id != attempt.job_id):
        is_over = not isinstance(snapshot.jobs, Unknown) and (job is None or job.state.is_final)
    if not is_over:
        return ShownAttempt(attempt, None, is_bad=False)
    return ShownAttempt(attempt, how_it_ended(attempt, job), is_bad(attempt))


def _relaunches(snapshot: Snapshot) -> Iterator[LaunchEnd]:
    """How the last launch ended of each running attempt that has started its workers again."""
    for job in snapshot.active_jobs:
        names = derived.identifiers(job)
        ends = derived.launch_ends(snapshot, names)
        if ends and derived.marker_of(snapshot, names) is None:
            yield replace(ends[-1], job_id=job.job_id)
