"""`tr11 status --json`: the same observation for programs. The format is described in docs/status-json.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tr11ops.cluster.base import Job
from tr11ops.detect import signs
from tr11ops.detect.cron_dead import is_overdue
from tr11ops.detect.finding import Finding
from tr11ops.detect.runbooks import page_of
from tr11ops.operation import CopyStatus
from tr11ops.report.status_answer import answer
from tr11ops.report.status_care import copies_missing, damaged_copies, forecast_of
from tr11ops.report.status_forecast import end_of, next_checkpoint, throughput_of
from tr11ops.report.status_surroundings import Surroundings, node_use
from tr11ops.snapshot import Attempt, KillSwitch, Observed, Snapshot, Unknown, known
from tr11ops.units import finite, iso_time
from tr11ops.verdict import Verdict
from trainer.contract import EndMarker, RunPaths

SCHEMA = 1


def status_document(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    surroundings: Surroundings = Surroundings(),  # noqa: B008  frozen
) -> dict[str, Any]:
    """The document. null means unknown or not there; every unknown has a line in `unknown`. Plain JSON values only."""
    steps = known(snapshot.steps, ())
    last = steps[-1].record if steps else None
    remaining = signs.remaining_seconds(snapshot)
    said = answer(snapshot, findings, verdict, surroundings)
    return {
        "schema": SCHEMA,
        "time": iso_time(snapshot.time),
        "run": {
            "name": snapshot.run.name, "variant": snapshot.run.variant, "directory": str(snapshot.run.directory),
            "nodes_wanted": snapshot.run.nodes,
        },
        "verdict": verdict.word.value,
        "why": verdict.why,
        "exit_code": verdict.exit_code,
        "may_sleep": said.may_sleep,
        "answer": said.text,
        "sleep_needs": [{"kind": need.kind, "text": need.text, "fix": need.fix} for need in said.needs],
        "scheduler": snapshot.scheduler or None,
        "jobs": None if isinstance(snapshot.jobs, Unknown) else [_job(job) for job in snapshot.jobs],
        "nodes": _nodes(snapshot),
        "node_use": _node_use(snapshot, surroundings),
        "iteration": signs.iteration(snapshot),
        "total_iterations": signs.total_iterations(snapshot),
        "loss": finite(last.lm_loss) if last else None,
        "loss_is_finite": math.isfinite(last.lm_loss) if last else None,
        "grad_norm": finite(last.grad_norm) if last and last.grad_norm is not None else None,
        "last_step_time": iso_time(steps[-1].time) if steps else None,
        "seconds_per_iteration": signs.seconds_per_iteration(snapshot),
        "tflops": finite(last.tflops) if last else None,
        "throughput": _throughput(snapshot, surroundings),
        "learning_rate": finite(last.learning_rate) if last else None,
        "global_batch_size": last.global_batch_size if last else None,
        "consumed_samples": last.consumed_samples if last else None,
        "consumed_tokens": last.consumed_tokens if last else None,
        "remaining_seconds": remaining,
        "eta": None if remaining is None else iso_time(snapshot.time + remaining),
        "finish": _finish(snapshot, surroundings),
        "queue_coverage_seconds": signs.queue_coverage_seconds(snapshot),
        "last_attempts": _attempts(snapshot),
        "last_checkpoint": _checkpoint(snapshot),
        "next_checkpoint": _next_checkpoint(snapshot),
        "backup": _copy(snapshot.backup, snapshot.time),
        "sync": _copy(snapshot.sync, snapshot.time),
        "copies_missing": copies_missing(snapshot),
        "copies_damaged": damaged_copies(snapshot),
        "copying": _copying(surroundings),
        "restore_drill": _drill(surroundings, snapshot.time),
        "kill_switch": _stop_file(snapshot.kill_switch, snapshot.run.kill_switch),
        "pause": _stop_file(
            snapshot.pause, RunPaths(snapshot.run.directory, snapshot.run.name, snapshot.run.variant).pause
        ),
        "holds": _holds(snapshot),
        "exclusions": None if isinstance(snapshot.exclusions, Unknown) else [
            {"node": entry.node, "why": entry.why, "owner": entry.owner, "until": iso_time(entry.until)}
            for entry in snapshot.exclusions
        ],
        "findings": [
            {
                "detector": finding.detector, "severity": finding.severity.name.lower(), "title": finding.title,
                "subject": finding.subject, "evidence": list(finding.evidence), "fix": finding.fix or None,
                "runbook": page_of(finding.detector),
            }
            for finding in findings
        ],
        "alerts": _alerts(surroundings),
        "periodic_jobs": _periodic_jobs(snapshot),
        "chains": None if isinstance(snapshot.chains, Unknown) else [
            {"name": chain.name, "job_id": chain.job_id, "next_due": iso_time(chain.next_due)}
            for chain in snapshot.chains
        ],
        "filesystems": _filesystems(snapshot),
        "unknown": [*snapshot.unknowns(), *surroundings.unknowns()],
    }  # fmt: skip


def _job(job: Job) -> dict[str, Any]:
    return {
        "id": job.job_id, "raw_id": job.raw_id, "state": job.state.value, "reason": job.reason or None,
        "nodes": list(job.nodes), "node_count": len(job.nodes) or job.node_count,
        "tasks": max(1, len(job.pending_tasks)),
        "start": iso_time(job.start_time), "end": iso_time(job.end_time), "time_limit_seconds": job.time_limit_seconds,
        "exit_code": job.exit_code, "derived_exit_code": job.derived_exit_code,
    }  # fmt: skip


def _nodes(snapshot: Snapshot) -> list[str] | None:
    if isinstance(snapshot.jobs, Unknown):
        return None
    return sorted({node for job in signs.active_jobs(snapshot) for node in job.nodes})


def _attempts(snapshot: Snapshot) -> list[dict[str, Any]] | None:
    return None if isinstance(snapshot.attempts, Unknown) else [_attempt(attempt) for attempt in snapshot.attempts]


def _attempt(attempt: Attempt) -> dict[str, Any]:
    end = attempt.end if isinstance(attempt.end, EndMarker) else None
    return {
        "id": attempt.label or attempt.job_id, "raw_id": attempt.job_id, "start": iso_time(attempt.start),
        "changes": list(attempt.changes),
        "end_marker": None if end is None else {
            "reason": end.reason, "iteration": end.iteration, "checkpoint_step": end.checkpoint_step,
            "restart": end.restart, "message": end.message, "time": iso_time(end.time),
        },
    }  # fmt: skip


def _checkpoint(snapshot: Snapshot) -> dict[str, Any] | None:
    if isinstance(snapshot.checkpoints, Unknown):
        return None
    sound = snapshot.checkpoints.newest_sound
    if sound is None:
        return None
    age = None if sound.created is None else max(0.0, snapshot.time - sound.created)
    latest = snapshot.checkpoints.latest
    return {
        "step": sound.step, "age_seconds": age, "verified": sound.verified or None, "bytes": sound.bytes,
        "latest": None if isinstance(latest, Unknown) else latest, "count": len(snapshot.checkpoints.steps),
    }  # fmt: skip


def _stop_file(stop: Observed[KillSwitch | None], path: Path) -> dict[str, Any] | None:
    if isinstance(stop, Unknown):
        return None
    if stop is None:
        return {"set": False, "path": str(path), "who": None, "time": None, "why": None}
    return {
        "set": True, "path": str(stop.path), "who": stop.who or None, "time": iso_time(stop.time),
        "why": stop.why or None,
    }  # fmt: skip


# ----------------------------------------------------------------------------- what comes next
def _throughput(snapshot: Snapshot, surroundings: Surroundings) -> dict[str, Any] | None:
    rate = throughput_of(snapshot, known(surroundings.best, None))
    if rate is None:
        return None
    return {"current": rate.current, "best": rate.best, "percent": rate.percent, "unit": rate.unit}


def _finish(snapshot: Snapshot, surroundings: Surroundings) -> dict[str, Any] | None:
    end = end_of(snapshot, surroundings.course)
    if end is None:
        return None
    return {
        "earliest": iso_time(snapshot.time + end.earliest),
        "likely": None if end.likely is None else iso_time(snapshot.time + end.likely),
        "earliest_seconds": end.earliest, "likely_seconds": end.likely, "window_seconds": end.window,
        "useful_share": end.share,
    }  # fmt: skip


def _next_checkpoint(snapshot: Snapshot) -> dict[str, Any] | None:
    following = next_checkpoint(snapshot)
    if following is None:
        return None
    due = iso_time(snapshot.time + following.seconds)
    return {"step": following.step, "seconds": following.seconds, "due": due, "why": following.why}


# ----------------------------------------------------------------------------- the operation
def _node_use(snapshot: Snapshot, surroundings: Surroundings) -> dict[str, Any] | None:
    use = node_use(snapshot, surroundings)
    return None if use is None else {"used": use.used, "spare": use.spare, "excluded": use.excluded}


def _copy(seen: Observed[CopyStatus | None], now: float) -> dict[str, Any] | None:
    if isinstance(seen, Unknown) or seen is None:
        return None
    age = max(0.0, now - seen.time)
    return {"time": iso_time(seen.time), "age_seconds": age, "step": seen.step, "message": seen.message or None}


def _copying(surroundings: Surroundings) -> list[dict[str, Any]] | None:
    if isinstance(surroundings.copying, Unknown):
        return None
    return [
        {"to": work.to, "who": work.user, "host": work.host, "since": iso_time(work.since), "step": work.step}
        for work in surroundings.copying
    ]


def _drill(surroundings: Surroundings, now: float) -> dict[str, Any] | None:
    drill = surroundings.drill
    if isinstance(drill, Unknown) or drill is None:
        return None
    return {
        "time": iso_time(drill.time), "age_seconds": max(0.0, now - drill.time), "archive": drill.archive,
        "step": drill.step, "passed": drill.passed, "message": drill.message or None,
    }  # fmt: skip


def _holds(snapshot: Snapshot) -> list[dict[str, Any]] | None:
    if isinstance(snapshot.holds, Unknown):
        return None
    return [
        {"job": hold.job, "who": hold.who or None, "time": iso_time(hold.time), "why": hold.why or None}
        for hold in signs.standing_holds(snapshot)
    ]


def _alerts(surroundings: Surroundings) -> list[dict[str, Any]] | None:
    if isinstance(surroundings.alerts, Unknown):
        return None
    return [
        {
            "fingerprint": alert.fingerprint, "detector": alert.detector, "subject": alert.subject,
            "severity": alert.severity.name.lower(), "title": alert.title, "since": iso_time(alert.began),
            "owner": alert.owner or None, "acknowledged_by": alert.acknowledged_by or None,
            "snoozed_until": iso_time(alert.snoozed_until), "runbook": alert.runbook or None,
        }
        for alert in surroundings.alerts
    ]  # fmt: skip


def _periodic_jobs(snapshot: Snapshot) -> list[dict[str, Any]] | None:
    if isinstance(snapshot.periodic_jobs, Unknown):
        return None
    return [
        {
            "name": job.name, "way": job.way, "host": job.host, "started": iso_time(job.started),
            "ended": iso_time(job.ended), "exit_code": job.exit_code, "message": job.message or None,
            "interval_seconds": job.interval_seconds, "next_due": iso_time(job.next_due),
            "late": is_overdue(job, snapshot.time), "failures_in_a_row": job.failures_in_a_row,
        }
        for job in snapshot.periodic_jobs
    ]  # fmt: skip


def _filesystems(snapshot: Snapshot) -> list[dict[str, Any]] | None:
    if isinstance(snapshot.usage, Unknown):
        return None
    from tr11ops.filesystems.history import newest

    return [
        {
            "name": usage.name, "source": usage.source, "path": usage.path or None, "time": iso_time(usage.time),
            "bytes_percent": usage.percent("bytes"), "inodes_percent": usage.percent("inodes"),
            "bytes_free": usage.bytes_free, "full_at": iso_time(forecast_of(snapshot, usage.name).full_at),
        }
        for usage in newest(snapshot.usage).values()
    ]  # fmt: skip
