"""What a shift begins with, beside what happened: the commands of the shift, and the jobs of the
group. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import counted, duration
from tr11ops.observe.group_jobs import GroupJob
from trainer.contract.record import Record

# The commands of a shift, and what each is for; docs/on-call.md has the same five.
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
        if job.seconds is None:
            since = ""
        else:
            since = f" for {duration(job.seconds)}"
        why = ""
        if job.reason:
            why = f" ({job.reason})"
        nodes = counted(job.nodes, "node")
        what = "this run" if job.is_own else job.name
        yield f"`{job.job}` of {job.user}: {what}, {job.state}{why}{since}, {nodes}"


def command_lines(start: StartOfShift) -> Iterator[str]:
    return (f"`{entry.command}`: {entry.what_for}" for entry in start.commands)
