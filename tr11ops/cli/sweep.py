"""`tr11 sweep`: a study of many runs, one array: plan and submit it; its table, resume, stop and comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import SweepError
from tr11ops.base.units import counted
from tr11ops.cli.common import DryRunOption, open_scheduler
from tr11ops.cli.context import JSON, SCHEDULER, RunContext, emit
from tr11ops.cli.launch_view import show_first_data
from tr11ops.cli.sweep_change import resume_study, stop_study
from tr11ops.cli.sweep_compare import compare_cells
from tr11ops.cli.sweep_send import AtOnceOption, WhyOption, cell_checks, cell_job, send_array, show_cell_checks
from tr11ops.cli.sweep_view import SCHEMA, aligned, refusals, study_status
from tr11ops.launch.rehearse import card_text
from tr11ops.launch.session import LaunchJob
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.sweep.grid import parse_axis
from tr11ops.sweep.manifest import create, manifest_of, require_free
from tr11ops.sweep.plan import SweepPlan, SweepRequest, plan_sweep
from tr11ops.sweep.rule import BatchRule
from tr11ops.sweep.submit import SentArray, check_cells, exit_code_of
from trainer.schedule.learning_rate import warmup_samples_of
from trainer.schedule.path import path_of

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.launch.session import LaunchView

app = typer.Typer(
    name="sweep",
    help="""Run a study: one run card with some keys varied, each cell a run of its own, all submitted as one array.

    With batch.global_batch_size in the grid, learning rate and warm-up follow the batch: --rule sqrt (the rate with its
    square root), linear, none. What the grid or --set names, no rule changes. The plan shows every cell.

    Exit code 0: submitted, or fine; 1: something is in the way; 2: wrong card, grid or option; 3: no answer.

    Examples:
      tr11 sweep --run demo --grid batch.global_batch_size=16,32,64 --dry-run
      tr11 sweep --grid optimizer.type=adamw,lamb --grid run.seed=1,2
      tr11 sweep status demo-sweep --watch
      tr11 sweep resume demo-sweep
      tr11 sweep compare demo-sweep -o comparison.html
    """,
)


@app.callback(invoke_without_command=True)
def sweep(
    ctx: typer.Context,
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V1,V2", help="A key of the card and its values; may be repeated."),
    ] = None,
    rule: Annotated[
        BatchRule, typer.Option("--rule", help="How rate and warm-up follow the batch, where the grid varies it.")
    ] = "sqrt",
    equal_samples: Annotated[
        bool, typer.Option("--equal-samples", help="Every cell ends, evaluates and saves at the same samples.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the study and its jobs [RUN-sweep].")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--directory", "-d", metavar="FOLDER", help="Folder of the study; without: beside the card's run."
        ),
    ] = None,
    at_once: AtOnceOption = None,
    why: WhyOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Plan a study and submit it."""
    if ctx.invoked_subcommand is not None:
        return
    with refusals():
        plan = _planned(context, grid or [], rule, equal_samples, name, folder)
        require_free(plan)
    scheduler = open_scheduler(context.scheduler)
    limit = _limit(at_once, scheduler)
    jobs = {cell.number: cell_job(cell.card, _text(plan, cell.card), scheduler) for cell in plan.cells}
    if not context.as_json:
        _show_plan(plan, limit)
    views = check_cells(jobs)
    code = exit_code_of(views.values())
    if code or dry_run:
        _show_outcome(plan, jobs, views, context.as_json, dry_run)
        raise typer.Exit(code)
    manifest = manifest_of(plan, context.card_path, limit)
    with refusals():
        create(plan, manifest, {cell.name: jobs[cell.number].card_toml for cell in plan.cells})
        sent = send_array(plan.request.folder, manifest.name, jobs, scheduler, limit, why)
    _show_sent(plan.request.folder, plan, jobs, sent, context.as_json)


def _planned(
    context: RunContext, grid: Sequence[str], rule: BatchRule, equal: bool, name: str | None, folder: Path | None
) -> SweepPlan:
    """Read card and grid. Raises CardError, SweepError."""
    axes = tuple(parse_axis(text) for text in grid)
    if not axes:
        raise SweepError("give what to vary: --grid batch.global_batch_size=512,1024,2048")
    path, base = context.card_path, context.card
    chosen = folder.absolute() if folder else base.paths.root.with_name(f"{base.paths.root.name}-sweep")
    named = tuple(text.partition("=")[0] for text in context.overrides)
    request = SweepRequest(axes, name or f"{base.run.name}-sweep", Path(os.path.normpath(chosen)), rule, equal, named)

    def load(overrides: Sequence[str]) -> RunCard:
        return load_card(path, (*context.overrides, *overrides), os.environ) if overrides else base

    return plan_sweep(load, request)


