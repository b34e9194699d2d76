"""Running rounds of the periodic jobs, for `tr11 cron run` and for a link of a chain."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.cli.common import directory_of, nothing_there, open_reader, read_card
from tr11ops.cron.drop_ins import script_command
from tr11ops.cron.jobs import table, wanted
from tr11ops.cron.runner import WAYS, CronContext, child_environment, run_due, run_job, tr11_command
from tr11ops.observe.mounted import was_never_launched, why_not_there
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.sweep.find import studies_in
from tr11ops.sweep.manifest import CARD
from trainer.config.card import CardError
from trainer.contract.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.cron.jobs import PeriodicJob
    from tr11ops.cron.runner import CronRound
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

WATCHING = "pulse"


def cron_context_of(
    card: RunCard, path: Path, overrides: Sequence[str] | None, way: str, must_end: StopEvent | None = None
) -> CronContext:
    """Where rounds run. Raises Refusal where nothing was launched.

    One that is not there is watched all the same, unless nothing at all tells that there was one: whoever installed
    the periodic jobs has seen it.
    """
    directory = directory_of(card)
    if way not in WAYS and is_never_launched(directory):
        raise nothing_there(directory)
    return CronContext(
        why_not_there=lambda: why_not_there(directory, open_reader(directory, "auto"), time.time()),
        must_end=must_end or StopEvent(),
        directory=directory,
        way=way,
        folder=Path.cwd(),
        environment={**child_environment(os.environ), "TR11_RUN": str(path)},
        command=lambda job: (
            tr11_command(job.words, path, overrides or ()) if job.script is None else script_command(job.script)
        ),
    )


def is_never_launched(directory: RunDirectory) -> bool:
    """Whether nothing tells of a run: the scheduler is asked only where there is no directory, and no rounds of it."""
    if directory.exists or existing_fallback(directory) is not None:
        return False
    return was_never_launched(directory, open_reader(directory, "auto"))


class WatchedCell(Record):
    """One launched cell of a study, and the job that watches it."""

    name: str
    context: CronContext
    jobs: tuple[PeriodicJob, ...]


def watched_cells(card: RunCard, path: Path, way: str, must_end: StopEvent) -> Iterator[WatchedCell]:
    """The launched cells of every study that was planned from this card, found anew. One that is damaged is left out.

    A cell is watched by `pulse` alone, which only tells: what goes on in a study is decided by `tr11 sweep resume`.
    It has no archive and no hub (its card is planned without), and the rest would come once for each cell, of the same
    disks and nodes.
    Studies are looked for in the current folder and beside the card's run directory.
    """
    for folder, manifest in studies_in((Path.cwd(), card.paths.root.parent)):
        if os.path.realpath(manifest.card) != os.path.realpath(path):
            continue
        for cell in manifest.cells:
            cell_path = folder / cell.name / CARD
            try:
                cell_card = read_card(str(cell_path))
                launched = any(directory_of(cell_card).submissions.iterdir())
            except (CardError, OSError):
                continue
            if launched:
                jobs = tuple(
                    replace(job, words=(*job.words, "--no-act"))
                    for job in wanted(table(cell_card))
                    if job.name == WATCHING
                )
                context = cron_context_of(cell_card, cell_path, (), way, must_end)
                yield WatchedCell(f"{manifest.name}/{cell.name}", context, jobs)


def run_rounds(cron_context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool = False) -> tuple[CronRound, ...]:
    """Run what is due, or all of it. A signal ends what runs, which is recorded, and starts nothing more."""
    with obeying(lambda _: cron_context.must_end.set()):
        return tuple(run_job(cron_context, job, forced=True) for job in jobs) if forced else run_due(cron_context, jobs)


def run_cell_rounds(cells: Iterable[WatchedCell], forced: bool = False) -> Iterator[tuple[str, CronRound]]:
    """The rounds of cells, each with the cell's name; `forced`: due or not."""
    for cell in cells:
        if cell.context.must_end.is_set():
            return
        rounds = (
            tuple(run_job(cell.context, job, forced=True) for job in cell.jobs)
            if forced
            else run_due(cell.context, cell.jobs)
        )
        for done in rounds:
            yield cell.name, done


def exit_code(done: CronRound) -> int:
    """What a command that ran one round returns: 1 for a failure. What a job found is in the job's own record."""
    return 1 if done.result in {"failed", "not recorded"} else 0
