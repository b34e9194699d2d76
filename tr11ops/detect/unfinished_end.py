"""Attempts that did not end by themselves, and why."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known, seen
from tr11ops.base.redact import signature
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.attempts import facts_and_gaps, is_without_word, look_at
from tr11ops.detect.detector import NO_CAUSE, Finding, Severity, detector
from tr11ops.detect.nodes_left import after_hold, lost_nodes
from tr11ops.detect.saved import after_passing, iterations, pass_over
from tr11ops.observe import derived
from tr11ops.observe.jobs import standing_holds
from tr11ops.observe.liveness import hidden_life, liveness_outside
from tr11ops.observe.observations import TRAINING_PHASES, LaunchEnd
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.rundir.exclusion import family
from trainer.contract.attempt import BAD_REASONS, NO_MARKER

# classes of faults that a sample of the data may bring about
MAYBE_DATA = frozenset({"software", "unknown"})
# and those that a node may have, also where none is proven bad
MAYBE_NODES = frozenset({"node", "unknown"})
BEFORE_IT_BEGAN = "before it began"  # stands for the cause where no attempt is on record


@detector(
    "unfinished-end",
    needs=("jobs", "attempts", "heartbeats", "steps", "training.launch_ends"),
    uses=("last_end",),
    bound="one; two in a row",
    severities="WARNING, CRITICAL; less (INFO, WARNING) once a later one trains, until it came past",
)
def unfinished_end(snapshot: Snapshot) -> Iterator[Finding]:
    """Attempts that did not end by themselves: no end marker, or one that says the trainer failed or
    refused.

    The bad ends since the last good one: one is a warning, two in a row are critical (a bad node
    or a bad card).

    One finding for each fault, that of the newest end first: another fault is another incident.
    """
    jobs = _by_name(seen(snapshot.jobs))
    row, alive = _bad_ends(snapshot)
    yield from _by_fault(snapshot, row, alive, known_ends(snapshot))
    yield from _never_began(snapshot, jobs)


def unfinished_attempts(snapshot: Snapshot) -> tuple[Attempt, ...]:
    """The bad ends since the last good one, newest first; none where a later attempt trains, or
    that is not known.
    """
    if (
        isinstance(snapshot.jobs, Unknown)
        or isinstance(snapshot.attempts, Unknown)
        or hidden_life(snapshot)
    ):
        return ()
    row, alive = _bad_ends(snapshot)
    if not _trained(snapshot).isdisjoint(alive):
        return ()
    return tuple(row)


def _bad_ends(snapshot: Snapshot) -> tuple[list[Attempt], list[str]]:
    """The bad ends since the last good one, newest first, and the ids of the attempts that live."""
    jobs = _by_name(known(snapshot.jobs, ()))
    outside = liveness_outside(snapshot)
    row: list[Attempt] = []
    alive: list[str] = []
    for attempt in sorted(
        known(snapshot.attempts, ()), key=lambda attempt: attempt.changed, reverse=True
    ):
        if attempt.gave_way:
            continue
        job = jobs.get(attempt.job_id)
        if (job is not None and not job.state.is_final) or (
            outside is not None and outside.job_id == attempt.job_id
        ):
            alive.append(attempt.job_id)
            continue
        if not is_bad(attempt):
            break
        row.append(attempt)
    return row, alive


def _by_fault(
    snapshot: Snapshot, row: list[Attempt], alive: list[str], jobs: dict[str, Job]
) -> Iterator[Finding]:
    """The findings of a row of bad ends, newest first.

    What a later attempt trained after is over, however that one ended, unless it ended by the same
    fault. Where it has not come past the iteration of the fault, which may be met again there, a
    remark is left that says so: of several ends that is a warning still.
    """
    groups: dict[tuple[str, ...], list[Attempt]] = {}
    for attempt in row:
        identity = identity_of_end(attempt, jobs.get(attempt.job_id))
        groups.setdefault(identity, []).append(attempt)
    trained, furthest = _trained(snapshot), _furthest(snapshot)
    over: set[tuple[str, ...]] = set()
    # the same step may fail again: only what comes after it shows otherwise
    to_be_passed: set[tuple[str, ...]] = set()
    for identity, group in groups.items():
        newer = [attempt.job_id for attempt in row[: row.index(group[0])]]
        later = trained.intersection((*alive, *newer))
        if not later:
            continue
        over.add(identity)
        failed_at = max(
            (furthest[attempt.job_id] for attempt in group if attempt.job_id in furthest),
            default=None,
        )
        if failed_at is not None and all(furthest[job_id] <= failed_at for job_id in later):
            to_be_passed.add(identity)
    standing = sum(len(group) for identity, group in groups.items() if identity not in over)
    for identity, group in groups.items():
        if identity in over and identity not in to_be_passed:
            continue  # the run is past it: the list of attempts has it
        severity = Severity.WARNING
        if identity not in over and standing > 1:
            severity = Severity.CRITICAL
        # several ends at one iteration are still a fault until a later attempt has come past it
        if identity in over and len(group) == 1:
            severity = Severity.INFO
        finding = _finding(
            snapshot,
            group,
            is_newest=group == row[: len(group)],
            jobs=jobs,
            severity=severity,
            identity=identity,
        )
        if identity in over:  # a later attempt trains: what lets one begin has been typed
            look = derived.command(snapshot, f"diagnose --job {finding.subject}")
            finding = replace(finding, fix=look, then=(), is_to_be_passed=True)
        yield finding


def _trained(snapshot: Snapshot) -> frozenset[str]:
    """The attempts that are known to have finished iterations of their own."""
    by_steps = {step.job_id for step in known(snapshot.steps, ())}
    ends = known(snapshot.training.launch_ends, ())
    by_launches = {
        end.job_id for end in ends if end.reached is not None and end.reached > (end.began_at or 0)
    }
    return frozenset(by_steps | by_launches)


def _furthest(snapshot: Snapshot) -> dict[str, int]:
    """The last iteration that each attempt finished, or began after; without those of which neither
    is known.
    """
    furthest: dict[str, int] = {}
    for step in known(snapshot.steps, ()):
        furthest[step.job_id] = max(step.record.iteration, furthest.get(step.job_id, 0))
    for end in known(snapshot.training.launch_ends, ()):
        for iteration in (end.reached, end.began_at):
            if iteration is not None:
                furthest[end.job_id] = max(iteration, furthest.get(end.job_id, 0))
    return furthest


def identity_of_end(attempt: Attempt, job: Job | None) -> tuple[str, ...]:
    """What tells the incident of an attempt's end from others: its fault, as its own record has it.

    One fault is one incident, whatever it is taken for: what a node is suspected of first may prove
    to be the program's. A node that is proven bad is an incident of its own. Where no record names
    it, the class of the fault; where that is not known either, what else is known of the end.
    """
    cause = cause_of_end(attempt, job)
    if cause == NO_CAUSE and attempt.why and not attempt.fault:
        return (cause, signature(attempt.why))
    if not attempt.cause or not attempt.fault:
        return (cause,)
    if attempt.blamed:
        return (cause, attempt.fault)
    return (family(attempt.fault),)


def cause_of_end(attempt: Attempt, job: Job | None) -> str:
    """The class of fault that ended an attempt: by its own records, else by the scheduler's word;
    NO_CAUSE where neither says.
    """
    if attempt.cause:
        return attempt.cause
    if job is not None and job.state is JobState.NODE_FAIL:
        return "node"
    return NO_CAUSE


def _by_name(jobs: Iterable[Job]) -> dict[str, Job]:
    return {name: job for job in jobs for name in derived.identifiers(job)}


def known_ends(snapshot: Snapshot) -> dict[str, Job]:
    """What is known of each job's end, by each of its names: the scheduler's own log says more than
    its queue, and remembers longer.
    """
    jobs = _by_name(known(snapshot.jobs, ()))
    found = dict(jobs)
    for job in known(snapshot.operation.ended_jobs, ()):
        shown = jobs.get(job.raw_id)
        if shown is None or (shown.state.is_final and shown.submit_time == job.submit_time):
            found[job.raw_id] = job
    return found


def is_bad(attempt: Attempt) -> bool:
    """True for an attempt that ended without its own word, or by an error. Unknown is not bad."""
    if isinstance(attempt.end, Unknown):
        return False
    return attempt.end is None or attempt.end.reason in BAD_REASONS


def how_it_ended(attempt: Attempt, job: Job | None, told: str = "") -> str:
    """One line: the marker's word, or what else is known of an end without one; without the cause,
    where that is `told` beside it.
    """
    if isinstance(attempt.end, Unknown):
        return f"cannot be told: {attempt.end.why}"
    if attempt.end is not None:
        reason = attempt.end.reason
        if reason in BAD_REASONS and attempt.end.message not in told:
            return f"{reason}: {attempt.end.message}"
        return reason
    said = []
    if attempt.failure not in told:  # what failed first is told first
        said.append(attempt.failure)
    if job is not None:
        said.append(f"the scheduler says {job.end_words}")
    if not said:
        return NO_MARKER
    return f"{NO_MARKER}: {'; '.join(said)}"


def _finding(
    snapshot: Snapshot,
    row: list[Attempt],
    is_newest: bool,
    jobs: dict[str, Job],
    severity: Severity,
    identity: tuple[str, ...],
) -> Finding:
    """What ended by one fault; `is_newest`: nothing ended by another one since, or in between."""
    newest = row[0]
    label = newest.label or newest.job_id
    why = told = why_it_ended(snapshot, newest)
    suspects = _suspects_to_be_told(snapshot, newest)
    if why and suspects:
        why = (
            f"{_without_names(why, suspects)}; whether it is a node's fault, the next attempt tells"
        )
    job = jobs.get(newest.job_id)
    title = _title(row, is_newest=is_newest, label=label, why=why, job=job)
    evidence = []
    for entry in row[:3]:
        when = ""
        if len(row) > 1:
            when = f", {entry.ended.ago(snapshot.time)}"
        evidence.append(
            f"{entry.label or entry.job_id}{when}: {how_it_ended(entry, jobs.get(entry.job_id), told)}"
        )
    if suspects:
        evidence.append(f"seen on {', '.join(suspects)}, which alone proves nothing against it")
    lost = lost_nodes(snapshot).intersection(newest.blamed)
    nodes = (node for node in known(snapshot.nodes, ()) if node.name in lost)
    evidence += [f"the scheduler says now: {node.words}" for node in nodes]
    cleared = _cleared(snapshot, row)
    if cleared:
        evidence.append(f"suspected before, and cleared by it: {', '.join(cleared)}")
    fix, then = derived.command(snapshot, f"diagnose --job {label}"), tuple[str, ...]()
    if is_without_word(snapshot, newest):
        evidence += facts_and_gaps(snapshot, row)
        fix = look_at(snapshot, newest)
    passing, way_out = passes_over_the_data(snapshot, newest), after_hold(snapshot, why)
    if way_out:
        fix, then = way_out[0], way_out[1:]
    elif passing and came_back(snapshot, newest):
        evidence.append(f"if it is the program or the card, and not the data, `{fix}` says where")
        fix, then = passing, after_passing(snapshot, passing)
    else:
        evidence += if_the_data_are_at_fault(snapshot, newest)
    since = min(entry.changed for entry in row)  # the end of the first of them
    by_itself = ""
    if is_newest and not derived.was_refused(snapshot):
        by_itself = what_follows(snapshot)
    return Finding(
        unfinished_end.name,
        severity,
        title,
        subject=label,
        evidence=tuple(evidence),
        fix=fix,
        fault=newest.cause,
        since=since,
        identity=identity,
        then=then,
        by_itself=by_itself,
    )


def what_follows(snapshot: Snapshot) -> str:
    """What goes on after the newest end without anyone's doing; "" where nothing does."""
    if snapshot.active_jobs:
        return f"The next attempt, {snapshot.active_jobs[0].job_id}, runs already."
    sure = derived.sure_jobs(snapshot)
    if sure:
        return f"The next attempt, {sure[0].job_id}, is queued, and starts by itself."
    return ""


