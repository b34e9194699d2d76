"""What the `tr11 sweep` commands share: a study that was planned, how it stands, and its array that
is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tr11ops.base.errors import Refusal
from tr11ops.base.observed import Unknown
from tr11ops.base.units import finite
from tr11ops.cli.common import USUAL, directory_of, drawing_console, in_time, read_card
from tr11ops.cli.launch_view import check_lines, checks_value
from tr11ops.cli.progress import look_again
from tr11ops.cli.runner import JSON, NO_RUN, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.select import SharedOverview
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.session import LaunchJob, LaunchView
from tr11ops.observe.readers import CLUSTERS, looking, open_if_there, open_scheduler
from tr11ops.runcard.card import OwnCard, PathBase, RunCard, own_card
from tr11ops.runcard.check import Level, PreflightCheck
from tr11ops.rundir.journal import user_name
from tr11ops.sweep.look import (
    CellCard,
    CellProgress,
    CellState,
    NoScheduler,
    look_at_cell,
    read_cell_card,
)
from tr11ops.sweep.manifest import (
    CARD,
    SweepArray,
    SweepManifest,
    add_array,
    find_study,
    require_manifest,
)
from tr11ops.sweep.submit import SentArray, submit_cells
from trainer.config.card import CardError
from trainer.contract.files import now as time_now
from trainer.contract.record import JsonObject, Record

SCHEMA = 1
WATCH_SECONDS = 5.0
LEAST_ROOM = 8  # columns in which a reason still says something


# ----------------------------------------------------------------------------- send
AtOnceOption = Annotated[
    int | None,
    typer.Option(
        "--at-once",
        min=0,
        metavar="N",
        show_default=False,
        help="Cells that may run at the same time, 0: no limit; without: none, on the embedded scheduler 1.",
    ),
]


def cell_job(card: RunCard, text: str, scheduler: Scheduler) -> LaunchJob:
    """A cell as a launch of its own; `text` is the card as it is kept."""
    base = PathBase(card.paths.root, "card")  # all its paths are in full
    return LaunchJob(
        card,
        text,
        directory=directory_of(card),
        array=None,
        # a cell's task goes back into the queue by itself, and shall wait there
        request=LaunchRequest(may_expedite=False),
        scheduler=scheduler,
        other_scheduler=open_scheduler,
        user=user_name(),
        base=base,
    )


def send_array(
    folder: Path,
    name: str,
    jobs: Mapping[int, LaunchJob],
    scheduler: Scheduler,
    limit: int,
    why: str,
) -> SentArray:
    """Submit cells, by number, as one array, and put it on record. Raises as `submit_cells` and
    `add_array` do.
    """
    sent = submit_cells(folder, name, jobs=jobs, scheduler=scheduler, at_once=limit, why=why)
    if sent.job_id:
        tags = {str(number): record.tag for number, record in sent.records.items()}
        add_array(
            folder,
            SweepArray(sent.job_id, scheduler.name, time=time_now(), user=user_name(), tags=tags),
        )
    return sent


def of_array(
    context: RunContext,
    names: Mapping[int, str],
    sent: SentArray,
    document: JsonObject,
    lines: Sequence[str],
) -> Outcome:
    """The answer about an array that was sent, or would be. What is not fine of its cells stands
    before the `lines`; what refuses is said on stderr too where stdout is JSON.
    """
    found = [(where, check) for where, check in _not_fine(names, sent.views)]
    shown = (replace(check, text=f"{where}: {check.text}") for where, check in found)
    refused: tuple[str, ...] = ()
    if context.as_json:
        refused = tuple(
            f"tr11: {where}: {check}" for where, check in found if check.level is not Level.WARNING
        )
    checks = {names[number]: checks_value(view.checks) for number, view in sent.views.items()}
    return Outcome(
        {**document, "checks": checks},
        (*check_lines(shown), *lines),
        refused,
        exit_code=sent.exit_code,
    )


def _not_fine(
    names: Mapping[int, str], views: Mapping[int, LaunchView]
) -> Iterator[tuple[str, PreflightCheck]]:
    """Every check that is not fine, once for all cells that share it, behind their names."""
    found: dict[str, tuple[PreflightCheck, list[str]]] = {}
    for number, view in views.items():
        for check in view.checks:
            if check.level is not Level.OK:
                found.setdefault(_without_folder(check, names[number]), (check, []))[1].append(
                    names[number]
                )
    for check, cells in found.values():
        where = ", ".join(cells)
        if len(cells) == len(views):
            where = "every cell"
        yield where, check


def _without_folder(check: PreflightCheck, name: str) -> str:
    """What makes two cells' checks the same: all but the cell's own name, which is that of its
    folder.
    """
    return f"{check.level} {check}".replace(name, "CELL")


# ----------------------------------------------------------------------------- the commands
_STYLES = {
    CellState.DONE: "green",
    CellState.RUNNING: "cyan",
    CellState.QUEUED: "cyan",
    CellState.STOPPED: "yellow",
    CellState.FAILED: "bold red",
    CellState.NEW: "yellow",
    CellState.UNKNOWN: "magenta",
}

FolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="[STUDY]",
        show_default=False,
        help="Folder of the study, or its name; else this folder.",
    ),
]


class Study(Record):
    """A study on disk: its folder, its manifest, and each cell's card by name."""

    folder: Path
    manifest: SweepManifest
    cards: dict[str, CellCard]

    def card_text(self, name: str) -> str:
        """The card of a cell as it is written. Raises OSError."""
        return (self.folder / name / CARD).read_text(encoding="utf-8")


