"""`tr11 sweep resume` and `stop`: what changes a study that was submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import DryRunOption, JsonOption, SchedulerOption, YesOption, agree, say
from tr11ops.cli.context import emit
from tr11ops.cli.sweep_send import AtOnceOption, WhyOption, cell_checks, cell_job, send_array, show_cell_checks
from tr11ops.cli.sweep_view import SCHEMA, FolderArgument, look_at, open_study, refusals, show_table
from tr11ops.queue.stop import Signalled
from tr11ops.rundir.journal import user_name
from tr11ops.sweep.look import CellState, open_cells
from tr11ops.sweep.manifest import CARD
from tr11ops.sweep.stop import out_of_reach, stop_cells
from tr11ops.sweep.submit import SentArray, check_cells


def resume_study(
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
    for cell in chosen:
        if cell.fault:
            raise Refusal(f"cell {cell.name}: {cell.fault}; nothing was submitted", exit_code=2)
    limit = study.manifest.at_once if at_once is None else at_once
    jobs = {cell.number: cell_job(cell.card, study.card_text(cell.name), edge) for cell in chosen if cell.card}
    names = {cell.number: cell.name for cell in chosen}
    sent = SentArray("", {}, check_cells(jobs)) if dry_run else None
    with refusals():
        sent = sent or send_array(study.folder, study.manifest.name, jobs, edge, limit, why)
    show_cell_checks(names, sent.views, as_json)
    if as_json:
        taken = list(names.values()) if sent.job_id or dry_run else []
        emit({**look.document(), "submitted": bool(sent.job_id), "job_id": sent.job_id or None, "taken_up": taken,
              **cell_checks(names, sent.views)})  # fmt: skip
    elif sent.job_id:
        typer.echo(f"\nsubmitted: array {sent.job_id} ({edge.name}) for {', '.join(names.values())}")
    elif dry_run:
        typer.echo(f"\nwould take up: {', '.join(names.values())}; nothing was submitted (--dry-run)")
    else:
        typer.echo("nothing was submitted")
    raise typer.Exit(sent.exit_code)


def stop_study(
    folder: FolderArgument = Path(),
    *,
    now: Annotated[bool, typer.Option("--now", help="End at once: what is not saved is lost.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Stop a study: what runs saves and leaves, queued jobs are cancelled. `tr11 sweep resume` takes it up again.

    Exit code 0: asked, or nothing to stop; 1: a job is someone else's, or a cell's trainer is out of this scheduler's
    reach; 3: the scheduler did not answer.

    Examples:
      tr11 sweep stop demo-sweep --dry-run
      tr11 sweep stop demo-sweep --yes
    """
    study = open_study(folder)
    look = look_at(study, scheduler)
    edge = look.scheduler
    if edge is None:
        raise Refusal(f"{look.no_scheduler}; nothing was stopped", exit_code=3)
    unseen = [cell for cell in look.cells if cell.view.read_error]
    if unseen:
        raise Refusal(f"cell {unseen[0].name}: {unseen[0].why}; nothing was stopped", exit_code=3)
    waiting = [(cell.name, job) for cell in look.cells for job in cell.view.queued]
    running = [cell for cell in look.cells if cell.view.running]
    elsewhere = tuple(out_of_reach(look.cells))
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
        missed = [*done.refused, *((job_id, reason) for _, job_id, reason in elsewhere)]
        refused = [{"job_id": job_id, "why": reason} for job_id, reason in missed]
        emit({"schema": SCHEMA, "dry_run": dry_run, "asked": list(done.asked), "refused": refused})
    elif not waiting and not running and not elsewhere:
        typer.echo("nothing of it runs or waits")
    elif dry_run:
        typer.echo("nothing was changed (--dry-run)")
    for job_id, reason in done.refused:
        say(f"tr11: job {job_id} was not stopped: {reason}")
    for cell, _, reason in elsewhere:
        card = study.folder / cell.name / CARD
        say(f"tr11: cell {cell.name} is not stopped: {reason}; `tr11 kill --run {card}` stops it by its directory")
    raise typer.Exit(1 if done.refused or elsewhere else 0)
