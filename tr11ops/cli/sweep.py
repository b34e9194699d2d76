"""`tr11 sweep`: a study of many runs, one array: plan and submit it; its table, resume, stop and comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.units import counted
from tr11ops.cli.common import (
    DryRunOption,
    JsonOption,
    Refusal,
    SchedulerOption,
    YesOption,
    agree,
    check_scheduler_word,
    directory_of,
    open_scheduler,
    say,
)
from tr11ops.cli.context import JSON, SCHEDULER, RunContext, emit
from tr11ops.cli.launch_view import checks_value, show_checks, show_first_data
from tr11ops.cli.sweep_compare import compare_cells
from tr11ops.cli.sweep_view import (
    SCHEMA,
    FolderArgument,
    aligned,
    look_at,
    open_study,
    refusals,
    show_table,
    watch_study,
)
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.rehearse import card_text
from tr11ops.launch.session import LaunchJob
from tr11ops.queue.stop import Signalled
from tr11ops.runcard.card import PathBase, RunCard, load_card
from tr11ops.runcard.check import Level
from tr11ops.rundir.journal import user_name
from tr11ops.sweep.grid import SweepError, parse_axis
from tr11ops.sweep.look import CellState, open_cells
from tr11ops.sweep.manifest import SweepArray, add_array, create, manifest_of, require_free
from tr11ops.sweep.plan import SweepPlan, SweepRequest, plan_sweep
from tr11ops.sweep.rule import BatchRule
from tr11ops.sweep.stop import stop_cells
from tr11ops.sweep.submit import SentArray, check_cells, exit_code_of, submit_cells
from trainer.contract.files import now as time_now
from trainer.schedule.learning_rate import warmup_samples_of
from trainer.schedule.path import path_of

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.launch.session import LaunchView
    from tr11ops.runcard.check import PreflightCheck

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

AtOnceOption = Annotated[
    int | None,
    typer.Option(
        "--at-once", min=0, metavar="N", show_default=False,
        help="Cells that may run at the same time, 0: no limit; without: none, on the embedded scheduler 1.",
    ),
]  # fmt: skip
WhyOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the journal of each cell.")]


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
    jobs = {cell.number: _job(cell.card, _text(plan, cell.card), scheduler) for cell in plan.cells}
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
        sent = _send(plan.request.folder, manifest.name, jobs, scheduler, limit, why)
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


# ----------------------------------------------------------------------------- later
@app.command()
def status(
    folder: FolderArgument = Path(),
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C.")] = False,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """The cells of a study: state, iteration, loss, tokens a second.

    Exit code 0: none failed; 1: one failed; 3: one could not be seen.

    Examples:
      tr11 sweep status demo-sweep
      tr11 sweep status --watch
    """
    check_scheduler_word(scheduler)
    with refusals():
        study = open_study(folder)
    if watch:
        raise typer.Exit(watch_study(study, scheduler, as_json))
    look = look_at(study, scheduler)
    if as_json:
        emit(look.document())
    else:
        show_table(look)
    raise typer.Exit(look.exit_code)


@app.command()
def resume(
    folder: FolderArgument = Path(),
    *,
    at_once: AtOnceOption = None,
    why: WhyOption = "",
    dry_run: DryRunOption = False,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Take up the cells that failed, were stopped, or never began. What is done, runs or waits is left alone.

    Each goes on from its newest sound checkpoint, with the card in its own folder. Nothing is submitted while one cell
    cannot be seen.

    Examples:
      tr11 sweep resume demo-sweep --dry-run
      tr11 sweep resume demo-sweep
    """
    check_scheduler_word(scheduler)
    with refusals():
        study = open_study(folder)
    look = look_at(study, scheduler)
    unseen = [cell for cell in look.cells if cell.state is CellState.UNKNOWN]
    if unseen:
        raise Refusal(f"cell {unseen[0].name}: {unseen[0].why}; nothing was submitted", exit_code=3)
    chosen = open_cells(look.cells)
    if not as_json:
        show_table(look)
    if not chosen:
        if as_json:
            emit({**look.document(), "submitted": False, "job_id": None, "taken_up": []})
        else:
            typer.echo("\nnothing to take up: every cell is done, runs or waits")
        return
    edge = look.scheduler
    if edge is None:
        raise Refusal(f"{look.no_scheduler}; nothing was submitted", exit_code=3)
    limit = study.manifest.at_once if at_once is None else at_once
    jobs = {cell.number: _job(cell.card, study.card_text(cell.name), edge) for cell in chosen}
    names = {cell.number: cell.name for cell in chosen}
    if dry_run:
        views = check_cells(jobs)
        _show_checks(names, views, as_json)
        if as_json:
            taken = [cell.name for cell in chosen]
            emit({**look.document(), "submitted": False, "job_id": None, "taken_up": taken, **_checks(names, views)})
        else:
            typer.echo(f"\nwould take up: {', '.join(names.values())}; nothing was submitted (--dry-run)")
        raise typer.Exit(exit_code_of(views.values()))
    with refusals():
        sent = _send(study.folder, study.manifest.name, jobs, edge, limit, why)
    _show_checks(names, sent.views, as_json)
    if as_json:
        taken = [cell.name for cell in chosen] if sent.job_id else []
        emit({**look.document(), "submitted": bool(sent.job_id), "job_id": sent.job_id or None, "taken_up": taken,
              **_checks(names, sent.views)})  # fmt: skip
    elif sent.job_id:
        typer.echo(f"\nsubmitted: array {sent.job_id} ({edge.name}) for {', '.join(names.values())}")
    else:
        typer.echo("nothing was submitted")
    raise typer.Exit(sent.exit_code)


