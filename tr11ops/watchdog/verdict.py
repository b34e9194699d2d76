"""The one word about a run, and the sentence that says why. Pure: a function of what was seen and
what was found.

RUNNING is not alive, PENDING is not waiting, silence is not absence.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.pending_reasons import Cause, JobReason, Wait, held_words, reason_of_job
from tr11ops.detect.detector import (
    STANDS_STILL,
    Finding,
    Severity,
    by_cause,
    first_cause,
    slow_by_cause,
)
from tr11ops.observe import derived
from tr11ops.observe.forecast import Throughput
from tr11ops.observe.jobs import misplaced
from tr11ops.observe.liveness import (
    ENDED_PHASE,
    Liveness,
    batch_host,
    has_lost_its_host,
    hidden_life,
    last_launch_end,
    liveness_of,
    liveness_outside,
    silent_host,
    to_be_relaunched,
)
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from trainer.contract.attempt import BAD_REASONS
from trainer.contract.record import Record

FAR_START_SECONDS = 15 * 60.0  # a start that is expected sooner is no news


class VerdictWord(StrEnum):
    """What a run is, as the person on call needs it."""

    HEALTHY = "healthy"
    SLOW = "slow"  # it trains, and takes longer than it has to; that may wait for the morning
    AT_RISK = "at risk"  # it trains, and what was found will not wait for the morning
    STARTING = "starting"
    QUEUED = "queued"
    STALLED = "stalled"
    DOWN = "down"
    STOPPING = "stopping"  # someone stopped it, and a job still saves, or leaves its nodes
    STOPPED = "stopped"
    FINISHED = "finished"
    UNKNOWN = "unknown"

    @property
    def is_stop(self) -> bool:
        """Whether someone has stopped it, whatever still leaves."""
        return self in {VerdictWord.STOPPING, VerdictWord.STOPPED}


EXIT_CODES = {
    VerdictWord.AT_RISK: 1,
    VerdictWord.STALLED: 1,
    VerdictWord.DOWN: 1,
    VerdictWord.UNKNOWN: 3,
}


TRAINING = frozenset({VerdictWord.HEALTHY, VerdictWord.SLOW, VerdictWord.AT_RISK})
MOVING = TRAINING | {VerdictWord.STARTING}


class Verdict(Record):
    """The word, and one sentence of why, without a full stop. `is_critical`: some finding of the
    look is.
    """

    word: VerdictWord
    why: str
    is_critical: bool = False

    @property
    def exit_code(self) -> int:
        """0: no one needs to get up; 1: a person is needed; 3: it could not be observed."""
        return EXIT_CODES.get(self.word, int(self.is_critical))


def judge(
    snapshot: Snapshot, findings: tuple[Finding, ...], speed: Throughput | None = None
) -> Verdict:
    """The verdict. `findings` are those of `detect_all` for the same snapshot; `speed`: against the
    run's best, where that was looked at.
    """
    found = _with_what_costs_time(_judged(snapshot, findings), findings, speed)
    return _with_what_is_critical(found, findings)


def _with_what_costs_time(
    verdict: Verdict, findings: tuple[Finding, ...], speed: Throughput | None
) -> Verdict:
    """A run that trains and is slow is not called healthy: its reason begins with what makes it slow."""
    slow = slow_by_cause(findings)
    if verdict.word is not VerdictWord.HEALTHY or not slow:
        return verdict
    first = slow[0]
    said = [first.title]
    if first.subject and first.evidence:
        said = [f"{first.title} ({first.evidence[0]})"]
    if speed is not None and speed.is_slow:
        said.append(f"the training runs at {speed.percent:.0f} % of its best")
    return Verdict(VerdictWord.SLOW, "; ".join(said))


def with_severity_of(verdict: Verdict, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings as mails and screens show them: where a person must get up and none of them is
    critical, the fault that the run stands still for is, so that no mail calls a lesser thing what
    status says not to sleep for.
    """
    if verdict.exit_code != 1 or any(one.severity is Severity.CRITICAL for one in findings):
        return findings
    for place, finding in enumerate(findings):
        if finding.severity is Severity.WARNING and finding.detector in STANDS_STILL:
            raised = replace(finding, severity=Severity.CRITICAL)
            return (raised, *findings[:place], *findings[place + 1 :])
    return findings


