"""Whether a run is free to start: what of it runs or waits already, here and elsewhere. What is
looked up, and the checks of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.observe.ownership import Ownership, own_jobs, without_unclear
from tr11ops.runcard.check import PreflightCheck, ok, refused, unknown, warning
from tr11ops.rundir.paths import (
    BEING_SUBMITTED,
    DAMAGED,
    RunDirectory,
    Submission,
    is_in_doubt,
    job_of_tag,
)

if TYPE_CHECKING:
    from tr11ops.launch.facts import LaunchFacts, LaunchRequest


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