# ----------------------------------------------------------------------------- what comes later
app.command("status")(study_status)
app.command("resume")(resume_study)
app.command("stop")(stop_study)
app.command("compare")(compare_cells)


def _limit(at_once: int | None, scheduler: Scheduler) -> int:
    """The nodes of the embedded scheduler are one machine: there one cell at a time is the quickest."""
    if at_once is not None:
        return at_once
    return 1 if scheduler.name == "local" else 0


def _text(plan: SweepPlan, card: RunCard) -> str:
    return card_text(card, f"Cell {card.run.variant} of sweep {plan.request.name}, written by `tr11 sweep`.")


# ----------------------------------------------------------------------------- words
def _show_plan(plan: SweepPlan, limit: int) -> None:
    """A row for each cell: its settings by its name, and what follows from them."""
    request = plan.request
    typer.echo(f"sweep {request.name}: {counted(len(plan.cells), 'cell')} in {request.folder}")
    typer.echo("one array, " + (f"{limit} at a time" if limit else "as many at a time as the scheduler starts"))
    rows = [("cell", "batch", "rate", "warm-up", "steps", "samples")]
    for cell in plan.cells:
        end = path_of(cell.card).end
        rows.append(
            (
                cell.name, f"{cell.card.batch.global_batch_size:,}", f"{cell.card.schedule.learning_rate:.4g}",
                f"{warmup_samples_of(cell.card):,.0f}", f"{end.iteration:,}", f"{end.consumed_samples:,}",
            )
        )  # fmt: skip
    typer.echo("")
    for line in aligned(rows):
        typer.echo(line)
    typer.echo("")


def _show_outcome(
    plan: SweepPlan, jobs: Mapping[int, LaunchJob], views: Mapping[int, LaunchView], as_json: bool, dry_run: bool
) -> None:
    """What a dry run, or a refusal, shows."""
    names = {cell.number: cell.name for cell in plan.cells}
    code = exit_code_of(views.values())
    show_cell_checks(names, views, as_json)
    if as_json:
        emit({**_document(plan, ""), "exit_code": code, "dry_run": dry_run, **cell_checks(names, views)})
        return
    if code:
        show_first_data(next(iter(jobs.values())).card)
        typer.echo("nothing was submitted")
    else:
        typer.echo("\nnothing was submitted (--dry-run)")


def _show_sent(folder: Path, plan: SweepPlan, jobs: Mapping[int, LaunchJob], sent: SentArray, as_json: bool) -> None:
    names = {cell.number: cell.name for cell in plan.cells}
    show_cell_checks(names, sent.views, as_json)
    if as_json:
        checks = cell_checks(names, sent.views)
        emit({**_document(plan, sent.job_id), "exit_code": sent.exit_code, "dry_run": False, **checks})
    elif sent.job_id:
        edge = next(iter(jobs.values())).scheduler.name
        typer.echo(f"submitted: array {sent.job_id} ({edge}); watch it with `tr11 sweep status {folder} --watch`")
    else:
        typer.echo(f"nothing was submitted; `tr11 sweep resume {folder}` tries again")
    raise typer.Exit(sent.exit_code)


def _document(plan: SweepPlan, job_id: str) -> dict[str, Any]:
    request = plan.request
    return {
        "schema": SCHEMA,
        "name": request.name,
        "directory": str(request.folder),
        "rule": request.rule,
        "equal_samples": request.equal_samples,
        "submitted": bool(job_id),
        "job_id": job_id or None,
        "cells": [
            {
                "number": cell.number,
                "name": cell.name,
                "settings": dict(cell.grid.settings),
                "derived": dict(cell.derived),
                "directory": str(cell.card.paths.root),
                "global_batch_size": cell.card.batch.global_batch_size,
                "learning_rate": cell.card.schedule.learning_rate,
                "warmup_samples": warmup_samples_of(cell.card),
                "total_iterations": cell.card.total_iterations,
            }
            for cell in plan.cells
        ],
    }