def with_what_resumes(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict
) -> tuple[Finding, ...]:
    """The findings of a stopped run that needs a person: the last of the critical ones says too what lets it
    go on, for nothing does so when their commands have helped.
    """
    critical = [one for one in by_cause(findings) if one.severity is Severity.CRITICAL]
    if not verdict.word.is_stop or snapshot.run.is_watched or not critical:
        return findings
    last = critical[-1].fingerprint
    return tuple(
        replace(one, then=(*one.then, *derived.go_on(snapshot, behind=True)))
        if one.fingerprint == last
        else one
        for one in findings
    )


def main_fault(verdict: Verdict, findings: tuple[Finding, ...]) -> str:
    """The fault that an act on the run would be about: the gravest that is critical, costs time, or is why the
    verdict is what it is; "" where none is. Another warning is no one's reason to stop a run.
    """
    for finding in by_cause(findings):
        is_why = finding.title in verdict.why and finding.severity is not Severity.INFO
        if is_why or finding.costs_time or finding.severity is Severity.CRITICAL:
            return finding.title
    return ""


def _with_what_is_critical(verdict: Verdict, findings: tuple[Finding, ...]) -> Verdict:
    """The word, its reason and the exit code agree: no run is called healthy that a person must get
    up for.
    """
    critical = next(
        (finding for finding in by_cause(findings) if finding.severity is Severity.CRITICAL), None
    )
    if critical is None:
        return verdict
    word = VerdictWord.AT_RISK if verdict.word in TRAINING else verdict.word
    is_said = word in {VerdictWord.STALLED, VerdictWord.DOWN, VerdictWord.UNKNOWN}
    if is_said or critical.title in verdict.why:
        why = verdict.why
    else:
        why = f"{critical.title}; {verdict.why}"
    return Verdict(word, why, is_critical=True)


def _judged(snapshot: Snapshot, findings: tuple[Finding, ...]) -> Verdict:
    if isinstance(snapshot.jobs, Unknown):
        return _without_scheduler(snapshot, snapshot.jobs.why)
    if snapshot.unmounted:
        return Verdict(VerdictWord.UNKNOWN, snapshot.unmounted)
    active = snapshot.active_jobs
    if active:
        return _of_active(snapshot, findings, active)
    outside = liveness_outside(snapshot)
    if outside is not None:
        where = f"{outside.phase} outside the scheduler, as {outside.job_id}"
        return Verdict(VerdictWord.HEALTHY, f"{where}; {_seen(snapshot, outside)}")
    pending = snapshot.pending_jobs
    if pending:
        found = _of_pending(snapshot, pending)
    else:
        found = _of_nothing(snapshot)
    cause = ""
    if found.word is VerdictWord.DOWN:
        cause = _cause_of_standstill(findings)
    if cause:
        return replace(found, why=f"{cause}; {found.why}")
    return found


def _cause_of_standstill(findings: tuple[Finding, ...]) -> str:
    """The fault that nothing runs for, in words; "" where none is known."""
    for finding in findings:
        cause = first_cause(finding, findings)
        if finding.detector in {"down", "held"} and cause is not finding:
            return cause.title
    return ""


def _without_scheduler(snapshot: Snapshot, why: str) -> Verdict:
    liveness = liveness_of(snapshot, None)
    marker = derived.last_marker(snapshot)
    over = marker is not None and (
        liveness is None or marker.time >= liveness.time or liveness.phase == ENDED_PHASE
    )
    if over and marker is not None and derived.is_finished(snapshot):
        return Verdict(
            VerdictWord.FINISHED,
            f"all {marker.iteration} iterations are trained (scheduler unreachable: {why})",
        )
    if (
        not over
        and liveness is not None
        and liveness.phase != ENDED_PHASE
        and liveness.is_fresh(snapshot.time)
    ):
        word = VerdictWord.STARTING if liveness.phase in STARTING_PHASES else VerdictWord.HEALTHY
        return Verdict(
            word, f"{liveness.phase}, {_seen(snapshot, liveness)}; scheduler unreachable: {why}"
        )
    if liveness is None:
        seen = "no sign of life to go by"
    else:
        seen = _seen(snapshot, liveness)
    return Verdict(VerdictWord.UNKNOWN, f"scheduler unreachable: {why}; {seen}")


