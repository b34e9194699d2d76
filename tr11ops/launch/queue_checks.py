"""How the attempts of a launch are queued, and whether the run is free to start: what of it runs or
waits already, here and elsewhere. What is looked up, and the checks of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import ArraySpec, array_number
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.site import SiteRules
from tr11ops.observe.jobs import Ownership, own_jobs, without_unclear
from tr11ops.observe.snapshot import course_of, weight_at, work
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.runcard.estimate import attempt_seconds
from tr11ops.runcard.speed import RunHistory, assumed_rate, seconds_at
from tr11ops.rundir.paths import (
    BEING_SUBMITTED,
    DAMAGED,
    RunDirectory,
    Submission,
    is_in_doubt,
    job_of_tag,
)
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.launch.facts import LaunchFacts, LaunchRequest


# ----------------------------------------------------------------------------- how the next attempt is queued
# How the next attempt is queued: a job array, dependent jobs, or each job by the one before.
# Pure.
ChainKind: TypeAlias = Literal["single", "array", "afterany", "self"]
WORDS: dict[ChainKind, str] = {
    "single": "one job",
    "array": "a job array, one task at a time",
    "afterany": "jobs that each wait for the one before (afterany)",
    "self": "each job queues the next one when it starts",
}


class QueueChain(Record):
    """The chosen way of queueing `tasks` attempts, and why. `fault` says why none will do; it is
    then not used.
    """

    kind: ChainKind
    tasks: int
    why: str = ""
    fault: str = ""

    def __str__(self) -> str:
        if self.kind == "single":
            text = WORDS[self.kind]
        else:
            text = f"{counted(self.tasks, 'attempt')}: {WORDS[self.kind]}"
        if self.why:
            return f"{text} ({self.why})"
        return text


def choose_chain(wanted: str, array: ArraySpec | None, site: SiteRules | None) -> QueueChain:
    """The way that `slurm.chain` (`wanted`) and the site's rules leave.

    `site` is None where the scheduler has no rules (the embedded one). An array is the first
    choice: its tasks keep their places in the queue, and are held or barred from a node with one
    command.
    """
    if array is None:
        return QueueChain("single", 1)
    tasks = len(array)
    rules = site or SiteRules()
    few = min(2, tasks)
    array_fault = _array_fault(array, rules)
    crowd_fault = _crowd_fault(tasks, rules)
    faults: dict[ChainKind, str] = {
        "array": array_fault or crowd_fault,
        "afterany": crowd_fault,
        "self": _crowd_fault(few, rules),
    }
    if wanted != "auto":
        kind = next(kind for kind in faults if kind == wanted)
        return QueueChain(kind, tasks, "slurm.chain", faults[kind])
    kind = next((kind for kind, fault in faults.items() if not fault), "self")
    return QueueChain(
        kind, tasks, {"array": "", "afterany": array_fault, "self": crowd_fault}[kind], faults[kind]
    )


def _array_fault(array: ArraySpec, rules: SiteRules) -> str:
    if not rules.has_arrays:
        return "the site has no job arrays (MaxArraySize)"
    largest = rules.largest_array_size
    if largest is not None and array.indices[-1] >= largest:
        return f"task numbers must stay below {largest} (MaxArraySize)"
    return ""


def _crowd_fault(jobs: int, rules: SiteRules) -> str:
    for limit, name in ((rules.submitted_jobs, "MaxSubmitJobs"), (rules.jobs, "MaxJobCount")):
        if limit is not None and jobs > limit:
            return f"{counted(jobs, 'queued job is', 'queued jobs are')} above the site's limit of {limit} ({name})"
    return ""


def chain_checks(chain: QueueChain) -> Iterator[PreflightCheck]:
    """Whether the site takes the chain, in words."""
    if chain.fault:
        yield refused(
            "slurm.chain", chain.fault, 'ask for fewer tasks, or set slurm.chain = "auto"', 2
        )
    elif chain.kind != "single":
        yield ok("chain", str(chain))


def site_checks(site: SiteRules) -> Iterator[PreflightCheck]:
    """That a part of the site's rules could not be asked, or that it shows or starts jobs elsewhere
    than tr11 looks.
    """
    if "jobs" in site.hidden:
        yield warning(
            "queue",
            "the site shows each user their own jobs alone (PrivateData=jobs): of others' jobs of this run "
            "its records alone tell",
            "let one person launch it",
        )
    if site.federation:
        yield warning(
            "federation",
            f"this cluster is part of {site.federation}: a job that another cluster starts is not followed here",
            "keep it on this one: slurm.options.cluster-constraint, with a feature that the site gives it",
        )
    if site.untold:
        rule = f"unknown: {site.untold}; how many jobs you may queue is not looked at"
        yield warning(
            "account",
            rule,
            "ask the site for its accounting database (slurmdbd); the launch goes on",
        )


# ----------------------------------------------------------------------------- how far it goes
class Coverage(Record):
    """How far a chain goes. Seconds of pure training; waits, saves, evaluations and faults are not
    in it.

    `remaining` is None where nothing says how fast the run is; `basis` says what it rests on.
    """

    tasks: int
    task: float
    remaining: float | None
    basis: str = ""
    is_measured: bool = False

    @property
    def tasks_needed(self) -> int | None:
        if self.remaining is None:
            return None
        return max(1, -int(-self.remaining // self.task))

    @property
    def is_enough(self) -> bool:
        return self.remaining is None or self.remaining <= self.tasks * self.task

    def __str__(self) -> str:
        count = f"{self.tasks} x {duration(self.task)} = {duration(self.tasks * self.task)}"
        if self.remaining is None:
            return f"{count}; how long the run needs is not known before its first steps"
        return f"{count}, the run needs {duration(self.remaining)} ({self.basis})"


def coverage_of(card: RunCard, tasks: int, history: RunHistory, resumed_iteration: int) -> Coverage:
    """How far `tasks` attempts carry a run that resumes after `resumed_iteration`.

    The run's own measured step, else an assumed speed of its GPUs; other steps are scaled as `tr11
    estimate` does.
    """
    task = attempt_seconds(card)
    course = course_of(card)
    basis = ""
    full: float | None = None
    if history.step is not None and history.step_iteration is not None:
        full = history.step / weight_at(course, history.step_iteration)
        basis = f"measured: {history.step:.4g} s a step"
    elif isinstance(card, OwnCard) and (rate := assumed_rate(card)) is not None:
        full = seconds_at(card, rate[0])
        basis = f"assumed: {rate[0]:g} TFLOPs a GPU"
    if full is None or card.total_iterations is None:
        return Coverage(tasks, task, None)
    last = max(resumed_iteration, card.total_iterations)
    remaining = full * work(course, resumed_iteration, last)
    return Coverage(tasks, task, remaining, basis, is_measured=history.step is not None)


def coverage_checks(coverage: Coverage) -> Iterator[PreflightCheck]:
    """Whether the chain covers the run: a warning where the run's own speed says that it does not."""
    if coverage.is_enough or not coverage.is_measured:
        yield ok("coverage", str(coverage))
    else:
        yield warning(
            "coverage", str(coverage), f"the whole run takes --array 1-{coverage.tasks_needed}"
        )


# ----------------------------------------------------------------------------- is the run free to start?
def queue_checks(
    directory: RunDirectory, request: LaunchRequest, facts: LaunchFacts
) -> Iterator[PreflightCheck]:
    """Checks that nothing of this run could train beside what is launched now."""
    if isinstance(facts.jobs, Unknown):
        yield unknown("queue", f"the scheduler did not say what is queued ({facts.jobs.why})")
        return
    if isinstance(facts.submissions, Unknown):
        yield unknown("queue", f"earlier submissions could not be read ({facts.submissions.why})")
        return
    if isinstance(facts.foreground, Unknown):
        yield unknown("queue", f"earlier attempts could not be read ({facts.foreground.why})")
        return
    for place in facts.foreground:
        yield refused(
            "queue", f"this run is already running: {place}", "stop it first (`tr11 kill`)"
        )
    for place in facts.elsewhere:
        yield refused(
            "queue",
            f"this run is already queued or running: {place}",
            "stop it first (`tr11 kill`)",
        )
    found, namesakes = own_jobs(directory, facts.jobs, facts.submissions, facts.scheduler)
    names = set(request.replaces)
    replaced = [job for job in found if {job.job_id, job.raw_id, array_number(job)} & names]
    ours = [job for job in found if job not in replaced]
    namesakes, unclear = without_unclear(namesakes, tuple(facts.submissions))
    if unclear and not request.beside_namesakes:
        yield unknown("queue", unclear)
    yield from _namesake_checks(namesakes, request, facts.user)
    yield from _lost_checks(facts, facts.jobs)
    doubtful = [job for job in ours if job.state is JobState.UNKNOWN]
    if doubtful:
        yield unknown("queue", f"the state of job {doubtful[0].job_id} of this run is unknown")
    elif request.after is None:
        yield from _first_in_line(ours, replaced, facts.user)
    else:
        yield from _behind(request.after, ours, facts)


def _namesake_checks(
    namesakes: Iterable[Job], request: LaunchRequest, user: str
) -> Iterator[PreflightCheck]:
    """A user's own job of the same name is most likely this very run, launched from another folder
    or another card.
    """
    for job in namesakes:
        if job.user != user or request.beside_namesakes:
            yield warning(
                "queue", f"job {job.job_id} of {job.user} has the same name, but is not of this run"
            )
            continue
        state = "running" if job.state.is_active else "queued"
        where = job.working_directory or "another run directory"
        yield refused(
            "namesake",
            f"your job {job.job_id} has this run's name and is {state} in {where}",
            "if that is the run you mean, give its card or its folder; a second training of that name takes"
            " --allow-namesake, or a run.name of its own",
        )


SUBMITTING_SECONDS = 150.0  # a client that still submits has been at it for less


def without_trace(facts: LaunchFacts, jobs: Iterable[Job]) -> list[Submission]:
    """The submissions in doubt of which neither the queue nor the run directory knows a job."""
    listed = tuple(jobs)
    traces = known(facts.traces, {})
    doubtful = (entry for entry in known(facts.submissions, ()) if is_in_doubt(entry))
    return [entry for entry in doubtful if job_of_tag(entry.tag, listed, traces) is None]


def _lost_checks(facts: LaunchFacts, jobs: Iterable[Job]) -> Iterator[PreflightCheck]:
    if isinstance(facts.traces, Unknown):
        yield unknown(
            "queue", f"the records of the attempts could not be read ({facts.traces.why})"
        )
        return
    for entry in without_trace(facts, jobs):
        age = facts.time - entry.time
        if (
            entry.note == BEING_SUBMITTED
            and entry.host != facts.host
            and 0 <= age < SUBMITTING_SECONDS
        ):
            rule = f"{entry.user} has begun to launch this run on {entry.host} {duration(age)} ago"
            yield refused("queue", rule, f"look again in {duration(SUBMITTING_SECONDS - age)}")
        else:
            if entry.note.startswith(DAMAGED):
                lost = f"whose record is {entry.note}"
            else:
                lost = "whose answer was lost"
            rule = f"the scheduler has no trace of submission {entry.tag}, {lost}"
            yield warning("queue", rule, "if its job should come after all, it leaves at once")


def _first_in_line(ours: list[Job], replaced: list[Job], user: str) -> Iterator[PreflightCheck]:
    if not ours:
        nothing = "nothing of this run is queued or running"
        but = ""
        if replaced:
            but = f" but {', '.join(job.job_id for job in replaced)}, in whose place this comes"
        yield ok("queue", f"{nothing}{but}")
        return
    job = max(ours, key=lambda entry: (entry.state.is_active, array_number(entry)))
    if job.user in {"", user}:
        whose = ""
    else:
        whose = f" of {job.user}"
    state = "running" if job.state.is_active else "queued"
    more = ""
    if len(ours) > 1:
        more = f" (and {len(ours) - 1} more)"
    last = max((array_number(entry) for entry in ours), key=_as_number)
    rule = f"this run is already {state}: job {job.job_id}{whose}{more}"
    yield refused(
        "queue", rule, f"queue behind it with `--after {last}`, or stop it with `tr11 kill`"
    )


def _behind(after: str, ours: list[Job], facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """With `--after`, everything of this run must be over when the new job starts: it is the
    target, or before it.
    """
    if isinstance(facts.after, Unknown):
        yield unknown(
            "--after", f"the scheduler did not say whether job {after} exists ({facts.after.why})"
        )
        return
    if facts.after is None:
        listed = ", ".join(sorted({array_number(job) for job in ours})) or "none"
        yield refused(
            "--after", f"the scheduler knows no job {after}", f"jobs of this run: {listed}", 2
        )
        return
    if array_number(facts.after) not in {array_number(job) for job in ours}:
        if facts.after.state.is_final:
            yield warning("--after", f"job {after} is over: the new one may start at once")
        else:
            yield warning("--after", f"job {after} ({facts.after.name}) is not of this run")
    whole_array = "_" not in after
    if whole_array:
        before = _all_before(array_number(facts.after), ours)
    else:
        before = set()
    beside = [job for job in ours if array_number(job) not in before]
    if beside:
        last = max((array_number(job) for job in ours), key=_as_number)
        rule = f"job {beside[0].job_id} of this run could run at the same time"
        yield refused("--after", rule, f"use `--after {last}`")
    else:
        yield ok("queue", f"starts after job {after}")


def _all_before(target: str, ours: list[Job]) -> set[str]:
    """The target and every submission that it waits for, however far back."""
    before = {target}
    fresh = {target}
    while fresh:
        awaited = [
            re.sub(r"_\S*", "", job.dependency) for job in ours if array_number(job) in fresh
        ]
        fresh = {number for text in awaited for number in re.findall(r"\d+", text)} - before
        before |= fresh
    return before


def _as_number(text: str) -> tuple[int, str]:
    if text.isdecimal():
        return (int(text), "")
    return (0, text)


def jobs_elsewhere(
    directory: RunDirectory,
    submissions: Sequence[Submission],
    own: str,
    other_scheduler: Callable[[str], Scheduler],
) -> tuple[str, ...]:
    """Jobs of this run that a scheduler other than ours still has, in words."""
    found = []
    for kind in sorted({entry.scheduler for entry in submissions} - {own, ""}):
        try:
            jobs = other_scheduler(kind).jobs()
        except (SchedulerError, OSError, ValueError):
            # it is gone with its machine; the trainer's lease on the checkpoints still guards them
            continue
        ours = Ownership(directory, submissions, scheduler=kind)
        for job in jobs:
            if ours.has(job) and not job.state.is_final:
                found.append(f"job {job.job_id} ({kind}, {job.state})")
    return tuple(found)
