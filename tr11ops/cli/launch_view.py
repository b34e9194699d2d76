"""What a launch shows: its checks and its plan; and what `--repair` and `--replace` change in the
queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.agent.mitigation import switch_of
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import for_this_card
from tr11ops.base.units import counted
from tr11ops.cli.common import agree, named_card, say
from tr11ops.cli.context import RunContext, emit
from tr11ops.cli.terminal import hanging
from tr11ops.launch.plan import plan_value
from tr11ops.launch.repair import RepairOutcome, carry_out, relaunch_of
from tr11ops.launch.resume import refused_starts
from tr11ops.launch.session import check_launch, is_short, report_shortage
from tr11ops.launch.starter import data_commands
from tr11ops.observe.look import facts_of, look_now, observe
from tr11ops.queue.held_jobs import held_jobs
from tr11ops.queue.repair import plan_repair, plan_replacement
from tr11ops.rundir.hold_store import held_by_tr11

if TYPE_CHECKING:
    from tr11ops.launch.session import LaunchJob, LaunchView
    from tr11ops.queue.repair import Repair
    from tr11ops.runcard.card import RunCard
    from tr11ops.runcard.check import PreflightCheck
    from tr11ops.rundir.paths import Submission

REPAIR_SCHEMA = 1
LAUNCH_SCHEMA = 1
MARK_WIDTH = 10  # columns of a check's word and of the space behind it


# ----------------------------------------------------------------------------- repair
def change_queue(
    job: LaunchJob, context: RunContext, *, replaces: bool, dry_run: bool, yes: bool, why: str
) -> int:
    """Repair the queue of a run, or give what is queued the card as it is now; returns the exit
    code.

    What would be launched is checked before anything is changed. Raises Refusal where the queue
    cannot be seen, where the change is not agreed to, or not possible.
    """

    as_json = context.as_json

    def plan() -> Repair:
        return _plan(job, replaces)

    change = plan()
    if change.read_errors:
        raise Refusal(
            f"nothing was changed, for this is not known: {'; '.join(change.read_errors)}",
            exit_code=3,
        )
    if change.refusals:
        raise Refusal(f"nothing was changed: {'; '.join(change.refusals)}")
    tell = say if as_json else typer.echo
    for line in _lines(change):
        tell(line)
    again = relaunch_of(job, change)
    view = None
    if again is not None:
        view = check_launch(again)
    outcome = RepairOutcome(
        failed=tuple(str(check) for check in view.faults) if view is not None else ()
    )
    if view is not None and not as_json:
        typer.echo("")
        show_view(view, False, as_json)
    code, can_do = (view.exit_code if view is not None else 0), not change.is_empty
    if code:
        tell("the queue is as it was")
    elif can_do and dry_run:
        tell("nothing was changed (--dry-run)")
    elif can_do:
        agree("Do this?", yes)
        outcome = carry_out(job, change, view, plan, why)
        code = 1 if outcome.failed else 0
        for line in outcome.failed:
            say(f"tr11: {line}")
        if outcome.submitted:
            tell(f"submitted: job {', '.join(outcome.submitted)}")
        if view is not None and outcome.submitted:
            tell_of_shortage(job, view, context.run)
    if as_json:
        done = can_do and not dry_run and not (view is not None and view.exit_code)
        value: dict[str, Any] = {"schema": REPAIR_SCHEMA, **_value(change), "done": done}
        value |= {"submitted": list(outcome.submitted), "failed": list(outcome.failed)}
        emit(value)
    return code


def _plan(job: LaunchJob, replaces: bool) -> Repair:
    """What the queue, as it is seen now, calls for."""
    facts = facts_of(job.card)
    snapshot = observe(
        job.directory, facts, job.scheduler, look_now(job.directory, facts, job.scheduler)
    )
    if replaces:
        return plan_replacement(snapshot, job.user)
    held = held_by_tr11(job.directory, snapshot.pending_jobs)
    ours = held_jobs(snapshot.pending_jobs, held).ours
    refused = {number: str(check) for number, check in refused_starts(job.directory, ours).items()}
    return plan_repair(snapshot, held, switch_of(job.directory), user=job.user, refused=refused)


def _value(change: Repair) -> dict[str, Any]:
    """The plan for a machine."""
    return {
        "steps": [
            {"action": step.action, "job": step.job, "why": step.why} for step in change.steps
        ],
        "resubmit": change.resubmit,
        "after": change.after,
        "left_alone": list(change.left_alone),
        "doubts": list(change.read_errors),
        "refusals": list(change.refusals),
        "kind": change.kind,
    }


def _lines(change: Repair) -> list[str]:
    lines = []
    if change.resubmit:
        behind = ""
        if change.after:
            behind = f" behind job {change.after}"
        lines.append(f"launch: {counted(change.resubmit, 'attempt')}{behind}")
    lines += [str(step) for step in change.steps]
    lines += [f"left alone: {text}" for text in change.left_alone]
    return lines or ["nothing to repair: no dead, held or abandoned job of this run"]


# ----------------------------------------------------------------------------- the commands
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "refused": ("refused", "red"),
    "unknown": ("unknown", "magenta"),
}


def show_checks(checks: Iterable[PreflightCheck]) -> None:
    """One line each, in order, on one stream: what is refused is read among the rest."""
    for check in checks:
        word, colour = _MARKS[check.level]
        typer.echo(
            f"{typer.style(f'{word:>8}', fg=colour)}  {hanging(for_this_card(str(check)), MARK_WIDTH)}"
        )


def checks_value(checks: Iterable[PreflightCheck]) -> list[dict[str, str]]:
    """The checks for a machine."""
    return [
        {
            "level": check.level.value,
            "name": check.name,
            "text": check.text,
            "fix": for_this_card(check.fix),
        }
        for check in checks
    ]


def show_first_data(card: RunCard) -> None:
    """How the data of a card is made that is not there at all."""
    commands = data_commands(card, Path.cwd())
    if commands:
        typer.echo(
            '\nIts data can be made here; texts of your own go where --input is,\none {"text": ...} a line:'
        )
        for command in commands:
            typer.echo(f"  {command}")


def show_view(view: LaunchView, dry_run: bool, as_json: bool) -> None:
    """The checks and the plan, or as JSON where it was refused."""
    if as_json:
        if view.exit_code:
            print_json(view, (), dry_run, as_json)
            for check in view.faults:
                say(f"tr11: {check}")
        return
    show_checks(view.checks)
    if view.rows:
        typer.echo("")
        for name, value in view.rows:
            typer.echo(f"{name:>14}  {value}")
    if dry_run and not view.exit_code:
        typer.echo("\nnothing was submitted (--dry-run)")
    elif view.exit_code:
        typer.echo("nothing was submitted")


def print_json(
    view: LaunchView,
    records: tuple[Submission, ...],
    dry_run: bool,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """With --json: the checks, the plan and what was submitted, as one object."""
    if not as_json:
        return

    value: dict[str, Any] = {
        "schema": LAUNCH_SCHEMA,
        "exit_code": view.exit_code,
        "dry_run": dry_run,
        "submitted": bool(records),
        "job_id": records[0].job_id if records else None,
        "jobs": [record.job_id for record in records],
        "scheduler": records[0].scheduler if records else None,
        "chain": view.chain.kind,
        "checks": checks_value(view.checks),
        "plan": plan_value(view.plan) if view.plan else None,
        **(more or {}),
    }
    emit(value)


def tell_of_shortage(job: LaunchJob, view: LaunchView, run: str | None) -> None:
    """Raise the alert where what was submitted waits for nodes that cannot be used, and say who
    hears of it.
    """
    outcome = None
    if is_short(view):
        outcome = report_shortage(job, time.time(), named_card(run))
    if outcome is None:
        return
    told = sorted({address for message in outcome.messages for address in message.to})
    if told:
        say(f"too few nodes can be used: told {', '.join(told)}")
    for note in outcome.notes:
        say(f"tr11: {note}")