STALLING = {
    "hung",
    "stalled",
    "suspended",
    "lingering",
    "zombie",
    "two-attempts",
    "node-lost",
    "kill-switch-left-on",
}
STARTING_PHASES = {"starting", "loading", "compiling"}
ENDED_SECONDS = 30.0  # from the end of the workers to the next launch, or to the end of the job


def _of_active(
    snapshot: Snapshot, findings: tuple[Finding, ...], active: tuple[Job, ...]
) -> Verdict:
    stalling = next((finding for finding in findings if _stalls(finding)), None)
    if stalling is not None:
        return Verdict(VerdictWord.STALLED, first_cause(stalling, findings).title)
    running = [job for job in active if job.state is JobState.RUNNING]
    job = max(running or active, key=lambda job: job.start_time or 0.0)
    on = f"job {job.job_id} on {_nodes(job)}"
    if has_lost_its_host(snapshot, job):
        return _without_host(snapshot, job, on)
    marker = derived.marker_of(snapshot, derived.identifiers(job))
    liveness = liveness_of(snapshot, job)
    ended = marker is not None and (
        liveness is None or liveness.time <= marker.time or liveness.phase == ENDED_PHASE
    )
    over = to_be_relaunched(snapshot, job)
    if ended and over is not None:
        return Verdict(VerdictWord.STARTING, f"{on}: {over.decision or over.why}")
    last = last_launch_end(snapshot, job)
    if marker is None and last is not None and last.is_last:
        return _leaving(snapshot, job, last.decision)
    if ended or job.state is JobState.COMPLETING:
        return _leaving(snapshot, job, marker.reason if marker is not None else "no end marker yet")
    if isinstance(snapshot.kill_switch, KillSwitch):
        return Verdict(
            VerdictWord.STOPPING,
            f"{_stop(snapshot, snapshot.kill_switch)}; {on} {_leaves(snapshot)}",
        )
    if liveness is None:
        return _no_liveness(snapshot, job, on)
    return _alive(snapshot, job, liveness, on)


def _without_host(snapshot: Snapshot, job: Job, on: str) -> Verdict:
    """Whether its trainers live or not: no script is left to start them again, or to end the job."""
    liveness = liveness_of(snapshot, job)
    if liveness is None:
        seen = "no sign of life"
    else:
        seen = f"{liveness.phase}, {_seen(snapshot, liveness)}"
    return Verdict(
        VerdictWord.STALLED, f"{on} has lost its batch host {batch_host(snapshot, job)}: {seen}"
    )


def _alive(snapshot: Snapshot, job: Job, liveness: Liveness, on: str) -> Verdict:
    hidden = hidden_life(snapshot)
    if hidden and not liveness.is_fresh(snapshot.time):
        return Verdict(
            VerdictWord.UNKNOWN,
            f"{on} is RUNNING, {_seen(snapshot, liveness)}, and more cannot be seen: {hidden}",
        )
    if liveness.phase in STARTING_PHASES:
        return Verdict(VerdictWord.STARTING, f"{on}: {liveness.phase}, {_seen(snapshot, liveness)}")
    at = ""
    if liveness.iteration is not None:
        at = f" at iteration {liveness.iteration}"
    if liveness.phase == ENDED_PHASE:
        ended = f"{on}: its workers have ended{at} without a word, {_seen(snapshot, liveness)}"
        host = silent_host(snapshot, job)
        lack = ""
        if host:
            lack = f"{host}, which runs its batch script, does not answer the scheduler"
        if liveness.silent_for(snapshot.time) > ENDED_SECONDS:
            return Verdict(VerdictWord.STALLED, "; ".join(filter(None, (lack, ended))))
        if lack:
            return Verdict(
                VerdictWord.UNKNOWN, f"{ended}; {lack}, so that nothing may start them again"
            )
        return Verdict(VerdictWord.STARTING, ended)
    return Verdict(VerdictWord.HEALTHY, f"{on}: {liveness.phase}{at}, {_seen(snapshot, liveness)}")


def _stalls(finding: Finding) -> bool:
    """Whether a finding means that the nodes are held for nothing, or worse, although a job is
    running.
    """
    return finding.severity is Severity.CRITICAL and finding.detector in STALLING


def _leaves(snapshot: Snapshot) -> str:
    """What a job does that has been asked to stop."""
    standing = snapshot.run.standing
    if standing is not None and standing.saves_when_asked is False:
        return "leaves after its next checkpoint"
    if standing is not None and standing.saves_when_asked is None:
        return "is asked to save and leave"
    return "is saving and leaving"


