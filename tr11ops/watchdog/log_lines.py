"""The lines that a pulse appends to the run's log: the original's, to the letter, and what the
original could not see.

The original's watchdog printed one line for each job in the queue, and an alert where there was
none. People and programs that follow the log know these lines, unbalanced parentheses included.
After them come lines of the same form for what a queue alone does not tell. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum

from tr11ops.base.invocation import for_card
from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import plain
from tr11ops.cluster.arrays import nodes_text
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Finding, Severity
from tr11ops.observe.liveness import has_lost_its_host, is_zombie
from tr11ops.observe.snapshot import Snapshot
from tr11ops.watchdog.verdict import Verdict, VerdictWord
from trainer.contract.record import Record

ALERT, QUEUED = "PULSE: ***ALERT: ", "' partition"  # what tells the queue's lines
ALERT_SECONDS = 3600.0  # from one line of an alert to the next
SCHEDULED_FORMAT = "%Y-%m-%dT%H:%M:%S"  # as squeue writes a time


class State(StrEnum):
    """What a run is, finer than its verdict: what the person on call does differs."""

    RUNNING = "running"
    STARTING = "starting"
    QUEUED = "queued"
    DOWN = "down"
    HELD = "held"
    DEAD_CHAIN = "dead chain"
    HUNG = "hung"
    STALLED = "stalled"
    HALF_DEAD = "half-dead"
    ZOMBIE = "zombie"
    LINGERING = "lingering"
    SUSPENDED = "suspended"
    TWO_TRAINERS = "two trainers"
    CONTROLLER_AWAY = "controller away"
    STOPPED = "stopped"
    PAUSED = "paused"
    FINISHED = "finished"
    UNKNOWN = "unknown"


class Remark(Record):
    """One thing that the queue's lines do not tell, and why it is so."""

    state: State
    text: str


GRAVE = {
    "zombie": State.ZOMBIE,
    "two-attempts": State.TWO_TRAINERS,
    "hung": State.HUNG,
    "stalled": State.STALLED,
    "suspended": State.SUSPENDED,
    "lingering": State.LINGERING,
}
OF_THE_QUEUE = {"dead-chain": State.DEAD_CHAIN, "held": State.HELD}
OF_WORD = {
    VerdictWord.HEALTHY: State.RUNNING,
    VerdictWord.SLOW: State.RUNNING,
    VerdictWord.AT_RISK: State.RUNNING,
    VerdictWord.STARTING: State.STARTING,
    VerdictWord.QUEUED: State.QUEUED,
    VerdictWord.DOWN: State.DOWN,
    VerdictWord.STALLED: State.STALLED,
    VerdictWord.STOPPING: State.STOPPED,
    VerdictWord.STOPPED: State.STOPPED,
    VerdictWord.FINISHED: State.FINISHED,
    VerdictWord.UNKNOWN: State.UNKNOWN,
}


# ----------------------------------------------------------------------------- what the queue does
# not tell
def remarks(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict, pause: Observed[str]
) -> tuple[Remark, ...]:
    """Everything that a look at the queue alone takes for running or waiting; the most severe
    first.
    """
    return tuple(dict.fromkeys(_remarks(snapshot, findings, verdict, pause)))


def _remarks(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict, pause: Observed[str]
) -> Iterator[Remark]:
    if isinstance(snapshot.jobs, Unknown):
        yield Remark(State.CONTROLLER_AWAY, verdict.why)
    elif verdict.word is VerdictWord.UNKNOWN:
        yield Remark(State.UNKNOWN, verdict.why)
    yield from _of_detectors(findings, GRAVE)
    yield from _half_dead(snapshot, findings)
    if verdict.word.is_stop or verdict.word is VerdictWord.FINISHED:
        yield Remark(OF_WORD[verdict.word], verdict.why)
    if isinstance(pause, str) and pause:
        yield Remark(State.PAUSED, f"paused by {pause}: nothing starts before `tr11 resume`")
    yield from _of_detectors(findings, OF_THE_QUEUE)


def _of_detectors(findings: tuple[Finding, ...], wanted: Mapping[str, State]) -> Iterator[Remark]:
    """The findings of these detectors in their order, the first one of each subject: a zombie is no
    news as stalled.
    """
    reported: set[str] = set()
    for name, state in wanted.items():
        for finding in findings:
            if (
                finding.detector == name
                and finding.severity > Severity.INFO
                and finding.subject not in reported
            ):
                reported.add(finding.subject)
                yield Remark(state, finding.title)


def _half_dead(snapshot: Snapshot, findings: tuple[Finding, ...]) -> Iterator[Remark]:
    """The scheduler has lost a node of a job that lives on."""
    lost = {
        finding.subject: finding
        for finding in reversed(findings)
        if finding.detector == "node-lost"
    }
    for job in snapshot.active_jobs:
        if is_zombie(snapshot, job):
            continue
        if job.job_id in lost:
            yield Remark(State.HALF_DEAD, f"{lost[job.job_id].title}; the allocation lives")
        elif has_lost_its_host(snapshot, job):
            yield Remark(
                State.HALF_DEAD, f"job {job.job_id} has lost its batch host, and its trainers live"
            )


