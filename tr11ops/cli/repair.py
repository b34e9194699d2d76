"""`tr11 launch --repair`: shows what mends the run's queue, asks, does it, and launches anew what could not be kept."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.cli.common import Refusal, agree, say

if TYPE_CHECKING:
    from tr11ops.launch.repair import Repair
    from tr11ops.launch.session import LaunchJob

REPAIR_SCHEMA = 1


def mend(job: LaunchJob, *, dry_run: bool, yes: bool, as_json: bool, why: str) -> int:
    """Mend the queue of a run; returns the exit code. Raises Refusal where it cannot be seen or is not agreed to."""
    from tr11ops.agent.remedy import switch_of
    from tr11ops.holds import held_by_tr11
    from tr11ops.launch.repair import carry_out, plan_repair
    from tr11ops.launch.submit import launch_lock
    from tr11ops.observe import facts_of, observe

    snapshot = observe(job.directory, facts_of(job.card), job.scheduler, time.time())
    repair = plan_repair(snapshot, held_by_tr11(job.directory), switch_of(job.directory))
    if repair.doubts:
        raise Refusal(f"nothing was changed, for this is not known: {'; '.join(repair.doubts)}", exit_code=3)
    failed: tuple[str, ...] = ()
    submitted: tuple[str, ...] = ()
    for line in _lines(repair):
        say(line)
    if not repair.is_empty and not dry_run:
        agree("Do this?", yes)
        with launch_lock(job.directory.launch_lock):
            failed = carry_out(repair, job.scheduler, job.directory, job.user, why)
        if repair.resubmit and not failed:
            failed, submitted = _resubmit(job, repair, why)
    for line in failed:
        say(f"tr11: {line}")
    if submitted:
        say(f"submitted: job {', '.join(submitted)}")
    if as_json:
        done = not dry_run and not repair.is_empty
        value: dict[str, Any] = {"schema": REPAIR_SCHEMA, **asdict(repair), "done": done}
        typer.echo(json.dumps({**value, "submitted": list(submitted), "failed": list(failed)}, indent=1))
    return 1 if failed else 0


def _lines(repair: Repair) -> list[str]:
    lines = [str(step) for step in repair.steps]
    if repair.resubmit:
        behind = f" behind job {repair.after}" if repair.after else ""
        lines.append(f"launch anew: {repair.resubmit} attempt{'s' if repair.resubmit > 1 else ''}{behind}")
    lines += [f"left alone: {text}" for text in repair.left_alone]
    return lines or ["nothing to mend: no dead, held or abandoned job of this run"]


def _resubmit(job: LaunchJob, repair: Repair, why: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Launch as many attempts as were cancelled: (what went wrong, the new jobs)."""
    from tr11ops.launch.session import carry_out, check_launch
    from tr11ops.runcard import parse_array

    again = replace(job, array=parse_array(f"1-{repair.resubmit}"), request=replace(job.request, after=repair.after))
    view = check_launch(again)
    if not view.exit_code:
        view, records = carry_out(again, view, why or "repair")
        if records:
            return (), tuple(str(record.job_id) for record in records)
    return tuple(str(check) for check in view.faults), ()