def _leaving(snapshot: Snapshot, job: Job, reason: str) -> Verdict:
    if derived.is_finished(snapshot):
        return Verdict(
            VerdictWord.FINISHED, f"the training is finished; job {job.job_id} is leaving its nodes"
        )
    stop = derived.stop_of(snapshot)
    if isinstance(stop, KillSwitch):
        return Verdict(
            VerdictWord.STOPPING, f"{_stop(snapshot, stop)}; job {job.job_id} is leaving its nodes"
        )
    hidden = _hidden_end(snapshot)
    if hidden:
        return Verdict(
            VerdictWord.UNKNOWN,
            f"job {job.job_id} is leaving its nodes; finished, stopped or down? {hidden}",
        )
    sure, waiting = derived.sure_jobs(snapshot), derived.startable_jobs(snapshot)
    if sure or waiting:
        if sure:
            what = f"job {sure[0].job_id} comes next"
        else:
            first = waiting[0]
            what = f"job {first.job_id} waits: {derived.why_not_starting(snapshot, first)}"
        leaves = f"job {job.job_id} is leaving its nodes ({reason})"
        return Verdict(VerdictWord.QUEUED, f"{leaves}; {what}")
    return Verdict(
        VerdictWord.DOWN,
        f"job {job.job_id} is leaving its nodes ({reason}) and nothing is queued behind it",
    )


def _no_liveness(snapshot: Snapshot, job: Job, on: str) -> Verdict:
    if job.state is JobState.CONFIGURING:
        return Verdict(VerdictWord.STARTING, f"{on} gets its nodes ready")
    hidden = hidden_life(snapshot)
    if hidden or snapshot.read_errors:
        why = hidden or snapshot.read_errors[0]
        return Verdict(
            VerdictWord.UNKNOWN, f"{on} is RUNNING, but whether it trains cannot be seen: {why}"
        )
    if job.start_time is None:
        return Verdict(
            VerdictWord.UNKNOWN,
            f"{on} is RUNNING without a sign of life, and when it started is not known",
        )
    # since when is said beside it: by each screen with its own clock, of the word and of the job
    return Verdict(VerdictWord.STARTING, f"{on} has started; no sign of life yet")


def _of_pending(snapshot: Snapshot, pending: tuple[Job, ...]) -> Verdict:
    waiting = derived.startable_jobs(snapshot)
    if derived.is_finished(snapshot):
        return Verdict(
            VerdictWord.FINISHED,
            f"the training is finished; job {(waiting or pending)[0].job_id} is still queued",
        )
    switch = derived.stop_of(snapshot)
    if isinstance(switch, KillSwitch):
        queued = "will leave at once" if waiting else "is held"
        if waiting and snapshot.time - (switch.time or 0.0) < derived.HOLDING_SECONDS:
            queued = "is being held"
        return Verdict(VerdictWord.STOPPED, f"{_stop(snapshot, switch)}; what is queued {queued}")
    hidden = _hidden_end(snapshot)
    if hidden:
        fate = f"job {pending[0].job_id} is queued"
        if pending[0].reason:
            fate += f" ({pending[0].reason})"
        return Verdict(
            VerdictWord.UNKNOWN, f"nothing runs now; {fate}; finished, stopped or waiting? {hidden}"
        )
    if not waiting:
        waits = [_waits_for_a_person(snapshot, job) for job in _first(pending)[:2]]
        return Verdict(VerdictWord.DOWN, "; ".join(waits))
    marker = derived.last_marker(snapshot)
    older = marker is not None and all((job.submit_time or 0.0) < marker.time for job in waiting)
    if marker is not None and marker.reason == "refused" and older:
        return Verdict(
            VerdictWord.DOWN,
            f"the last attempt refused its input, and so will the queued ones: {marker.message}",
        )
    tasks = derived.queued_tasks(waiting)
    count = ""
    if tasks > 1:
        count = f" ({tasks} tasks)"
    closed = derived.closed_by_site(snapshot)
    first = waiting[0]
    if closed is not None:
        first = _first(waiting)[0]
    reason = _waits(first, closed)
    start = _expected_start(first, snapshot.time)
    return Verdict(
        VerdictWord.QUEUED, f"nothing runs now; job {first.job_id}{count} waits{reason}{start}"
    )