def open_study(word: Path) -> Study:
    """Read the study of a folder, or of a name. One card that is damaged hides no other cell.
    Raises Refusal, OSError.

    A name is looked for in this folder, and where a study of the card would be made.
    """

    def read() -> Study:
        place = find_study(word, _places())
        manifest = require_manifest(place)
        cards = {
            cell.name: read_cell_card(place, manifest.name, cell, _load) for cell in manifest.cells
        }
        return Study(place, manifest, cards)

    return in_time(read)


def _places() -> Iterator[Path]:
    yield Path.cwd()
    with suppress(Refusal, CardError, OSError):
        yield read_card(None).paths.root.parent


def _load(path: Path, overrides: Sequence[str]) -> OwnCard:
    return own_card(read_card(str(path), overrides), "a sweep")


class StudyLook(Record):
    """A study at one moment. `scheduler` is None where there is none, and `no_scheduler` says why."""

    study: Study
    cells: tuple[CellProgress, ...]
    scheduler: Scheduler | None
    no_scheduler: str = ""

    @property
    def exit_code(self) -> int:
        """1 where a cell failed, else 3 where one could not be seen."""
        states = {cell.state for cell in self.cells}
        is_unseen = CellState.UNKNOWN in states or any(cell.card is None for cell in self.cells)
        if CellState.FAILED in states:
            return 1
        if is_unseen:
            return 3
        return 0

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the cells' cards, a line for each."""
        return tuple(f"cell {cell.name}: {cell.fault}" for cell in self.cells if cell.fault)

    def document(self) -> dict[str, object]:
        """For --json."""
        manifest = self.study.manifest
        return {
            "schema": SCHEMA,
            "name": manifest.name,
            "directory": str(self.study.folder),
            "user": manifest.user,
            "rule": manifest.rule,
            "exit_code": self.exit_code,
            "cells": [
                {**cell_values(cell), "settings": one.settings}
                for cell, one in zip(self.cells, manifest.cells, strict=True)
            ],
        }

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        """The table. Columns keep to the terminal's width; a cell's name is never cut."""
        rows = [(cell.name, cell.state.value, *_measured(cell)) for cell in self.cells]
        titles = ("cell", "state", "iteration", "loss", "tokens/s")
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        room = (width or USUAL) - sum(widths) - 2 * len(widths)  # what is left for the reason
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for index, title in enumerate(titles):
            table.add_column(title, no_wrap=True, justify="right" if index > 1 else "left")
        table.add_column("", no_wrap=True)
        for cell, row in zip(self.cells, rows, strict=True):
            why = Text(cell.why if room >= LEAST_ROOM else "")
            why.truncate(max(LEAST_ROOM, room), overflow="ellipsis")
            table.add_row(row[0], Text(row[1], _STYLES[cell.state]), *row[2:], why)
        done = sum(cell.state is CellState.DONE for cell in self.cells)
        head = f"sweep {self.study.manifest.name}: {done} of {len(self.cells)} done"
        return Group(Text(head, "bold"), table)


def cell_values(cell: CellProgress) -> JsonObject:
    """One cell for a machine."""
    return {
        "number": cell.number,
        "name": cell.name,
        "state": cell.state.value,
        "why": cell.why,
        "directory": str(cell.directory.root),
        "job_ids": [job.job_id for job in cell.jobs],
        "iteration": cell.iteration,
        "total_iterations": cell.total_iterations,
        "consumed_samples": cell.samples,
        "loss": finite(cell.loss),
        "tokens_per_second": cell.tokens_per_second,
        "checkpoint": cell.view.checkpoint,
        "card_fault": cell.fault or None,
    }


def _measured(cell: CellProgress) -> tuple[str, str, str]:
    iteration = f"{cell.iteration or 0}/{cell.total_iterations or '-'}"
    if cell.loss is None:
        loss = "-"
    else:
        loss = f"{cell.loss:.4f}"
    return (
        iteration,
        loss,
        "-" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
    )


def look_at(study: Study, kind: str) -> StudyLook:
    """Look at every cell. `kind` is what --scheduler says; auto: where the study went last."""
    if kind == "auto" and study.manifest.scheduler in CLUSTERS:
        wanted = study.manifest.scheduler
    else:
        wanted = kind
    found = open_if_there(wanted)
    if isinstance(found, Unknown):
        edge, why = (None, found.why)
    else:
        edge, why = (found, "")
    queue = SharedOverview(NoScheduler(why) if edge is None else looking(edge))
    cells = tuple(
        look_at_cell(one.number, one.name, study.cards[one.name], queue)
        for one in study.manifest.cells
    )
    return StudyLook(study, cells, edge, why)


def show_table(look: StudyLook) -> None:
    """The table on standard output."""
    console = drawing_console()
    console.print(look.screen(console.width))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of text in columns: the first to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((f"{row[0]:<{widths[0]}}", *cells)).rstrip()


def study_status(
    context: Annotated[RunContext, NO_RUN, SCHEDULER, JSON],
    folder: FolderArgument = Path(),
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C.")
    ] = False,
) -> Outcome:
    """The cells of a study: state, iteration, loss, tokens a second.

    Exit code 0: none failed; 1: one failed; 3: one could not be seen.

    Examples:
      tr11 sweep status demo-sweep
      tr11 sweep status --watch
    """
    study = open_study(folder)
    seen = partial(look_at, study, context.scheduler)
    if watch:
        return look_again(seen, WATCH_SECONDS, context.as_json)
    look = seen()
    return Outcome(
        look.document(),
        notes=[f"tr11: {fault}" for fault in look.faults],
        exit_code=look.exit_code,
        screen=partial(show_table, look),
    )
