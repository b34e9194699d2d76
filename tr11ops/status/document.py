"""The status of a run as one typed, frozen document: `--json` prints it, and every screen is drawn
from it. Pure.

It holds the records that were observed, and a small one where something is derived from them for
the screens alone. `document()` says which of their fields are keys of docs/reference/status-json.md.
Durations are seconds, moments seconds since the epoch; in JSON a moment is ISO 8601.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from tr11ops.base.invocation import command_for
from tr11ops.base.units import finite, iso_time, means
from trainer.contract.attempt import EndMarker
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.alerts.state import Alert, AlertCare, OnCall
    from tr11ops.cluster.base import Job, Node
    from tr11ops.detect.node_progress import NodeProgress, SlowNodes
    from tr11ops.observe.forecast import NextCheckpoint, NoCover, Throughput
    from tr11ops.observe.observations import CopyStatus, LaunchEnd
    from tr11ops.observe.snapshot import Attempt, KillSwitch
    from tr11ops.runcard.watching import FilesystemSection
    from tr11ops.rundir.attempts import CodeIdentity
    from tr11ops.rundir.copies import DrillRecord
    from tr11ops.rundir.cron_records import ChainState, PeriodicJobState
    from tr11ops.rundir.disk_usage import Usage
    from tr11ops.rundir.exclusion import Exclusion
    from tr11ops.rundir.hold_store import HoldRecord
    from tr11ops.status.answer import Need
    from tr11ops.status.extra_observations import NodeUse, RunningCopy
    from tr11ops.trainers.levels import TrainerStanding
    from tr11ops.watchdog.verdict import VerdictWord
    from trainer.contract.metrics_record import MeasuredStep
    from trainer.contract.origin import BranchOrigin

SCHEMA = 1
COURSE_POINTS = 40  # of a course of losses
NOT_MOVING = frozenset({"stalled", "down"})  # verdicts: nothing trains on


class RunName(Record):
    """Which run was looked at."""

    name: str
    variant: str
    directory: str | None = None
    nodes_wanted: int | None = None


class CardWishes(Record):
    """What the run card asks for around the training. `name` is the card as it was typed; "" for
    the folder's own.
    """

    name: str = ""
    copies: tuple[str, ...] = ()  # "backup", "sync"
    filesystems: tuple[str, ...] = ()  # that are watched


class Finish(Record):
    """The range of the training's end; `useful_share` (0..1) of the last `window_seconds` went into
    steps. `usual_seconds`: at the usual speed, where it is slower now.
    """

    earliest: float | None
    likely: float | None
    earliest_seconds: float
    likely_seconds: float | None = None
    window_seconds: float | None = None
    useful_share: float | None = None
    usual_seconds: float | None = None


class ShownAttempt(Record):
    """One attempt, and how it ended: None while it may still run."""

    attempt: Attempt
    how: str | None
    is_bad: bool

    @property
    def label(self) -> str:
        """Its id as people type it."""
        return self.attempt.label or self.attempt.job_id

    @property
    def end(self) -> EndMarker | None:
        """What the trainer wrote of its own end, where that can be read."""
        if isinstance(self.attempt.end, EndMarker):
            return self.attempt.end
        return None


class ShownCheckpoint(Record):
    """The newest whole checkpoint; `count` checkpoint folders are there in all."""

    step: int
    age_seconds: float | None
    verified: str | None
    bytes: int | None
    latest: int | None
    count: int | None


class StopFile(Record):
    """A file that stops the run: where it is looked for, and what it says where it is there."""

    path: str
    switch: KillSwitch | None = None

    @property
    def is_set(self) -> bool:
        return self.switch is not None


class ShownFinding(Record):
    """A fault that this look found. `severity`: "info", "warning", "critical"; `runbook`: a page of
    `runbooks/`.

    `then`: what lets the run go on once `fix` has helped. `fingerprint` names its incident, as
    alerts do, and `follows_from` that of its first cause, where it has one in this look.
    """

    detector: str
    severity: str
    title: str
    subject: str
    evidence: tuple[str, ...]
    fix: str | None
    runbook: str | None
    then: tuple[str, ...] = ()
    fingerprint: str | None = None
    follows_from: str | None = None


class ShownPeriodicJob(Record):
    """The last round of a periodic job. `late`: a round was left out; `wanted`: the card asks for
    the job.
    """

    job: PeriodicJobState
    late: bool
    wanted: bool


class ShownFilesystem(Record):
    """The newest look at a file system, from when on it counts as full, and when it will be full by
    its trend.
    """

    usage: Usage
    rule: FilesystemSection
    full_at: float | None


class LossCourse(Record):
    """The loss of the last `steps` steps in at most COURSE_POINTS `means`; None where no loss was a
    number.
    """

    steps: int
    means: tuple[float | None, ...]

    @classmethod
    def of(cls, steps: Iterable[MeasuredStep]) -> LossCourse | None:
        """Of these steps, the oldest first; None where none tells a loss."""
        told = {step.iteration: step.lm_loss for step in steps if step.lm_loss is not None}
        values = list(told.values())
        if not values:
            return None
        return cls(len(values), tuple(means(values, min(COURSE_POINTS, len(values)))))


class DoneAgain(Record):
    """What a starting training does again: `iterations` behind its checkpoint of step `from_step`
    were lost.
    """

    from_step: int
    iterations: int


class Status(Record, kw_only=True):
    """One look at a run, with what follows from it.

    None means unknown, or that there is none; every unknown has a line in `unknown`.
    """

    time: float
    run: RunName
    verdict: VerdictWord
    why: str
    exit_code: int
    main_fault: str = ""
    verdict_since: float | None = None
    may_sleep: bool | None = None
    answer: str = ""
    sleep_needs: tuple[Need, ...] = ()
    scheduler: str | None = None
    jobs: tuple[Job, ...] | None = None
    nodes: tuple[str, ...] | None = None
    node_use: NodeUse | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    loss: float | None = None
    loss_is_finite: bool | None = None
    grad_norm: float | None = None
    last_step_time: float | None = None
    seconds_per_iteration: float | None = None
    tflops: float | None = None
    throughput: Throughput | None = None
    learning_rate: float | None = None
    global_batch_size: int | None = None
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    finish: Finish | None = None
    queue_coverage_seconds: float | None = None
    queue_sure_seconds: float | None = None
    no_cover: tuple[NoCover, ...] = ()
    last_attempts: tuple[ShownAttempt, ...] | None = None
    last_checkpoint: ShownCheckpoint | None = None
    next_checkpoint: NextCheckpoint | None = None
    backup: CopyStatus | None = None
    sync: CopyStatus | None = None
    copies_missing: int | None = None
    copies_damaged: int | None = None
    copying: tuple[RunningCopy, ...] | None = None
    restore_drill: DrillRecord | None = None
    kill_switch: StopFile | None = None
    pause: StopFile | None = None
    holds: tuple[HoldRecord, ...] | None = None
    exclusions: tuple[Exclusion, ...] | None = None
    findings: tuple[ShownFinding, ...] = ()
    alerts: tuple[Alert, ...] | None = None
    untold: tuple[AlertCare, ...] = ()
    on_call: OnCall | None = None
    periodic_jobs: tuple[ShownPeriodicJob, ...] | None = None
    chains: tuple[ChainState, ...] | None = None
    filesystems: tuple[ShownFilesystem, ...] | None = None
    card: CardWishes = CardWishes()
    loss_course: LossCourse | None = None
    done_again: DoneAgain | None = None
    # of running attempts: how the launch before the present one ended
    relaunches: tuple[LaunchEnd, ...] = ()
    bad_nodes: tuple[str, ...] = ()
    # of each node of the running jobs: how far, how silent, how quick
    node_progress: tuple[NodeProgress, ...] = ()
    slow_nodes: SlowNodes | None = None
    # that the run works on, and that the site takes away when its job ends
    leaving_nodes: tuple[Node, ...] = ()
    checkpoint_folders: int | None = None
    watchdog_fault: str | None = None
    watchdog_acts: bool | None = None
    origin: BranchOrigin | None = None
    # of a trainer that is not tr11's own
    trainer: TrainerStanding | None = None
    unknown: tuple[str, ...] = ()

    @property
    def remaining_seconds(self) -> float | None:
        """Of training, at the recent pace and with nothing in between."""
        if self.finish is None:
            return None
        return self.finish.earliest_seconds

    @property
    def slow_words(self) -> tuple[str, ...]:
        """Which node is slow, in a few words; () where nothing trains, and where none is slow of a
        training that stands: that is no news of what holds it up.
        """
        found = self.slow_nodes
        if found is None:
            return ()
        if found.state == "unmeasured":
            return ("slow: not known",)
        if found.state != "none":
            return found.words
        if self.verdict in NOT_MOVING:
            return ()
        paces = [one.pace for one in self.node_progress if one.pace is not None]
        compared = [pace.iteration for pace in paces if pace.times_usual is not None]
        return (f"none slow ({len(compared)} compared, iteration {max(compared):,})",)

    @property
    def cares(self) -> tuple[AlertCare, ...]:
        """Who looks after what was found: what no one was told of yet, then the open alerts."""
        return (*self.untold, *(alert.care for alert in self.alerts or ()))

    def age(self, moment: float) -> float:
        """Seconds since a moment, by the clock of the look; a moment that is still to come has
        none.
        """
        return max(0.0, self.time - moment)

    def reason_unknown(self, name: str) -> str | None:
        """Why it could not be observed, by its name in the lines of `unknown`; None for what was."""
        return next(
            (line.partition(": ")[2] for line in self.unknown if name in unknown_names(line)), None
        )

    def command(self, words: str) -> str:
        """A command of tr11 for this very run, as a person would type it."""
        return command_for(self.card.name, words)

    def document(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        values: dict[str, Any] = {"schema": SCHEMA}
        for name in self.__struct_fields__:
            if name == "finish":
                values["remaining_seconds"] = self.remaining_seconds
                if self.finish is None:
                    values["eta"] = None
                else:
                    values["eta"] = iso_time(self.finish.earliest)
            value, shown = getattr(self, name), _SHOWN.get(name, _fields)
            if isinstance(value, tuple):
                values[name] = [shown(entry, self) for entry in value]
            elif value is None:
                values[name] = None
            else:
                values[name] = shown(value, self)
        return {name: _plain(value) for name, value in values.items()}


def unknown_names(line: str) -> list[str]:
    """What a line of `unknown` is about: "jobs, nodes: why" is about two observations."""
    return line.partition(": ")[0].split(", ")


def step_values(step: MeasuredStep) -> dict[str, Any]:
    """What the status holds of the last step, by the names of its fields."""
    return {
        "loss": finite(step.lm_loss),
        "loss_is_finite": step.loss_is_finite,
        "grad_norm": finite(step.grad_norm),
        "learning_rate": finite(step.learning_rate),
        "global_batch_size": step.global_batch_size,
        "consumed_samples": step.consumed_samples,
        "consumed_tokens": step.consumed_tokens,
    }


def losses_of(course: LossCourse | None) -> tuple[float, ...]:
    """The means as numbers to draw; what was none is NaN."""
    if course is None:
        return ()
    return tuple(math.nan if mean is None else mean for mean in course.means)


# ----------------------------------------------------------------------------- the keys of each
# record
def _fields(value: Any, status: Status) -> Any:
    """A record whose keys are its fields; what is no record stays."""
    if isinstance(value, Record):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    return value


def _moment(value: float | None, status: Status) -> str | None:
    return iso_time(value)


def _job(job: Job, status: Status) -> dict[str, Any]:
    return {
        "id": job.job_id,
        "raw_id": job.raw_id,
        "state": job.state,
        "reason": job.reason or None,
        "nodes": job.nodes,
        "node_count": len(job.nodes) or job.node_count,
        "tasks": tasks_of(job),
        "start": iso_time(job.start_time),
        "end": iso_time(job.end_time),
        "time_limit_seconds": job.time_limit_seconds,
        "exit_code": job.exit_code,
        "derived_exit_code": job.derived_exit_code,
        "user": job.user,
    }


def tasks_of(job: Job) -> int:
    """How many tasks of an array wait as this one job; 1 for any other."""
    return max(1, len(job.pending_tasks))


def _throughput(rate: Throughput, status: Status) -> dict[str, Any]:
    return {**_fields(rate, status), "percent": rate.percent}


def _finish(finish: Finish, status: Status) -> dict[str, Any]:
    moments = {"earliest": iso_time(finish.earliest), "likely": iso_time(finish.likely)}
    return {**_fields(finish, status), **moments}


def _attempt(shown: ShownAttempt, status: Status) -> dict[str, Any]:
    attempt, end = shown.attempt, shown.end
    return {
        "id": shown.label,
        "raw_id": attempt.job_id,
        "start": iso_time(attempt.start),
        "changes": attempt.changes,
        "end_marker": None if end is None else _end_marker(end),
        "changed": iso_time(attempt.changed),
        "how": shown.how,
        "is_bad": shown.is_bad,
        "code": None if attempt.code is None else _code(attempt.code),
        "versions": attempt.versions or None,
        "is_told": attempt.is_told,
    }


def _end_marker(end: EndMarker) -> dict[str, Any]:
    return {
        "reason": end.reason,
        "iteration": end.iteration,
        "checkpoint_step": end.checkpoint_step,
        "restart": end.restart,
        "message": end.message,
        "time": iso_time(end.time),
    }


def _code(code: CodeIdentity) -> dict[str, Any]:
    return {
        "commit": code.commit or None,
        "branch": code.branch or None,
        "folder": code.folder or None,
        "changed_files": code.changed_count,
        "digest": code.digest or None,
        "patch": code.patch or None,
        "why": code.why or None,
        "text": str(code),
    }


def _node_progress(node: NodeProgress, status: Status) -> dict[str, Any]:
    pace = node.pace
    return {
        "node": node.node,
        "job": node.job,
        "ranks": node.ranks,
        "iteration": node.iteration,
        "phase": node.phase or None,
        "silent_seconds": node.silent_seconds,
        "step_seconds": None if pace is None else pace.seconds,
        "times_usual": None if pace is None else pace.times_usual,
        "slowest_rank": None if pace is None else pace.rank,
        "measured_at": None if pace is None else pace.iteration,
        "is_slow": node.is_slow,
        "is_spare": node.is_spare,
    }


def _next_checkpoint(save: NextCheckpoint, status: Status) -> dict[str, Any]:
    due = None
    if save.seconds is not None:
        due = iso_time(status.time + save.seconds)
    return {**_fields(save, status), "due": due}


def _copy(copy: CopyStatus, status: Status) -> dict[str, Any]:
    return {
        "time": iso_time(copy.time),
        "age_seconds": status.age(copy.time),
        "step": copy.step,
        "message": copy.message or None,
    }


def _running_copy(copy: RunningCopy, status: Status) -> dict[str, Any]:
    return {**_fields(copy, status), "since": iso_time(copy.since)}


def _drill(drill: DrillRecord, status: Status) -> dict[str, Any]:
    return {
        "time": iso_time(drill.time),
        "age_seconds": status.age(drill.time),
        "archive": drill.archive,
        "step": drill.step,
        "passed": drill.passed,
        "message": drill.message or None,
    }


def _stop_file(stop: StopFile, status: Status) -> dict[str, Any]:
    switch = stop.switch
    return {
        "set": switch is not None,
        "path": stop.path,
        "who": (switch.who or None) if switch else None,
        "time": iso_time(switch.time) if switch else None,
        "why": (switch.why or None) if switch else None,
    }


def _hold(hold: HoldRecord, status: Status) -> dict[str, Any]:
    return {
        "job": hold.job,
        "who": hold.who or None,
        "time": iso_time(hold.time),
        "why": hold.why or None,
    }


def _exclusion(entry: Exclusion, status: Status) -> dict[str, Any]:
    return {
        "node": entry.node,
        "why": entry.why,
        "owner": entry.owner,
        "until": iso_time(entry.until),
        "state": entry.state,
    }


def _alert(alert: Alert, status: Status) -> dict[str, Any]:
    return {
        "fingerprint": alert.fingerprint,
        "incident": alert.incident,
        "detector": alert.detector,
        "subject": alert.subject,
        "severity": alert.severity.name.lower(),
        "title": alert.title,
        "since": iso_time(alert.start),
        "owner": alert.owner or None,
        "acknowledged_by": alert.acknowledged_by or None,
        "snoozed_until": iso_time(alert.snoozed_until),
        "told": list(alert.told),
        "found": not alert.clear_looks,
        "closes": iso_time(alert.closes),
        "runbook": alert.runbook or None,
        "watchdog": alert.watchdog or None,
    }


def _untold(care: AlertCare, status: Status) -> dict[str, Any]:
    return {"subject": care.subject, "looks": iso_time(care.closes), "told": None}


def _on_call(on_call: OnCall, status: Status) -> dict[str, Any]:
    moments = {"until": iso_time(on_call.until), "taken": iso_time(on_call.taken)}
    return {**_fields(on_call, status), **moments}


def _periodic_job(shown: ShownPeriodicJob, status: Status) -> dict[str, Any]:
    job = shown.job
    return {
        "name": job.name,
        "way": job.way,
        "host": job.host,
        "started": iso_time(job.started),
        "ended": iso_time(job.ended),
        "exit_code": job.exit_code,
        "message": job.message or None,
        "interval_seconds": job.interval_seconds,
        "next_due": iso_time(job.next_due),
        "late": shown.late,
        "failures_in_a_row": job.failures_in_a_row,
        "wanted": shown.wanted,
    }


def _chain(chain: ChainState, status: Status) -> dict[str, Any]:
    return {"name": chain.name, "job_id": chain.job_id, "next_due": iso_time(chain.next_due)}


def _filesystem(shown: ShownFilesystem, status: Status) -> dict[str, Any]:
    usage, rule = shown.usage, shown.rule
    return {
        "name": usage.name,
        "source": usage.source,
        "path": usage.path or None,
        "time": iso_time(usage.time),
        "bytes_percent": usage.percent("bytes"),
        "inodes_percent": usage.percent("inodes"),
        "bytes_free": usage.bytes_free,
        "full_at": iso_time(shown.full_at),
        "bytes_bound_percent": rule.bytes_percent,
        "inodes_bound_percent": rule.inodes_percent,
    }


def _relaunch(end: LaunchEnd, status: Status) -> dict[str, Any]:
    return {
        "job": end.job_id,
        "launch": end.launch + 1,
        "ended": iso_time(end.time),
        "why": end.why or None,
        "decision": end.decision or None,
    }


def _leaving_node(node: Node, status: Status) -> dict[str, Any]:
    return {"node": node.name, "states": sorted(node.states), "why": node.reason}


def _origin(origin: BranchOrigin, status: Status) -> dict[str, Any]:
    return {
        "run": origin.run or None,
        "step": origin.step,
        "folder": origin.folder,
        "weights_alone": origin.takes_weights,
        "counters_from_zero": origin.is_fresh,
        "time": iso_time(origin.time),
        "before": origin.before,
        "text": origin.lineage,
    }


def _trainer(standing: TrainerStanding, status: Status) -> dict[str, Any]:
    return {**_fields(standing, status), "text": str(standing)}


# what stands under a key, of which record; of others the keys are the fields
_SHOWN: Mapping[str, Callable[[Any, Status], Any]] = {
    "time": _moment,
    "verdict_since": _moment,
    "jobs": _job,
    "last_step_time": _moment,
    "throughput": _throughput,
    "finish": _finish,
    "last_attempts": _attempt,
    "next_checkpoint": _next_checkpoint,
    "backup": _copy,
    "sync": _copy,
    "copying": _running_copy,
    "restore_drill": _drill,
    "kill_switch": _stop_file,
    "pause": _stop_file,
    "holds": _hold,
    "exclusions": _exclusion,
    "alerts": _alert,
    "untold": _untold,
    "on_call": _on_call,
    "periodic_jobs": _periodic_job,
    "chains": _chain,
    "filesystems": _filesystem,
    "relaunches": _relaunch,
    "leaving_nodes": _leaving_node,
    "node_progress": _node_progress,
    "origin": _origin,
    "trainer": _trainer,
}


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case float():
            return finite(value)
        case tuple() | list():
            return [_plain(entry) for entry in value]
        case dict():
            return {key: _plain(entry) for key, entry in value.items()}
    return value
