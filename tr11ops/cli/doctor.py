"""`tr11 doctor`: everything that a launch would look at, and this machine besides; nothing is
launched.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.cli.common import open_scheduler
from tr11ops.cli.launch import VerifyOption, prepare
from tr11ops.cli.launch_view import check_lines, checks_value, first_data_lines
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from tr11ops.cli.terminal import USUAL
from tr11ops.launch.environment import environment_checks, setup_checks
from tr11ops.launch.session import LaunchJob, check_launch
from tr11ops.runcard.check import Level, PreflightCheck, ok, unknown, verdict

DOCTOR_SCHEMA = 1


def doctor(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    array: Annotated[
        str | None,
        typer.Option("--array", metavar="1-10", help="As if so many attempts were launched."),
    ] = None,
    verify: VerifyOption = False,
) -> Outcome:
    """Is everything in place to launch a card from here? Nothing is launched, and nothing left
    behind.

    Without a card, this machine and its scheduler alone are looked at.

    Exit code 0: all is well, or there are warnings; 1: something is in the way; 2: wrong card or
    option; 3: no answer from the scheduler.

    Examples:
      tr11 doctor
      tr11 doctor --run tr11-176B-ml --array 1-10 --verify --json
    """
    job, checks = _look(context, array, verify)
    code = verdict(checks)
    value = {
        "schema": DOCTOR_SCHEMA,
        "exit_code": code,
        "card": job.card.run.name if job else None,
        "checks": checks_value(checks),
    }
    lines = list(check_lines(checks, USUAL))
    if job is not None and code:
        lines += first_data_lines(job.card)
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    said = [f"{count} {level}" for level, count in counts.items() if count]
    return Outcome(value, [*lines, "", ", ".join(said)], exit_code=code)


def _look(
    context: RunContext, array: str | None, verify: bool
) -> tuple[LaunchJob | None, list[PreflightCheck]]:
    """The launch that a card means, None where no card is known, and all checks."""
    if not context.has_card:
        edge = open_scheduler(context.scheduler)
        checks = [*environment_checks(edge.name == "slurm", None), _answers(context.scheduler)]
        return None, checks
    job = prepare(context.run, context.overrides, context.scheduler, array=array, verify=verify)
    view = check_launch(job)
    site = known(view.facts.site, None)
    uses_slurm = job.scheduler.name == "slurm"
    machine = environment_checks(uses_slurm, job.directory.root, site.version if site else "")
    setup = setup_checks(job.card, uses_slurm, os.environ)
    # A run that is under way is no fault of anything; a launch of it would be refused all the same.
    healthy = (
        replace(check, level=Level.WARNING)
        if check.name == "queue" and check.level is Level.REFUSED
        else check
        for check in view.checks
    )
    return job, [*machine, *setup, *healthy]


def _answers(kind: str) -> PreflightCheck:
    """Whether the scheduler answers, and what it has."""
    edge = open_scheduler(kind)
    try:
        nodes, partitions = edge.nodes(), edge.partitions()
    except SchedulerError as error:
        return unknown("scheduler", str(error))
    usable = sum(node.is_usable for node in nodes)
    return ok(
        "scheduler",
        f"{edge.name}: {counted(len(partitions), 'partition')}, {usable} of {counted(len(nodes), 'node')} usable",
    )
