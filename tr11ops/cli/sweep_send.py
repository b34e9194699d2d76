"""How `tr11 sweep` submits cells: each is a launch of its own, all are one array; and what stands in their way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.cli.common import directory_of, open_scheduler, say
from tr11ops.cli.launch_view import checks_value, show_checks
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.session import LaunchJob
from tr11ops.runcard.card import PathBase, RunCard
from tr11ops.runcard.check import Level
from tr11ops.rundir.journal import user_name
from tr11ops.sweep.manifest import SweepArray, add_array
from tr11ops.sweep.submit import SentArray, submit_cells
from trainer.contract.files import now as time_now

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.launch.session import LaunchView
    from tr11ops.runcard.check import PreflightCheck

AtOnceOption = Annotated[
    int | None,
    typer.Option(
        "--at-once", min=0, metavar="N", show_default=False,
        help="Cells that may run at the same time, 0: no limit; without: none, on the embedded scheduler 1.",
    ),
]  # fmt: skip
WhyOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the journal of each cell.")]


def cell_job(card: RunCard, text: str, scheduler: Scheduler) -> LaunchJob:
    """A cell as a launch of its own; `text` is the card as it is kept."""
    base = PathBase(card.paths.root, "card")  # all its paths are in full
    return LaunchJob(
        card, text, directory_of(card), None, LaunchRequest(), scheduler, open_scheduler, user_name(), base
    )


def send_array(
    folder: Path, name: str, jobs: Mapping[int, LaunchJob], scheduler: Scheduler, limit: int, why: str
) -> SentArray:
    """Submit cells, by number, as one array, and put it on record. Raises as `submit_cells` and `add_array` do."""
    sent = submit_cells(folder, name, jobs, scheduler, limit, why)
    if sent.job_id:
        tags = {str(number): record.tag for number, record in sent.records.items()}
        add_array(folder, SweepArray(sent.job_id, scheduler.name, time_now(), user_name(), tags))
    return sent


def show_cell_checks(names: Mapping[int, str], views: Mapping[int, LaunchView], as_json: bool) -> None:
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


def cell_checks(names: Mapping[int, str], views: Mapping[int, LaunchView]) -> dict[str, Any]:
    """Every cell's checks, for --json."""
    return {"checks": {names[number]: checks_value(view.checks) for number, view in views.items()}}
