"""What a launch shows: its checks and its plan; and what `--repair` and `--replace` change in the
queue.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import typer
from msgspec.structs import replace

from tr11ops.agent.mitigation import switch_of
from tr11ops.base.errors import Refusal, Unobserved
from tr11ops.base.invocation import for_this_card
from tr11ops.base.units import counted
from tr11ops.cli.common import hanging, named_card
from tr11ops.cli.runner import UNCHANGED, Change, Outcome, RunContext
from tr11ops.detect.nodes_left import exclusion_limit
from tr11ops.launch.plan import plan_value
from tr11ops.launch.resume import refused_starts, to_train_on
from tr11ops.launch.session import (
    LaunchJob,
    LaunchView,
    carry_out_repair,
    check_launch,
    is_short,
    relaunch_of,
    report_shortage,
)
from tr11ops.launch.starter import data_commands
from tr11ops.observe.jobs import held_jobs
from tr11ops.observe.look import facts_of, look_now, observe
from tr11ops.queue.repair import Repair, RepairStep, plan_repair, plan_replacement
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import Level, PreflightCheck, ok
from tr11ops.rundir.exclusion import ExclusionLimit
from tr11ops.rundir.hold_store import held_by_tr11
from tr11ops.rundir.paths import Submission
from trainer.contract.record import JsonObject

REPAIR_SCHEMA = 1
LAUNCH_SCHEMA = 1
MARK_WIDTH = 10  # columns of a check's word and of the space behind it


# ----------------------------------------------------------------------------- repair
def queue_change(job: LaunchJob, context: RunContext, replaces: bool) -> Change:
    """The repair of a run's queue, or what is queued given the card as it is now.

    What would be launched is checked before anything is changed. Raises Refusal where the queue
    cannot be seen, or where the change is not possible.
    """
    plan = partial(_plan, job, replaces)
    repair = plan()
    if repair.read_errors:
        raise Unobserved(
            f"nothing was changed, for this is not known: {'; '.join(repair.read_errors)}",
        )
    if repair.refusals:
        raise Refusal(f"nothing was changed: {'; '.join(repair.refusals)}")
    again = relaunch_of(job, repair)
    view, lines, code = None, _lines(repair, job.card), 0
    faults: tuple[str, ...] = ()
    if again is not None:
        view = check_launch(again)
        faults, code = tuple(str(check) for check in view.faults), view.exit_code
        if not context.as_json:
            lines += ["", *view_lines(view, context)]
            if code:
                lines.append("nothing was submitted")

    def outcome(
        text: str = "",
        submitted: Sequence[str] = (),
        failed: Sequence[str] = faults,
        done: bool = False,
    ) -> Outcome:
        notes = []
        if done:
            notes = [f"tr11: {line}" for line in failed]
        if text and context.as_json:
            notes.append(text)
        document = {"schema": REPAIR_SCHEMA, **_value(repair), "done": done}
        document |= {"submitted": list(submitted), "failed": list(failed)}
        return Outcome(document, (text,) if text else (), notes, exit_code=code)

    def apply() -> Outcome:
        submitted, failed = carry_out_repair(
            job, repair, view=view, plan_again=plan, why=context.reason
        )
        text = ""
        notes: tuple[str, ...] = ()
        if submitted:
            text = f"submitted: job {', '.join(submitted)}"
            if view is not None:
                notes = shortage_notes(job, view, context.run)
        answer = outcome(text, submitted, failed, done=True)
        return replace(answer, notes=(*answer.notes, *notes), exit_code=1 if failed else 0)

    nothing, preview = None, outcome(UNCHANGED)
    if code:
        nothing = preview = outcome("the queue is as it was")
    elif repair.is_empty:
        nothing = preview = outcome()
    return Change(lines, "Do this?", apply, preview, nothing=nothing, unchanged="", is_answer=True)


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
    return plan_repair(
        snapshot,
        held,
        switch_of(job.directory),
        user=job.user,
        refused=refused,
        limit=exclusion_limit(snapshot) or ExclusionLimit(0),
    )


def _value(change: Repair) -> JsonObject:
    """The plan for a machine."""
    return {
        "steps": [_step_value(step) for step in change.steps],
        "resubmit": change.resubmit,
        "after": change.after,
        "left_alone": list(change.left_alone),
        "doubts": list(change.read_errors),
        "refusals": list(change.refusals),
        "kind": change.kind,
    }


def _step_value(step: RepairStep) -> dict[str, str]:
    value = {"action": step.action, "job": step.job, "why": step.why}
    if step.node:
        value["node"] = step.node
    return value


def _lines(change: Repair, card: RunCard) -> list[str]:
    lines = []
    if change.resubmit:
        behind = ""
        if change.after:
            behind = f" behind job {change.after}"
        lines.append(f"launch: {counted(change.resubmit, 'attempt')}{behind}")
    lines += [str(step) for step in change.steps]
    lines += [f"left alone: {text}" for text in change.left_alone]
    why = "no dead, held or abandoned job of this run"
    if change.starts:
        why = "nothing of this run is queued or running"
    if not lines:
        lines.append(f"nothing to repair: {why}")
    if change.finished_at is not None:
        lines.append(f"the training is finished at iteration {change.finished_at}")
        lines.append(for_this_card(to_train_on(card, change.launch)))
    elif change.starts:
        lines.append(f"to start it: {'; then '.join(change.starts)}")
    return lines


# ----------------------------------------------------------------------------- the commands
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "refused": ("refused", "red"),
    "unknown": ("unknown", "magenta"),
}


def check_lines(checks: Iterable[PreflightCheck], piped: int | None = None) -> Iterator[str]:
    """One line each, in order, for one stream: what is refused is read among the rest. `piped`: as
    of `hanging`.
    """
    for check in checks:
        word, colour = _MARKS[check.level]
        mark = typer.style(f"{word:>8}", fg=colour)
        yield f"{mark}  {hanging(for_this_card(str(check)), MARK_WIDTH, piped=piped)}"


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


def first_data_lines(card: RunCard) -> Iterator[str]:
    """How the data of a card is made that is not there at all."""
    if not isinstance(card, OwnCard):
        return
    commands = data_commands(card, Path.cwd())
    if commands:
        yield ""
        yield "Its data can be made here; texts of your own go where --input is,"
        yield 'one {"text": ...} a line:'
    for command in commands:
        yield f"  {command}"


def view_lines(view: LaunchView, context: RunContext) -> Iterator[str]:
    """The checks and the plan. Where a person reads it on a screen that has to hold the plan, all that
    is fine is one line; --dry-run, a file and a pipe have each check.
    """
    checks = list(view.checks)
    if context.as_shown or (sys.stdout.isatty() and not context.dry_run):
        fine = [check for check in checks if check.level is Level.OK]
        checks = [check for check in checks if check.level is not Level.OK]
        count = counted(len(fine), "check is fine", "checks are fine")
        yield from check_lines([ok(count, "`tr11 launch --dry-run` shows them")])
    yield from check_lines(checks)
    if view.rows:
        yield ""
    for name, value in view.rows:
        yield f"{name:>14}  {value}"


def launch_value(view: LaunchView, records: tuple[Submission, ...], dry_run: bool) -> JsonObject:
    """The checks, the plan and what was submitted, for a machine."""
    return {
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
    }


def shortage_notes(job: LaunchJob, view: LaunchView, run: str | None) -> tuple[str, ...]:
    """Raise the alert where what was submitted waits for nodes that cannot be used; returns who
    hears of it.
    """
    if not is_short(view):
        return ()
    outcome = report_shortage(job, time.time(), named_card(run))
    if outcome is None:
        return ()
    notes = [f"tr11: {note}" for note in outcome.notes]
    told = sorted({address for message in outcome.messages for address in message.to})
    if told:
        notes.insert(0, f"too few nodes can be used: told {', '.join(told)}")
    return tuple(notes)