@app.command()
def stop(
    folder: FolderArgument = Path(),
    *,
    now: Annotated[bool, typer.Option("--now", help="End at once: what is not saved is lost.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Stop a study: what runs saves and leaves, queued jobs are cancelled. `tr11 sweep resume` takes it up again.

    Exit code 0: asked, or nothing to stop; 1: a job is someone else's; 3: the scheduler did not answer.

    Examples:
      tr11 sweep stop demo-sweep --dry-run
      tr11 sweep stop demo-sweep --yes
    """
    check_scheduler_word(scheduler)
    with refusals():
        study = open_study(folder)
    look = look_at(study, scheduler)
    edge = look.scheduler
    if edge is None:
        raise Refusal(f"{look.no_scheduler}; nothing was stopped", exit_code=3)
    unseen = [cell for cell in look.cells if cell.view.doubt]
    if unseen:
        raise Refusal(f"cell {unseen[0].name}: {unseen[0].why}; nothing was stopped", exit_code=3)
    waiting = [(cell.name, job) for cell in look.cells for job in cell.view.queued]
    running = [cell for cell in look.cells if cell.view.running]
    if not as_json:
        for cell_name, job in waiting:
            typer.echo(f"  cancel  {cell_name}: job {job.job_id} waits")
        for cell in running:
            word = "end" if now else "stop"
            typer.echo(f"{word:>8}  {cell.name}: job {cell.view.running[0].job_id} at iteration {cell.iteration or 0}")
    done = Signalled()
    if (waiting or running) and not dry_run:
        agree("Stop these?", yes)
        done = stop_cells(look.cells, edge, user_name(), now)
    if as_json:
        refused = [{"job_id": job_id, "why": reason} for job_id, reason in done.refused]
        emit({"schema": SCHEMA, "dry_run": dry_run, "asked": list(done.asked), "refused": refused})
    elif not waiting and not running:
        typer.echo("nothing of it runs or waits")
    elif dry_run:
        typer.echo("nothing was changed (--dry-run)")
    for job_id, reason in done.refused:
        say(f"tr11: job {job_id} was not stopped: {reason}")
    raise typer.Exit(1 if done.refused else 0)


app.command("compare")(compare_cells)


# ----------------------------------------------------------------------------- how
def _limit(at_once: int | None, scheduler: Scheduler) -> int:
    """The nodes of the embedded scheduler are one machine: there one cell at a time is the quickest."""
    if at_once is not None:
        return at_once
    return 1 if scheduler.name == "local" else 0


def _text(plan: SweepPlan, card: RunCard) -> str:
    return card_text(card, f"Cell {card.run.variant} of sweep {plan.request.name}, written by `tr11 sweep`.")


def _job(card: RunCard, text: str, scheduler: Scheduler) -> LaunchJob:
    base = PathBase(card.paths.root, "card")  # all its paths are in full
    return LaunchJob(
        card, text, directory_of(card), None, LaunchRequest(), scheduler, open_scheduler, user_name(), base
    )


def _send(
    folder: Path, name: str, jobs: Mapping[int, LaunchJob], scheduler: Scheduler, limit: int, why: str
) -> SentArray:
    sent = submit_cells(folder, name, jobs, scheduler, limit, why)
    if sent.job_id:
        tags = {str(number): record.tag for number, record in sent.records.items()}
        add_array(folder, SweepArray(sent.job_id, scheduler.name, time_now(), user_name(), tags))
    return sent


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
    _show_checks(names, views, as_json)
    if as_json:
        emit({**_document(plan, ""), "exit_code": code, "dry_run": dry_run, **_checks(names, views)})
        return
    if code:
        show_first_data(next(iter(jobs.values())).card)
        typer.echo("nothing was submitted")
    else:
        typer.echo("\nnothing was submitted (--dry-run)")


def _show_sent(folder: Path, plan: SweepPlan, jobs: Mapping[int, LaunchJob], sent: SentArray, as_json: bool) -> None:
    names = {cell.number: cell.name for cell in plan.cells}
    _show_checks(names, sent.views, as_json)
    if as_json:
        checks = _checks(names, sent.views)
        emit({**_document(plan, sent.job_id), "exit_code": sent.exit_code, "dry_run": False, **checks})
    elif sent.job_id:
        edge = next(iter(jobs.values())).scheduler.name
        typer.echo(f"submitted: array {sent.job_id} ({edge}); watch it with `tr11 sweep status {folder} --watch`")
    else:
        typer.echo(f"nothing was submitted; `tr11 sweep resume {folder}` tries again")
    raise typer.Exit(sent.exit_code)


def _show_checks(names: Mapping[int, str], views: Mapping[int, LaunchView], as_json: bool) -> None:
    """What is not fine, once for all cells that share it; what refuses is said on stderr too where stdout is JSON."""
    found: dict[str, tuple[PreflightCheck, list[str]]] = {}
    for number, view in views.items():
        for check in view.checks:
            if check.level is not Level.OK:
                found.setdefault(_without_folder(check, names[number]), (check, []))[1].append(names[number])
    for check, cells in found.values():
        where = "every cell" if len(cells) == len(views) else ", ".join(cells)
        if not as_json:
            show_checks([replace(check, text=f"{where}: {check.text}")])
        elif check.level is not Level.WARNING:
            say(f"tr11: {where}: {check}")


def _without_folder(check: PreflightCheck, name: str) -> str:
    """What makes two cells' checks the same: all but the cell's own name, which is that of its folder."""
    return f"{check.level} {check}".replace(name, "CELL")


def _checks(names: Mapping[int, str], views: Mapping[int, LaunchView]) -> dict[str, Any]:
    return {"checks": {names[number]: checks_value(view.checks) for number, view in views.items()}}


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