def _waits(job: Job, closed: JobReason | None) -> str:
    """What a queued job waits for, behind "waits"; `closed`: why the site lets nothing start."""
    row = reason_of_job(job)
    if row.wait is Wait.SITE:
        return f" for the site: {_why(job)}"
    if closed is not None:  # the scheduler's reason is another, and does not tell it
        return f" for the site: {closed.meaning}"
    if not job.reason:
        return ""
    return f": {_why(job) if row.cause is Cause.LIMIT else job.reason}"


def _expected_start(job: Job, now: float) -> str:
    """When the scheduler expects it to start; "" where it does not say so, or soon."""
    if job.start_time is None or job.start_time - now < FAR_START_SECONDS:
        return ""
    return f", expected to start in {duration(job.start_time - now)}"


def _waits_for_a_person(snapshot: Snapshot, job: Job) -> str:
    lacks = misplaced(snapshot, job)
    if job.reason.startswith("JobHeld") and not lacks:
        return held_words(job)
    return f"job {job.job_id} waits for a person ({lacks or _why(job)})"


def _first(pending: tuple[Job, ...]) -> list[Job]:
    """The jobs that stand in the way before those that only wait behind them."""
    return sorted(pending, key=lambda job: reason_of_job(job).wait is Wait.PASSES)


def _why(job: Job) -> str:
    """The scheduler's reason, and what it means."""
    if job.reason:
        return f"{job.reason}: {reason_of_job(job).meaning}"
    return reason_of_job(job).meaning


def _of_nothing(snapshot: Snapshot) -> Verdict:
    if derived.is_finished(snapshot):
        done = derived.iteration(snapshot)
        at = ""
        if done is not None:
            at = f" at iteration {done}"
        return Verdict(VerdictWord.FINISHED, f"the training is finished{at}")
    switch = derived.stop_of(snapshot)
    if isinstance(switch, KillSwitch):
        return Verdict(VerdictWord.STOPPED, _stop(snapshot, switch))
    hidden = _hidden_end(snapshot)
    if hidden:
        return Verdict(
            VerdictWord.UNKNOWN,
            f"nothing runs and nothing is queued; finished, stopped or down? {hidden}",
        )
    marker = derived.last_marker(snapshot)
    if marker is not None and derived.is_cancelled_by_owner(snapshot):
        return Verdict(VerdictWord.STOPPED, f"job {marker.job_id} was cancelled {marker.place}")
    if snapshot.submissions == () and snapshot.attempts == ():
        return Verdict(VerdictWord.DOWN, "nothing was launched yet")
    newest, last = derived.last_attempt(snapshot), ""
    is_newest = marker is not None and newest is not None and newest.end == marker
    # a bad end is a finding, which leads
    if marker is not None and is_newest and marker.reason not in BAD_REASONS:
        last = f"; the last exit record says {marker.reason} {marker.place}"
    return Verdict(VerdictWord.DOWN, f"nothing runs and nothing is queued{last}")


def seen_something(snapshot: Snapshot, verdict: Verdict) -> bool:
    """Whether this look is worth a sign of life to the outside: the run was really observed."""
    return verdict.word is not VerdictWord.UNKNOWN and (
        not isinstance(snapshot.jobs, Unknown)
        or bool(known(snapshot.heartbeats, ()) or known(snapshot.steps, ()))
    )


def _hidden_end(snapshot: Snapshot) -> str:
    """Why it cannot be told whether the run is finished or stopped, or should go on; "" where it
    can.
    """
    needed = (snapshot.attempts, derived.stop_of(snapshot), snapshot.last_end)
    return next((value.why for value in needed if isinstance(value, Unknown)), "")


def _seen(snapshot: Snapshot, liveness: Liveness) -> str:
    return f"last sign of life {duration(liveness.silent_for(snapshot.time))} ago"


def _stop(snapshot: Snapshot, stop: KillSwitch) -> str:
    what = "the run was paused"
    if stop is snapshot.kill_switch:
        what = "the kill switch was set"
    words = f"{what} by {stop.who or 'someone'}"
    if stop.why:
        words += f" ({stop.why})"
    marker = derived.last_marker(snapshot)
    if marker is None or marker.time < (stop.time or 0.0):
        return words
    if marker.checkpoint_step == marker.iteration:
        words += f"; it has saved at iteration {marker.iteration}"
    return words


def _nodes(job: Job) -> str:
    count = len(job.nodes) or job.node_count
    return counted(count, "node")
