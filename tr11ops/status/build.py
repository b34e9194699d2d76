"""Makes the status document of one look: each fact that a screen, `--json` or a metric shows is derived here. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.units import finite
from tr11ops.cluster.base import Job
from tr11ops.detect.backup_overdue import missing_copies
from tr11ops.detect.causes import commands_after, first_cause
from tr11ops.detect.cron_dead import is_overdue
from tr11ops.detect.finding import Finding
from tr11ops.detect.nodes_left import bad_nodes, leaving_nodes
from tr11ops.detect.periodic_job_failed import is_wanted
from tr11ops.detect.runbooks import page_for
from tr11ops.observe import derived
from tr11ops.observe.forecast import end_of, next_checkpoint, no_cover, queue_coverage_seconds, throughput_of
from tr11ops.observe.operation import CopyStatus
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.queue.held_jobs import standing_holds
from tr11ops.status import parts
from tr11ops.status.answer import answer, watchdog_missing
from tr11ops.status.build_attempts import attempts_of, relaunches_of
from tr11ops.status.document import Status
from tr11ops.status.extra_observations import ExtraObservations, node_use
from tr11ops.status.parts import Instant
from tr11ops.watchdog.verdict import Verdict, VerdictWord
from trainer.contract.paths import RunPaths

if TYPE_CHECKING:
    from tr11ops.rundir.disk_usage import Forecast, Usage


def status_of(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    extra: ExtraObservations = ExtraObservations(),  # noqa: B008  frozen
) -> Status:
    """The status of one look. What could not be observed is None, and has a line in `unknown`."""
    steps = known(snapshot.steps, ())
    last = steps[-1].record if steps else None
    finish = _finish(snapshot)
    said = answer(snapshot, findings, verdict, extra)
    facts, operation = snapshot.run, snapshot.run.operation
    return Status(
        time=Instant(snapshot.time),
        run=parts.RunName(facts.name, facts.variant, str(facts.directory), facts.nodes),
        verdict=verdict.word,
        why=verdict.why,
        exit_code=verdict.exit_code,
        may_sleep=said.may_sleep,
        answer=said.text,
        sleep_needs=said.needs,
        scheduler=snapshot.scheduler or None,
        jobs=None if isinstance(snapshot.jobs, Unknown) else tuple(map(_job, snapshot.jobs)),
        nodes=_nodes(snapshot),
        node_use=node_use(snapshot, extra),
        iteration=derived.iteration(snapshot),
        total_iterations=derived.total_iterations(snapshot),
        loss=finite(last.lm_loss) if last else None,
        loss_is_finite=math.isfinite(last.lm_loss) if last else None,
        grad_norm=finite(last.grad_norm) if last and last.grad_norm is not None else None,
        last_step_time=Instant.of(steps[-1].time) if steps else None,
        seconds_per_iteration=derived.seconds_per_iteration(snapshot),
        tflops=finite(last.tflops) if last else None,
        throughput=_throughput(snapshot, extra),
        learning_rate=finite(last.learning_rate) if last else None,
        global_batch_size=last.global_batch_size if last else None,
        consumed_samples=last.consumed_samples if last else None,
        consumed_tokens=last.consumed_tokens if last else None,
        remaining_seconds=None if finish is None else finish.earliest_seconds,
        eta=None if finish is None else finish.earliest,
        finish=finish,
        queue_coverage_seconds=queue_coverage_seconds(snapshot),
        queue_sure_seconds=queue_coverage_seconds(snapshot, only_sure=True),
        no_cover=no_cover(snapshot),
        last_attempts=None if isinstance(snapshot.attempts, Unknown) else tuple(attempts_of(snapshot)),
        last_checkpoint=_checkpoint(snapshot),
        next_checkpoint=_next_checkpoint(snapshot),
        backup=_copy(snapshot.operation.backup, snapshot.time),
        sync=_copy(snapshot.operation.sync, snapshot.time),
        copies_missing=_copies_missing(snapshot),
        copies_damaged=_damaged_copies(snapshot),
        copying=_copying(extra),
        restore_drill=_drill(extra, snapshot.time),
        kill_switch=_stop_file(snapshot.kill_switch, facts.kill_switch),
        pause=_stop_file(snapshot.pause, RunPaths(facts.directory, facts.name, facts.variant).pause),
        holds=_holds(snapshot),
        exclusions=None if isinstance(snapshot.exclusions, Unknown) else tuple(
            parts.ShownExclusion(entry.node, entry.why, entry.owner, Instant.of(entry.until), entry.state)
            for entry in snapshot.exclusions
        ),
        findings=tuple(_finding(finding, findings) for finding in findings),
        alerts=_alerts(extra),
        periodic_jobs=_periodic_jobs(snapshot),
        chains=None if isinstance(snapshot.operation.chains, Unknown) else tuple(
            parts.ShownChain(chain.name, chain.job_id, Instant(chain.next_due)) for chain in snapshot.operation.chains
        ),
        filesystems=_filesystems(snapshot),
        card=parts.CardWishes(
            facts.card,
            ("backup",) * (operation.archive_interval is not None) + ("sync",) * (operation.sync_seconds is not None),
            tuple(rule.name for rule in operation.filesystems),
        ),
        loss_course=parts.LossCourse.of({step.record.iteration: step.record.lm_loss for step in steps}),
        done_again=_done_again(snapshot) if verdict.word is VerdictWord.STARTING else None,
        relaunches=tuple(relaunches_of(snapshot)),
        bad_nodes=tuple(sorted(bad_nodes(snapshot))),
        leaving_nodes=tuple(
            parts.LeavingNode(node.name, tuple(sorted(node.states)), node.reason) for node in leaving_nodes(snapshot)
        ),
        checkpoint_folders=(
            None if isinstance(snapshot.checkpoints, Unknown) else len(snapshot.checkpoints.steps)
        ),
        watchdog_fault=_watchdog_fault(snapshot),
        watchdog_acts=facts.operation.watchdog_acts,
        origin=_origin(snapshot),
        unknown=(*snapshot.unknowns(), *extra.unknowns()),
    )  # fmt: skip


def _watchdog_fault(snapshot: Snapshot) -> str | None:
    """Why no watchdog looks; None where one does, or where that is unknown."""
    if isinstance(snapshot.operation.periodic_jobs, Unknown):
        return None
    return watchdog_missing(snapshot) or None


def _job(job: Job) -> parts.ShownJob:
    return parts.ShownJob(
        job.job_id, job.raw_id, job.state.value, job.reason or None, job.nodes, len(job.nodes) or job.node_count,
        max(1, len(job.pending_tasks)), Instant.of(job.start_time), Instant.of(job.end_time), job.time_limit_seconds,
        job.exit_code, job.derived_exit_code, job.user,
    )  # fmt: skip


def _nodes(snapshot: Snapshot) -> tuple[str, ...] | None:
    if isinstance(snapshot.jobs, Unknown):
        return None
    return tuple(sorted({node for job in snapshot.active_jobs for node in job.nodes}))


def _finding(finding: Finding, findings: tuple[Finding, ...]) -> parts.ShownFinding:
    from tr11ops.alerts.fingerprint import fingerprint

    cause = first_cause(finding, findings)
    consequences = (other for other in findings if other is not finding and first_cause(other, findings) is finding)
    return parts.ShownFinding(
        finding.detector, finding.severity.name.lower(), finding.title, finding.subject, finding.evidence,
        finding.fix or None, page_for(finding, consequences), commands_after(finding, findings),
        fingerprint(finding.detector, finding.identity),
        None if cause is finding else fingerprint(cause.detector, cause.identity),
    )  # fmt: skip


def _checkpoint(snapshot: Snapshot) -> parts.ShownCheckpoint | None:
    if isinstance(snapshot.checkpoints, Unknown):
        return None
    sound = snapshot.checkpoints.newest_sound
    if sound is None:
        return None
    age = None if sound.created is None else max(0.0, snapshot.time - sound.created)
    latest, count = known(snapshot.checkpoints.latest, None), len(snapshot.checkpoints.steps)
    return parts.ShownCheckpoint(sound.step, age, sound.verified or None, sound.bytes, latest, count)


def _origin(snapshot: Snapshot) -> parts.ShownOrigin | None:
    origin = known(snapshot.origin, None)
    if origin is None:
        return None
    return parts.ShownOrigin(
        origin.run or None, origin.step, origin.folder, origin.takes_weights, origin.is_fresh, Instant(origin.time),
        origin.before, origin.lineage,
    )  # fmt: skip


def _done_again(snapshot: Snapshot) -> parts.DoneAgain | None:
    """While the training starts, the log still ends with what was lost."""
    done = derived.iteration(snapshot)
    newest = None if isinstance(snapshot.checkpoints, Unknown) else snapshot.checkpoints.newest_sound
    if done is None or newest is None or newest.step >= done:
        return None
    return parts.DoneAgain(newest.step, done - newest.step)


def _stop_file(stop: Observed[KillSwitch | None], path: Path) -> parts.StopFile | None:
    if isinstance(stop, Unknown):
        return None
    if stop is None:
        return parts.StopFile(False, str(path), None, None, None)
    return parts.StopFile(True, str(stop.path), stop.who or None, Instant.of(stop.time), stop.why or None)


# ----------------------------------------------------------------------------- what comes next
def _throughput(snapshot: Snapshot, extra: ExtraObservations) -> parts.ShownSpeed | None:
    rate = throughput_of(snapshot, known(extra.best, None))
    return None if rate is None else parts.ShownSpeed(rate.current, rate.best, rate.percent, rate.unit)


def _finish(snapshot: Snapshot) -> parts.Finish | None:
    end = end_of(snapshot)
    if end is None:
        return None
    likely = None if end.likely is None else Instant(snapshot.time + end.likely)
    return parts.Finish(
        Instant(snapshot.time + end.earliest), likely, end.earliest, end.likely, end.window, end.share
    )  # fmt: skip


def _next_checkpoint(snapshot: Snapshot) -> parts.NextSave | None:
    following = next_checkpoint(snapshot)
    if following is None:
        return None
    due = None if following.seconds is None else Instant(snapshot.time + following.seconds)
    return parts.NextSave(following.step, following.seconds, due, following.why, following.iterations)


# ----------------------------------------------------------------------------- the operation
def _copies_missing(snapshot: Snapshot) -> int | None:
    """Copies that the card wants of checkpoints that are here, and that are not on record; None where it is unknown."""
    if isinstance(snapshot.operation.backup, Unknown) or isinstance(snapshot.checkpoints, Unknown):
        return None
    return len(missing_copies(snapshot, snapshot.operation.backup))


def _damaged_copies(snapshot: Snapshot) -> int | None:
    """Copies that were found damaged; None where it is unknown."""
    if isinstance(snapshot.operation.backup, Unknown):
        return None
    return 0 if snapshot.operation.backup is None else len(snapshot.operation.backup.damaged)


def _copy(seen: Observed[CopyStatus | None], now: float) -> parts.LastCopy | None:
    if isinstance(seen, Unknown) or seen is None:
        return None
    return parts.LastCopy(Instant(seen.time), max(0.0, now - seen.time), seen.step, seen.message or None)


def _copying(extra: ExtraObservations) -> tuple[parts.Copying, ...] | None:
    if isinstance(extra.copying, Unknown):
        return None
    return tuple(parts.Copying(work.to, work.user, work.host, Instant(work.since), work.step) for work in extra.copying)


def _drill(extra: ExtraObservations, now: float) -> parts.ShownDrill | None:
    drill = extra.drill
    if isinstance(drill, Unknown) or drill is None:
        return None
    age = max(0.0, now - drill.time)
    return parts.ShownDrill(Instant(drill.time), age, drill.archive, drill.step, drill.passed, drill.message or None)


def _holds(snapshot: Snapshot) -> tuple[parts.ShownHold, ...] | None:
    if isinstance(snapshot.operation.holds, Unknown):
        return None
    return tuple(
        parts.ShownHold(hold.job, hold.who or None, Instant.of(hold.time), hold.why or None)
        for hold in standing_holds(snapshot)
    )


def _alerts(extra: ExtraObservations) -> tuple[parts.ShownAlert, ...] | None:
    if isinstance(extra.alerts, Unknown):
        return None
    return tuple(
        parts.ShownAlert(
            alert.fingerprint, alert.detector, alert.subject, alert.severity.name.lower(), alert.title,
            Instant(alert.start), alert.owner or None, alert.acknowledged_by or None, Instant.of(alert.snoozed_until),
            alert.runbook or None, alert.watchdog or None,
        )
        for alert in extra.alerts
    )  # fmt: skip


def _periodic_jobs(snapshot: Snapshot) -> tuple[parts.ShownPeriodicJob, ...] | None:
    if isinstance(snapshot.operation.periodic_jobs, Unknown):
        return None
    return tuple(
        parts.ShownPeriodicJob(
            job.name, job.way, job.host, Instant(job.started), Instant.of(job.ended), job.exit_code,
            job.message or None, job.interval_seconds, Instant(job.next_due), is_overdue(job, snapshot.time),
            job.failures_in_a_row, is_wanted(snapshot, job),
        )
        for job in snapshot.operation.periodic_jobs
    )  # fmt: skip


def _filesystems(snapshot: Snapshot) -> tuple[parts.ShownFilesystem, ...] | None:
    if isinstance(snapshot.operation.usage, Unknown):
        return None
    return tuple(_looked_at(snapshot, snapshot.operation.usage)) if snapshot.operation.usage else ()


def _looked_at(snapshot: Snapshot, usages: tuple[Usage, ...]) -> Iterator[parts.ShownFilesystem]:
    from tr11ops.observe.operation import FilesystemRule
    from tr11ops.rundir.disk_usage import newest

    rules = {rule.name: rule for rule in snapshot.run.operation.filesystems}
    for usage in newest(usages).values():
        rule = rules.get(usage.name, FilesystemRule(usage.name))
        yield parts.ShownFilesystem(
            usage.name, usage.source, usage.path or None, Instant(usage.time), usage.percent("bytes"),
            usage.percent("inodes"), usage.bytes_free, Instant.of(forecast_of(snapshot, usage.name).full_at),
            rule.bytes_percent, rule.inodes_percent,
        )  # fmt: skip


def forecast_of(snapshot: Snapshot, name: str) -> Forecast:
    """When the file system of this name will be full."""
    from tr11ops.rundir.disk_usage import forecast

    return forecast((usage for usage in known(snapshot.operation.usage, ()) if usage.name == name), snapshot.time)