_ENDED_BY_SCHEDULER = {
    JobState.TIMEOUT: "at its time limit",
    JobState.NODE_FAIL: "because it lost a node",
    JobState.PREEMPTED: "because it was preempted",
}


def _title(
    row: Sequence[Attempt], *, is_newest: bool, label: str, why: str, job: Job | None
) -> str:
    """Which attempts ended by one fault, and why, as far as that is known; `label` and `job`: of the
    newest.
    """
    newest = row[0]
    if len(row) == 1 and why:
        return f"attempt {label} failed: {why}"
    if len(row) == 1 and newest.end is None:
        by_scheduler = "" if job is None else _ENDED_BY_SCHEDULER.get(job.state, "")
        when = f" {by_scheduler}," if by_scheduler else ""
        return f"attempt {label} ended{when} without the trainer's end marker"
    if len(row) == 1:
        return f"attempt {label} ended by an error"
    which = f"the last {len(row)} attempts"
    if not is_newest:
        which = f"{len(row)} attempts, {label} the last of them,"
    if not why:
        return f"{which} did not end by themselves"
    if newest.fault or all(entry.why == newest.why for entry in row):
        return f"{which} failed: {why}"
    return f"{which} failed, {label} because {why}"


def if_the_data_are_at_fault(
    snapshot: Snapshot, attempt: Attempt, said: Container[str] = ()
) -> tuple[str, ...]:
    """How the data that it met last are skipped, for who finds that they are at fault; of a command
    that is `said` already, when it applies.
    """
    at, command = _met_at(snapshot, attempt), passes_over_the_data(snapshot, attempt)
    if not command or at is None:
        return ()
    if command in said:
        where = iterations(at, at)
        return (f"type the roll-back only if the data of {where} are at fault",)
    return (f"to skip the data of {iterations(at, at)}, if they are at fault: `{command}`",)


