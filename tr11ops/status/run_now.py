"""What a run does at the moment of asking, and what is to be typed now: beside why a launch of it ended,
which does not change, this does. Pure.

The commands are those of the same look's findings, as `tr11 status`, the page, `tr11 top` and the mails
show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import capitalized, duration, timestamp
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import COSTS_TIME, Finding, Severity, by_cause, slow_by_cause
from tr11ops.detect.unfinished_end import what_follows
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.attribution.restart import CLASS
from tr11ops.diagnose.diagnosis import Diagnosis, NowState, RunNow
from tr11ops.diagnose.signature import USUAL_STEP, FaultClass, NextStep
from tr11ops.observe import derived
from tr11ops.observe.liveness import ENDED_PHASE
from tr11ops.observe.observations import TRAINING_PHASES, LaunchEnd
from tr11ops.observe.snapshot import Attempt, Snapshot, began
from tr11ops.status.answer import resubmits, watchdog_missing
from tr11ops.status.assessment import Assessment
from tr11ops.watchdog.verdict import VerdictWord

_STATES = {
    VerdictWord.HEALTHY: NowState.TRAINS,
    VerdictWord.SLOW: NowState.TRAINS,
    VerdictWord.AT_RISK: NowState.TRAINS,
    VerdictWord.STARTING: NowState.STARTS,
    VerdictWord.QUEUED: NowState.QUEUED,
    VerdictWord.STALLED: NowState.STANDS,
    VerdictWord.DOWN: NowState.STANDS,
}
_FAULTS = {
    "directory-unseen": FaultClass.STORAGE,
    "filesystem-full": FaultClass.STORAGE,
    "node-lost": FaultClass.SLURM_NODE_FAIL,
    "zombie": FaultClass.SLURM_NODE_FAIL,
    "loss-not-finite": FaultClass.NUMERICS,
    **dict.fromkeys(COSTS_TIME, FaultClass.SLOW),
    **dict.fromkeys(
        ("hung", "stalled", "suspended", "lingering", "two-attempts"), FaultClass.STALLED
    ),
}
SEEN_NOW = 0.9  # of what a look at the run shows, where no log tells it
EVIDENCE = 2  # lines of a finding that are told
_LOOKS_ONLY = " diagnose"  # of a command that the reader has just typed
_PLANNED = "A watchdog that may submit it again looks at the run: `{}` says what it does next."


def run_now(seen: Assessment, found: Diagnosis) -> RunNow:
    """What the run does now, after the launch that was judged; where a later attempt has followed that,
    it is said too.
    """
    now, after = _of_verdict(seen, found), _attempt_after(seen.snapshot, found.launch)
    if after is None or now.job:
        return now
    went_on = f"It went on in attempt {after.label or after.job_id}."
    return replace(now, text=f"{went_on} {now.text}")


def _attempt_after(snapshot: Snapshot, judged: str) -> Attempt | None:
    """The attempt that came after the one that was judged; None where none did, or that is not known."""
    row = sorted(known(snapshot.attempts, ()), key=began)
    names = [attempt.job_id for attempt in row]
    if judged not in names:
        return None
    later = [one for one in row[names.index(judged) + 1 :] if not one.gave_way]
    return next(iter(later), None)


def _of_verdict(seen: Assessment, found: Diagnosis) -> RunNow:
    snapshot, verdict = seen.snapshot, seen.verdict
    said = f"{capitalized(verdict.why)}."
    if verdict.word is VerdictWord.UNKNOWN or isinstance(snapshot.jobs, Unknown):
        return RunNow(NowState.UNKNOWN, f"How the run stands now cannot be told: {verdict.why}.")
    if verdict.word is VerdictWord.FINISHED:
        return RunNow(NowState.FINISHED, "The training is finished.")
    if verdict.word.is_stop:
        now = RunNow(NowState.STOPPED, said)
        if snapshot.run.is_watched:
            return now
        return replace(now, commands=commands_now(seen))
    now = RunNow(
        _STATES[verdict.word],
        said,
        commands_now(seen),
        to_exclude=tuple(_not_excluded(snapshot, found)),
    )
    if now.state is NowState.STANDS:
        return replace(now, text=_standing(seen, said))
    if now.state is NowState.QUEUED:
        return replace(now, text=_queued(snapshot, found, said))
    return _running(snapshot, found, now)


def running_on(seen: Assessment, found: Diagnosis, before: str) -> Diagnosis | None:
    """The answer for an attempt that trains and is well now, where its log tells of no fault; None for
    any other. `before`: how the launch before it ended.
    """
    if found.fault is not FaultClass.UNKNOWN or found.root_cause is not None or found.conclusion:
        return None
    jobs = [one for one in seen.snapshot.active_jobs if found.launch in derived.identifiers(one)]
    is_well = seen.verdict.word in {VerdictWord.HEALTHY, VerdictWord.STARTING}
    if not jobs or seen.verdict.exit_code or not is_well:
        return None
    why = f"{capitalized(seen.verdict.why)}. Its log tells of no fault."
    return replace(
        found,
        fault=FaultClass.RUNNING,
        step=NextStep.NONE,
        confidence=1.0,
        label=found.label or jobs[0].job_id,
        explanation=f"{why} {before}".strip(),
    )


def led_by_findings(seen: Assessment, found: Diagnosis) -> Diagnosis:
    """The diagnosis with the strongest cause that the same look has found for the run, where the launch's
    own logs and records tell of none. No node is accused by it but one that is slow.
    """
    newest = derived.last_attempt(seen.snapshot)
    if found.fault is not FaultClass.UNKNOWN or newest is None or newest.job_id != found.launch:
        return found
    for cause in by_cause(seen.findings):
        fault = _fault_of(cause)
        if fault is None or cause.severity is Severity.INFO:
            continue
        if fault is FaultClass.SLOW and not _trains_slowly(seen):
            continue  # why it ended is another matter
        step, signs = USUAL_STEP[fault], replace(found.signs, runs_on=False)
        if fault is FaultClass.SLOW and cause.subject:
            signs = replace(signs, lone_node=cause.subject)
        elif fault is FaultClass.SLOW:
            step = NextStep.PAGE
        elif step is NextStep.EXCLUDE_AND_RESUBMIT:
            step = NextStep.RESUBMIT
        why = f"{cause.title}: {'; '.join(cause.evidence[:EVIDENCE])}".rstrip(": ")
        if fault is FaultClass.SLOW:
            why = f"slow: {why}"
        return replace(
            found.without_cause(),
            fault=fault,
            step=step,
            confidence=SEEN_NOW,
            explanation=f"{capitalized(why)}. {found.explanation}".strip(),
            signs=signs,
        )
    return found


def _trains_slowly(seen: Assessment) -> bool:
    return _STATES.get(seen.verdict.word) is NowState.TRAINS and bool(slow_by_cause(seen.findings))


def _fault_of(cause: Finding) -> FaultClass | None:
    """The class of what a finding tells; None where it tells of no cause of an end, or of a standstill."""
    if cause.detector == "unfinished-end" and cause.fault in set(Kind):
        return CLASS.get(Kind(cause.fault))
    return _FAULTS.get(cause.detector)


def commands_now(seen: Assessment) -> tuple[str, ...]:
    """What `tr11 status` says to type now, in its order: where a person is needed, for the gravest of what it
    tells; of a run that is stopped alone, what resumes it, and what releases the rest; else for what makes it
    slow. Without what only asks why it ended. Empty where it tells of nothing to type.
    """
    if not seen.verdict.exit_code:
        return _commands_of_calm(seen)
    for severity in (Severity.CRITICAL, Severity.WARNING):
        causes = [one for one in by_cause(seen.findings) if one.severity is severity]
        commands = _commands(causes)
        if commands:
            return commands
    return ()


def _commands_of_calm(seen: Assessment) -> tuple[str, ...]:
    if not seen.verdict.word.is_stop:
        return _commands(slow_by_cause(seen.findings))
    held = [one for one in by_cause(seen.findings) if one.detector == "held"]
    rest = _commands(one for one in held if one.severity > Severity.INFO)
    without = (one.fix for one in slow_by_cause(seen.findings) if one.subject)
    return tuple(dict.fromkeys((*without, *derived.go_on(seen.snapshot, behind=True), *rest)))


def _commands(causes: Iterable[Finding]) -> tuple[str, ...]:
    typed = dict.fromkeys(line for cause in causes for line in cause.commands)
    return tuple(line for line in typed if _LOOKS_ONLY not in line)


def _standing(seen: Assessment, said: str) -> str:
    snapshot = seen.snapshot
    if snapshot.jobs or not resubmits(snapshot) or watchdog_missing(snapshot, seen.extra):
        return said
    return f"{said} {_PLANNED.format(derived.command(snapshot, 'pulse --dry-run'))}"


def _not_excluded(snapshot: Snapshot, found: Diagnosis) -> Iterator[str]:
    """The nodes that are proved to be at fault, and that the run may use still."""
    excluded = {entry.node for entry in known(snapshot.exclusions, ())}
    if found.accused.is_proved:
        yield from (node for node in found.accused.nodes if node not in excluded)


def _queued(snapshot: Snapshot, found: Diagnosis, said: str) -> str:
    """What waits: the job itself, put back into the queue, or the next one."""
    sure = derived.sure_jobs(snapshot)
    if snapshot.active_jobs:  # that leaves its nodes still
        return said
    if sure and found.launch in derived.identifiers(sure[0]):
        return f"Job {sure[0].job_id} was put back into the queue, and starts by itself."
    return what_follows(snapshot) or said


def _running(snapshot: Snapshot, found: Diagnosis, now: RunNow) -> RunNow:
    """Since when it runs again, in which job and launch, and from which iteration, as far as that is
    known.
    """
    if not snapshot.active_jobs:
        return now  # it trains outside the scheduler
    running = [job for job in snapshot.active_jobs if job.state is JobState.RUNNING]
    job = max(running or snapshot.active_jobs, key=_began)
    names = derived.identifiers(job)
    ends = derived.launch_ends(snapshot, names)
    last = next(reversed(ends), None)
    is_same = found.launch in names
    if last is not None and is_same and _is_between(snapshot, found, last):
        said = capitalized(last.decision)
        said = f"Job {job.job_id} still runs. {said}."
        return replace(now, text=said, job=job.job_id, is_again=True)
    since, where = job.start_time, f"job {job.job_id}"
    if last is not None:
        since, where = last.time, f"launch {last.launch + 1} of job {job.job_id}"
    words = [f"in {where}"]
    if since is not None:
        ago = duration(max(0.0, snapshot.time - since))
        words.insert(0, f"since {timestamp(since, None)} ({ago} ago)")
    first = _first_iteration(snapshot, names, since or 0.0)
    if first is not None:
        words.append(f"from iteration {first}")
    done = derived.iteration(snapshot)
    if now.state is NowState.STARTS:
        words.append("and has made no step yet")
    elif done is not None:
        words.append(f"and is at iteration {done}")
    now = replace(now, job=job.job_id, since=since, iteration=first)
    if is_same and last is None:
        return replace(now, text=f"It runs {', '.join(words)}.")
    return replace(now, text=f"It runs again {', '.join(words)}.", is_again=True)


def _is_between(snapshot: Snapshot, found: Diagnosis, last: LaunchEnd) -> bool:
    """Whether the launch that was judged has ended, and nothing of the next one has lived yet."""
    has_begun = any(
        beat.job_id == last.job_id and beat.time > last.time and beat.phase != ENDED_PHASE
        for beat in known(snapshot.heartbeats, ())
    )
    return found.number == last.launch and bool(last.decision) and not has_begun


def _first_iteration(snapshot: Snapshot, names: frozenset[str], since: float) -> int | None:
    """The iteration after which a job's training went on; None where that is not known."""
    begun = [
        phase.iteration
        for phase in known(snapshot.training.phases, ())
        if phase.job_id in names and phase.phase in TRAINING_PHASES and phase.began >= since
    ]
    made = [
        step.record.iteration - 1
        for step in known(snapshot.steps, ())
        if step.job_id in names and (step.time or 0.0) >= since
    ]
    return min((*begun, *made), default=None)


def _began(job: Job) -> float:
    return job.start_time or 0.0