def state_of(verdict: Verdict, reported: tuple[Remark, ...]) -> State:
    """The one word: the most severe remark that explains the verdict, else the verdict's own."""
    if reported:
        return reported[0].state
    return OF_WORD[verdict.word]


# ----------------------------------------------------------------------------- the lines
def prefix(time: float, zone: tzinfo | None = None) -> str:
    """`[2022-05-01 03:56:11] PULSE:`, in local time unless a zone is given."""
    return f"[{_stamp(time, zone):%Y-%m-%d %H:%M:%S}] PULSE:"


def queue_lines(
    snapshot: Snapshot, verdict: Verdict, zone: tzinfo | None = None
) -> tuple[str, ...]:
    """The original's lines: one for each job in the queue, or its alert. None where the queue could
    not be seen.
    """
    if isinstance(snapshot.jobs, Unknown):
        return ()
    head = f"{prefix(snapshot.time, zone)} "
    name = snapshot.run.name
    living = [job for job in snapshot.jobs if job.state is JobState.PENDING or job.state.is_active]
    if not living and verdict.word is VerdictWord.DOWN:
        return (f"{head}***ALERT: {name} is not RUNNING or SCHEDULED! Alert someone at Eng WG***",)
    return tuple(head + _job_line(name, job, snapshot.time, zone) for job in living)


def lines(
    snapshot: Snapshot,
    verdict: Verdict,
    reported: tuple[Remark, ...],
    records: tuple[str, ...] = (),
    zone: tzinfo | None = None,
) -> tuple[str, ...]:
    """All lines of a pulse: the queue's, the remarks, and what was done or would be."""
    head = f"{prefix(snapshot.time, zone)} {snapshot.run.name}"
    own = [f"{head} is {remark.state.upper()}: {remark.text}" for remark in reported]
    if not own and verdict.word is VerdictWord.DOWN and snapshot.pending_jobs:
        own = [f"{head} is DOWN: {verdict.why}"]
    return tuple(
        # what came from a file may begin no line of its own
        plain(for_card(snapshot.run.card, line), unicode=True)
        for line in (
            *queue_lines(snapshot, verdict, zone),
            *own,
            *(f"{head}: {record}" for record in records),
        )
    )


def without_told_alert(
    texts: tuple[str, ...], written: Sequence[str], now: float
) -> tuple[str, ...]:
    """A pulse's lines without the original's alert, where that is the last of what the log tells of the
    queue and less than an hour old: the original looked hourly, and a watchdog that looks every few
    seconds would bury the cause. `written`: the log's last lines.
    """
    queue = [line for line in written if ALERT in line or QUEUED in line]
    if not queue or ALERT not in queue[-1] or queue[-1] < prefix(now - ALERT_SECONDS):
        return texts
    return tuple(text for text in texts if ALERT not in text)


_STATES = {  # that the original did not know
    JobState.SUSPENDED: "is suspended, and was started",
    JobState.COMPLETING: "is leaving its nodes, and was started",
    JobState.CONFIGURING: "gets its nodes ready, and was started",
}


def _job_line(name: str, job: Job, now: float, zone: tzinfo | None) -> str:
    if job.start_time is None:
        start = "N/A"
    else:
        start = f"{_stamp(job.start_time, zone):{SCHEDULED_FORMAT}}"
    place = f"{job.job_id} on '{job.partition}' partition"
    if job.state is JobState.RUNNING:
        elapsed = _elapsed(0.0 if job.start_time is None else now - job.start_time)
        return f"{name} is running for {elapsed} since {start} ({place} ({nodes_text(job.nodes)})"
    if job.state is not JobState.PENDING:
        state = _STATES.get(job.state, "is unknown - fix me:")
        return (
            f"{name} {state} (at {start}) ({place}) ({nodes_text(job.nodes) or f'({job.reason})'})"
        )
    if job.start_time is not None:
        delta = timedelta(seconds=math.floor(job.start_time - now))
        return f"{name} is scheduled to start in {delta} (at {start}) ({place})"
    if job.reason == "JobArrayTaskLimit":
        return f"{name} is waiting for the previous Job Array job to finish before scheduling a new one ({place})"
    if job.reason == "Dependency":
        mechanism = "using the dependency mechanism"
        return f"{name} is waiting for the previous job to finish before scheduling a new one {mechanism} ({place})"
    return f"{name} is waiting to be scheduled ({place})"


def _elapsed(seconds: float) -> str:
    """As squeue writes it: `0:12`, `1:02:03`, `4-01:02:03`."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}:{second:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{second:02d}"
    return f"{minutes}:{second:02d}"


def _stamp(time: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(time, zone)