def passes_over_the_data(snapshot: Snapshot, attempt: Attempt) -> str:
    """The command that passes over the data that an attempt met last, where that is what a person
    may have to do: the attempt let nothing follow, and its fault may be the data's. Else "".
    """
    at = _met_at(snapshot, attempt)
    if not attempt.held_because or attempt.cause not in MAYBE_DATA or at is None:
        return ""
    if derived.is_rolled_back(snapshot):
        return ""  # a person has seen to it
    return pass_over(snapshot, at, at)


def came_back(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Whether launches on several nodes, this attempt's last one among them, ended in the same way
    in one iteration: by what they train on, the data, as likely as by the program.
    """
    last, at = _last_launch(snapshot, attempt), _met_at(snapshot, attempt)
    if last is None or at is None or attempt.cause != "software":
        return False
    same = [
        end
        for end in known(snapshot.training.launch_ends, ())
        if family(end.fault) == family(last.fault) and _ended_in(snapshot, end) == at
    ]
    return len(same) > 1


def _suspects_to_be_told(snapshot: Snapshot, attempt: Attempt) -> tuple[str, ...]:
    """The nodes that an attempt's fault was seen on, without proof, where another attempt runs or
    starts by itself: it tells whether they are at fault, and until then no one is told that they
    are.
    """
    last = _last_launch(snapshot, attempt)
    if last is None or last.blamed or attempt.cause not in MAYBE_NODES or attempt.held_because:
        return ()
    if snapshot.active_jobs or derived.sure_jobs(snapshot):
        return last.suspects
    return ()


def _without_names(text: str, nodes: Sequence[str]) -> str:
    """A sentence about a fault without the nodes that it was seen on."""
    for node in nodes:
        name = rf"(?<![\w.-]){re.escape(node)}(?![\w-])"
        text = re.sub(name, "a node", re.sub(rf" on {name}", "", text))
    return text


def _cleared(snapshot: Snapshot, row: list[Attempt]) -> tuple[str, ...]:
    """The nodes on which a fault was seen that proved to be the program's or the data's, and that
    are used again.
    """
    excluded = snapshot.exclusions
    if row[0].cause != "software" or isinstance(excluded, Unknown):
        return ()
    last = _last_launch(snapshot, row[0])
    ends = [end for attempt in row for end in _launches(snapshot, attempt) if end != last]
    same = [end for end in ends if last is not None and family(end.fault) == family(last.fault)]
    names = dict.fromkeys(node for end in same for node in (*end.suspects, *end.blamed))
    return tuple(node for node in names if node not in {entry.node for entry in excluded})


def _launches(snapshot: Snapshot, attempt: Attempt) -> list[LaunchEnd]:
    return derived.launch_ends(snapshot, (attempt.job_id,))


def _last_launch(snapshot: Snapshot, attempt: Attempt) -> LaunchEnd | None:
    """How the last launch of an attempt ended; None where that is not known."""
    return max(_launches(snapshot, attempt), key=lambda end: end.launch, default=None)


def _met_at(snapshot: Snapshot, attempt: Attempt) -> int | None:
    """The iteration in which the last launch of an attempt ended; None where that is not known."""
    last = _last_launch(snapshot, attempt)
    if last is None:
        return None
    return _ended_in(snapshot, last)


def _ended_in(snapshot: Snapshot, end: LaunchEnd) -> int | None:
    """The iteration in which a launch ended: the one after the last that it finished, or, where it
    finished none, the one that it had begun by its phases. None where it came to none.
    """
    if end.reached is not None:
        return end.reached + 1
    begun = (
        phase.iteration + 1
        for phase in known(snapshot.training.phases, ())
        if (phase.job_id, phase.launch) == (end.job_id, end.launch)
        and phase.phase in TRAINING_PHASES
    )
    return max(begun, default=None)


def why_it_ended(snapshot: Snapshot, attempt: Attempt) -> str:
    """Why an attempt ended badly: its own records, else what the queued work says that it was held
    for by it.
    """
    if attempt.why or attempt != derived.last_attempt(snapshot):
        return attempt.why
    return next((hold.why for hold in standing_holds(snapshot) if hold.is_for_fault), "")


def _never_began(snapshot: Snapshot, jobs: dict[str, Job]) -> Iterator[Finding]:
    oldest = min((attempt.changed for attempt in known(snapshot.attempts, ())), default=0.0)
    # the newest first: it leads the incident, also when the scheduler has forgotten those before it
    for job in sorted(dict.fromkeys(jobs.values()), key=ended_at, reverse=True):
        if is_unbegun(snapshot, job) and ended_at(job) > oldest and not _has_held(snapshot, job):
            if job.exit_code is None:
                code = ""
            else:
                code = f", exit code {job.exit_code}"
            yield Finding(
                unfinished_end.name,
                Severity.WARNING,
                f"job {job.job_id} ended before it began to work: {job.state.value}{code}",
                subject=job.job_id,
                identity=(BEFORE_IT_BEGAN,),
                since=ended_at(job),
                evidence=(job.output,) if job.output not in {"", "/dev/null"} else (),
                fix=derived.command(snapshot, "logs"),
            )


def is_unbegun(snapshot: Snapshot, job: Job) -> bool:
    """Whether a job got nodes and ended before it left anything in the run directory, and no one
    wanted that end.
    """
    if (
        not job.state.is_final
        or job.start_time is None
        or job.state in {JobState.CANCELLED, JobState.PREEMPTED}
    ):
        return False
    return not derived.identifiers(job) & {
        attempt.job_id for attempt in known(snapshot.attempts, ())
    }


def ended_at(job: Job) -> float:
    """When a job was over, as far as the scheduler says it; seconds since the epoch."""
    found = job.start_time if job.end_time is None else job.end_time
    if found is None:
        return 0.0
    return found


def _has_held(snapshot: Snapshot, job: Job) -> bool:
    """Whether a job held the tasks behind it for a fault: the finding about them says what it met."""
    began = job.start_time or 0.0
    holds = [
        hold for hold in standing_holds(snapshot) if hold.job.partition("_")[0] == job.array_id
    ]
    return any(hold.is_for_fault and hold.time is not None and hold.time >= began for hold in holds)
