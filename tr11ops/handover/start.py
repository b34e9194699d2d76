"""What a shift begins with, beside what happened: the commands of the shift, and every living job
of the members of the run's Unix group, as of this moment.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Job, JobState, Overview
from trainer.contract.record import Record


class GroupJob(Record):
    """One job, or the waiting tasks of one array. `seconds`: for how long it has run; None where it
    has not begun.
    """

    job: str
    user: str
    name: str
    state: str
    reason: str
    nodes: int
    seconds: float | None
    is_own: bool  # of the run that is looked at


def group_jobs(
    jobs: Iterable[Job], members: Collection[str], own: Iterable[Job], now: float
) -> tuple[GroupJob, ...]:
    """The living jobs of these people, and the run's own whoever has them; what runs comes first.
    Pure.
    """
    ours = {job.raw_id for job in own}
    shown = [
        job
        for job in jobs
        if not job.state.is_final and (job.user in members or job.raw_id in ours)
    ]
    shown.sort(
        key=lambda job: (job.raw_id not in ours, not job.state.is_active, job.user, job.job_id)
    )
    return tuple(
        GroupJob(
            job=job.job_id,
            user=job.user,
            name=job.name,
            state=job.state.value,
            reason=job.reason if job.state is JobState.PENDING else "",
            nodes=len(job.nodes) or job.node_count,
            seconds=max(0.0, now - job.start_time)
            if job.state.is_active and job.start_time is not None
            else None,
            is_own=job.raw_id in ours,
        )
        for job in shown
    )


def read_group_jobs(
    scheduler: Overview | Unknown, group: str, own: Iterable[Job], now: float
) -> Observed[tuple[GroupJob, ...]]:
    """Ask the scheduler for all jobs, and the system which of their users are of the group."""
    if isinstance(scheduler, Unknown):
        return scheduler
    try:
        jobs = scheduler.jobs()
        members = members_among({job.user for job in jobs}, group)
    except KeyError:
        return Unknown(f"there is no group {group} on this machine")
    except (SchedulerError, OSError, ValueError) as error:
        return Unknown(cause(error))
    return group_jobs(jobs, members, own, now)


def members_among(users: Iterable[str], group: str) -> frozenset[str]:
    """Which of these users are of a group, by its list or as their own first group. Raises KeyError
    without such one.

    A site's whole list of users may be long, or not be told: only these are asked for.
    """
    entry = grp.getgrnam(group)
    return frozenset(
        user for user in users if user in entry.gr_mem or _first_group(user) == entry.gr_gid
    )


def _first_group(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_gid
    except KeyError:
        return None  # a user of the cluster whom this machine does not know


def group_of_folder(folder: Path) -> str:
    """The name of a folder's group. Raises OSError, and KeyError where the number has no name."""
    return folder.group()


# The commands of a shift, and what each is for; docs/how-to/on-call.md has the same five.
COMMANDS = (
    ("status", "may you sleep; if not, why, and what to type"),
    ("logs -n 50", "what the training last said (-f: as it comes)"),
    ("alerts list", "what is open, and who has it; `alerts ack` takes one"),
    ("stacks", "when it hangs: the rank that the others wait for"),
    ("kill --wait", "stop it with a checkpoint, whoever started it; `resume` lets it go on"),
)


class ShiftCommand(Record):
    """One command, as it is typed for this run, and what it is for."""

    command: str
    what_for: str


class StartOfShift(Record):
    """`group`: the Unix group whose people share the run; `jobs`: None where they could not be read
    (`why_unknown`).
    """

    commands: tuple[ShiftCommand, ...]
    group: str
    jobs: tuple[GroupJob, ...] | None
    why_unknown: str = ""


def job_lines(start: StartOfShift) -> Iterator[str]:
    """One sentence for each job: whose it is, what it does, and whether it is of this run."""
    if start.jobs is None:
        yield f"unknown: {start.why_unknown}"
        return
    if not start.jobs:
        yield "none is running or queued"
    for job in start.jobs:
        since = ""
        if job.seconds is not None:
            since = f" for {duration(job.seconds)}"
        why = ""
        if job.reason:
            why = f" ({job.reason})"
        nodes = counted(job.nodes, "node")
        what = "this run" if job.is_own else job.name
        yield f"`{job.job}` of {job.user}: {what}, {job.state}{why}{since}, {nodes}"


def command_lines(start: StartOfShift) -> Iterator[str]:
    return (f"`{entry.command}`: {entry.what_for}" for entry in start.commands)
