"""`tr11 sweep`: plans a study of a card with some keys varied, sends it, takes it up again,
compares its cells.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any

import typer

from tr11ops.base.errors import SweepError, Unobserved, WrongUsage
from tr11ops.base.units import counted, timestamp
from tr11ops.cli.common import require_file, write_output
from tr11ops.cli.compare import (
    PLOT_LINES,
    WIDTH,
    FromOption,
    PageOption,
    RowsOption,
    ToOption,
    comparison_document,
    comparison_lines,
    range_of_options,
)
from tr11ops.cli.launch_view import first_data_lines
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    NO_RUN,
    REASON,
    SCHEDULER,
    UNCHANGED,
    YES,
    Change,
    Outcome,
    RunContext,
    unasked,
)
from tr11ops.cli.sweep_view import (
    SCHEMA,
    AtOnceOption,
    FolderArgument,
    aligned,
    cell_job,
    look_at,
    of_array,
    open_study,
    send_array,
    show_table,
    study_status,
)
from tr11ops.cluster.base import Scheduler
from tr11ops.curves.compare import ROWS, text_plot
from tr11ops.launch.rehearse import card_text
from tr11ops.observe.readers import open_scheduler
from tr11ops.queue.held_jobs import JobChanges
from tr11ops.report.page import render
from tr11ops.runcard.card import OwnCard, load_card, own_card
from tr11ops.rundir.journal import user_name
from tr11ops.sweep.look import CellState, open_cells, out_of_reach, stop_cells
from tr11ops.sweep.manifest import CARD, create, manifest_of, require_free
from tr11ops.sweep.plan import BatchRule, SweepPlan, SweepRequest, parse_axis, plan_sweep
from tr11ops.sweep.results import (
    MOST_CURVES,
    TITLES,
    StudyResult,
    best_sentence,
    page_of_study,
    read_course,
    result_cells,
    result_values,
    study_result,
)
from tr11ops.sweep.submit import SentArray, check_cells
from trainer.schedule.path import path_of, warmup_samples_of


# ----------------------------------------------------------------------------- change
def resume_study(
    context: Annotated[RunContext, NO_RUN, DRY_RUN, REASON, SCHEDULER, JSON],
    folder: FolderArgument = Path(),
    *,
    at_once: AtOnceOption = None,
) -> Change | Outcome:
    """Take up the cells that failed, were stopped, or never began. What is done, runs or waits is
    left alone.

    Each goes on from its newest sound checkpoint, with the card in its own folder. Nothing is
    submitted while one cell cannot be seen.

    Examples:
      tr11 sweep resume demo-sweep --dry-run
      tr11 sweep resume demo-sweep
    """
    study = open_study(folder)
    look = look_at(study, context.scheduler)
    unseen = [cell for cell in look.cells if cell.state is CellState.UNKNOWN]
    if unseen:
        raise Unobserved(f"cell {unseen[0].name}: {unseen[0].why}; nothing was submitted")
    chosen = open_cells(look.cells)
    if not context.as_json:
        show_table(look)
    if not chosen:
        document = {**look.document(), "submitted": False, "job_id": None, "taken_up": []}
        return Outcome(document, ("\nnothing to take up: every cell is done, runs or waits",))
    edge = look.scheduler
    if edge is None:
        raise Unobserved(f"{look.no_scheduler}; nothing was submitted")
    for cell in chosen:
        if cell.fault:
            raise WrongUsage(f"cell {cell.name}: {cell.fault}; nothing was submitted")
    limit = study.manifest.at_once if at_once is None else at_once
    jobs = {
        cell.number: cell_job(cell.card, study.card_text(cell.name), edge)
        for cell in chosen
        if cell.card
    }
    names = {cell.number: cell.name for cell in chosen}
    taken = ", ".join(names.values())

    def outcome(sent: SentArray, text: str) -> Outcome:
        document = {
            **look.document(),
            "submitted": bool(sent.job_id),
            "job_id": sent.job_id or None,
            "taken_up": list(names.values()) if sent.job_id or context.dry_run else [],
        }
        return of_array(context, names, sent, document, lines=(text,))

    def preview() -> Outcome:
        text = f"\nwould take up: {taken}; nothing was submitted (--dry-run)"
        return outcome(SentArray("", {}, check_cells(jobs)), text)

    def apply() -> Outcome:
        sent = send_array(
            study.folder,
            study.manifest.name,
            jobs=jobs,
            scheduler=edge,
            limit=limit,
            why=context.reason,
        )
        text = "nothing was submitted"
        if sent.job_id:
            text = f"\nsubmitted: array {sent.job_id} ({edge.name}) for {taken}"
        return outcome(sent, text)

    return unasked(apply, preview)


def stop_study(
    context: Annotated[RunContext, NO_RUN, YES, DRY_RUN, SCHEDULER, JSON],
    folder: FolderArgument = Path(),
    *,
    now: Annotated[
        bool, typer.Option("--now", help="End at once: what is not saved is lost.")
    ] = False,
) -> Change:
    """Stop a study: what runs saves and leaves, queued jobs are cancelled. `tr11 sweep resume`
    takes it up again.

    Exit code 0: asked, or nothing to stop; 1: a job is someone else's, or a cell's trainer is out
    of this scheduler's reach; 3: the scheduler did not answer.

    Examples:
      tr11 sweep stop demo-sweep --dry-run
      tr11 sweep stop demo-sweep --yes
    """
    study = open_study(folder)
    look = look_at(study, context.scheduler)
    edge = look.scheduler
    if edge is None:
        raise Unobserved(f"{look.no_scheduler}; nothing was stopped")
    unseen = [cell for cell in look.cells if cell.view.read_error]
    if unseen:
        raise Unobserved(f"cell {unseen[0].name}: {unseen[0].why}; nothing was stopped")
    waiting = [(cell.name, job) for cell in look.cells for job in cell.view.queued]
    running = [cell for cell in look.cells if cell.view.running]
    elsewhere = tuple(out_of_reach(look.cells))
    verb = "end" if now else "stop"
    lines = [f"  cancel  {cell_name}: job {job.job_id} waits" for cell_name, job in waiting]
    lines += [
        f"{verb:>8}  {cell.name}: job {cell.view.running[0].job_id} at iteration {cell.iteration or 0}"
        for cell in running
    ]

    def outcome(done: JobChanges, *texts: str) -> Outcome:
        missed = [*done.refused, *((job_id, reason) for _, job_id, reason in elsewhere)]
        notes = [f"tr11: job {job_id} was not stopped: {reason}" for job_id, reason in done.refused]
        for cell, _, reason in elsewhere:
            card = study.folder / cell.name / CARD
            notes.append(
                f"tr11: cell {cell.name} is not stopped: {reason}; "
                f"`tr11 kill --run {card}` stops it by its directory"
            )
        document = {
            "schema": SCHEMA,
            "dry_run": context.dry_run,
            "asked": list(done.done),
            "refused": [{"job_id": job_id, "why": reason} for job_id, reason in missed],
        }
        return Outcome(document, texts, notes, exit_code=1 if missed else 0)

    def apply() -> Outcome:
        return outcome(stop_cells(look.cells, edge, user_name(), now))

    preview, nothing = outcome(JobChanges(), UNCHANGED), None
    if not waiting and not running:
        nothing = outcome(JobChanges())
        if not elsewhere:
            nothing = preview = outcome(JobChanges(), "nothing of it runs or waits")
    return Change(
        () if context.as_json else lines,
        "Stop these?",
        apply,
        preview,
        nothing=nothing,
        unchanged="",
        is_answer=True,
    )


# ----------------------------------------------------------------------------- compare
def compare_cells(
    context: Annotated[RunContext, NO_RUN, SCHEDULER, JSON],
    folder: FolderArgument = Path(),
    *,
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cell",
            metavar="NAME",
            help="Only this cell; may be repeated. The first"
            " one named is what the others are compared with.",
        ),
    ] = None,
    first: FromOption = None,
    last: ToOption = None,
    rows: RowsOption = ROWS,
    lines: Annotated[
        int | None,
        typer.Option(
            "--smooth",
            metavar="LINES",
            min=1,
            max=10_000,
            help="A row is the mean of so many lines; without: 20, at most a tenth of a course.",
        ),
    ] = None,
    output: PageOption = None,
) -> Outcome:
    """Compare the cells: results, then the loss against samples and against wall time.

    `valid.` is the last validation loss. `~` marks a difference that may be noise: less than two
    standard errors. `min` are minutes of training, without waits. At most eight curves are drawn:
    choose them with --cell. --from and --to zoom the curves in.

    Examples:
      tr11 sweep compare demo-sweep
      tr11 sweep compare demo-sweep -o comparison.html
      tr11 sweep compare demo-sweep --cell batch512 --cell batch1024 --json
    """
    if output is not None:
        require_file(output, "--output")
    within = range_of_options(first, last)
    study = open_study(folder)
    known = [cell.name for cell in study.manifest.cells]
    for name in cells or ():
        if name not in known:
            raise WrongUsage(
                f"--cell {name}: is no cell of {study.folder}; the cells are {', '.join(known)}",
            )
        if study.cards[name].card is None:
            raise WrongUsage(f"--cell {name}: {study.cards[name].fault}")
    look = look_at(study, context.scheduler)
    notes = [f"tr11: {fault}" for fault in look.faults]
    states = {cell.name: cell.state.value for cell in look.cells}
    chosen = list(dict.fromkeys(cells or known))
    try:
        courses = [
            read_course(name, states[name], card)
            for name in chosen
            if (card := study.cards[name].card)
        ]
        result = study_result(study.manifest.name, courses, lines=lines, rows=rows, within=within)
    except ValueError as error:
        raise Unobserved(str(error)) from None
    if output is not None:
        write_output(output, render(page_of_study(result, timestamp(time.time(), None))))
        notes.append(f"written: {output}")
    return Outcome(
        {**_compare_document(result), **within.document()},
        _screen(result, len(chosen), str(within)),
        notes,
    )


def _screen(result: StudyResult, count: int, within: str) -> Iterator[str]:
    yield from textwrap.wrap(f"sweep {result.name}: {best_sentence(result.rows)}", WIDTH)
    yield ""
    yield from aligned([TITLES, *map(result_cells, result.rows)])
    for axis, compared in result.compared.items():
        curves = result.curves[axis]
        yield ""
        yield f"loss by {axis}, means of {compared.lines} lines {within}".rstrip()
        for letter, curve in zip(ascii_uppercase, curves, strict=False):
            yield f"  {letter}  {curve.name}"
        yield ""
        yield from text_plot(curves, WIDTH, PLOT_LINES)
        yield ""
        yield from comparison_lines(compared, axis)
    if count > MOST_CURVES:
        yield ""
        yield f"{count - MOST_CURVES} cells are not drawn: choose with --cell"


def _compare_document(result: StudyResult) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "name": result.name,
        "cells": [result_values(row) for row in result.rows],
        "compared": {
            axis: {"cells": list(compared.names), **comparison_document(compared, axis)}
            for axis, compared in result.compared.items()
        },
    }


# ----------------------------------------------------------------------------- the commands
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
    context: Annotated[RunContext, SCHEDULER, JSON, DRY_RUN, REASON],
    *,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY=V1,V2", help="A key of the card and its values; may be repeated."
        ),
    ] = None,
    rule: Annotated[
        BatchRule,
        typer.Option(
            "--rule", help="How rate and warm-up follow the batch, where the grid varies it."
        ),
    ] = "sqrt",
    equal_samples: Annotated[
        bool,
        typer.Option(
            "--equal-samples", help="Every cell ends, evaluates and saves at the same samples."
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the study and its jobs [RUN-sweep]."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-d",
            metavar="FOLDER",
            help="Folder of the study; without: beside the card's run.",
        ),
    ] = None,
    at_once: AtOnceOption = None,
) -> Change | None:
    """Plan a study and submit it."""
    if ctx.invoked_subcommand is not None:
        return None
    plan = _planned(context, grid or [], rule=rule, equal=equal_samples, name=name, folder=folder)
    require_free(plan)
    scheduler = open_scheduler(context.scheduler)
    limit = _limit(at_once, scheduler)
    jobs = {
        cell.number: cell_job(cell.card, _text(plan, cell.card), scheduler) for cell in plan.cells
    }
    names = {cell.number: cell.name for cell in plan.cells}
    folder = plan.request.folder

    def outcome(sent: SentArray, *lines: str) -> Outcome:
        document = {
            **_document(plan, sent.job_id),
            "exit_code": sent.exit_code,
            "dry_run": context.dry_run,
        }
        return of_array(context, names, sent, document, lines=lines)

    def apply() -> Outcome:
        manifest = manifest_of(plan, context.card_path, limit)
        create(plan, manifest, {cell.name: jobs[cell.number].card_toml for cell in plan.cells})
        sent = send_array(
            folder,
            manifest.name,
            jobs=jobs,
            scheduler=scheduler,
            limit=limit,
            why=context.reason,
        )
        text = f"nothing was submitted; `tr11 sweep resume {folder}` tries again"
        if sent.job_id:
            text = (
                f"submitted: array {sent.job_id} ({scheduler.name}); "
                f"watch it with `tr11 sweep status {folder} --watch`"
            )
        return outcome(sent, text)

    checked, nothing = SentArray("", {}, check_cells(jobs)), None
    preview = outcome(checked, "\nnothing was submitted (--dry-run)")
    if checked.exit_code:
        data = first_data_lines(next(iter(jobs.values())).card)
        nothing = preview = outcome(checked, *data, "nothing was submitted")
    return Change(
        () if context.as_json else _plan_lines(plan, limit),
        "",
        apply,
        preview,
        nothing=nothing,
        unchanged="",
        is_answer=True,
    )


def _planned(
    context: RunContext,
    grid: Sequence[str],
    rule: BatchRule,
    equal: bool,
    name: str | None,
    folder: Path | None,
) -> SweepPlan:
    """Read card and grid. Raises CardError, SweepError."""
    axes = tuple(parse_axis(text) for text in grid)
    if not axes:
        raise SweepError("give what to vary: --grid batch.global_batch_size=512,1024,2048")
    path, base = context.card_path, own_card(context.card, "a sweep")
    if folder:
        chosen = folder.absolute()
    else:
        chosen = base.paths.root.with_name(f"{base.paths.root.name}-sweep")
    named = tuple(text.partition("=")[0] for text in context.overrides)
    request = SweepRequest(
        axes,
        name or f"{base.run.name}-sweep",
        folder=Path(os.path.normpath(chosen)),
        rule=rule,
        equal_samples=equal,
        named=named,
    )

    def load(overrides: Sequence[str]) -> OwnCard:
        if overrides:
            changed = load_card(path, (*context.overrides, *overrides), os.environ)
            return own_card(changed, "a sweep")
        return base

    return plan_sweep(load, request)


# ----------------------------------------------------------------------------- what comes later
app.command("status")(study_status)
app.command("resume")(resume_study)
app.command("stop")(stop_study)
app.command("compare")(compare_cells)


def _limit(at_once: int | None, scheduler: Scheduler) -> int:
    """The nodes of the embedded scheduler are one machine: there one cell at a time is the
    quickest.
    """
    if at_once is not None:
        return at_once
    if scheduler.name == "local":
        return 1
    return 0


def _text(plan: SweepPlan, card: OwnCard) -> str:
    return card_text(
        card, f"Cell {card.run.variant} of sweep {plan.request.name}, written by `tr11 sweep`."
    )


# ----------------------------------------------------------------------------- words
def _plan_lines(plan: SweepPlan, limit: int) -> Iterator[str]:
    """A row for each cell: its settings by its name, and what follows from them."""
    request = plan.request
    yield f"sweep {request.name}: {counted(len(plan.cells), 'cell')} in {request.folder}"
    at_once = str(limit or "as many")
    yield f"one array, {at_once} at a time{'' if limit else ' as the scheduler starts'}"
    rows = [("cell", "batch", "rate", "warm-up", "steps", "samples")]
    for cell in plan.cells:
        end = path_of(cell.card).end
        rows.append(
            (
                cell.name,
                f"{cell.card.batch.global_batch_size:,}",
                f"{cell.card.schedule.learning_rate:.4g}",
                f"{warmup_samples_of(cell.card):,.0f}",
                f"{end.iteration:,}",
                f"{end.consumed_samples:,}",
            )
        )
    yield from ("", *aligned(rows), "")


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
