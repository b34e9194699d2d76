"""The cards of a study's cells as they are now: each is read for itself, and compared with the
plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tr11ops.launch.rehearse import as_options, differences
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.paths import RunDirectory
from tr11ops.sweep.manifest import CARD, ManifestCell
from trainer.config.card import CardError
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

KILL_SWITCH = "kill-switch"  # no cell has one elsewhere (see `plan.REMOVED`)
Load = Callable[[Path, Sequence[str]], RunCard]


class CellCard(Record):
    """One cell's card, None where it cannot be used; then `directory` is the one that the plan gave
    the cell.

    `fault`: why the cell is not to be taken up with it, in one line; "" for none.
    """

    card: RunCard | None
    directory: RunDirectory
    fault: str = ""


def read_cell_card(folder: Path, study: str, cell: ManifestCell, load: Load) -> CellCard:
    """Read the card of one cell of the study in `folder`. `load` reads a card with overrides, and
    raises CardError.
    """
    root = folder / cell.name
    path = root / CARD
    try:
        card = load(path, ())
    except (CardError, OSError) as error:
        planned = RunDirectory(RunPaths(root, study, cell.name), root / KILL_SWITCH)
        gone = (
            f"{path}: there is no card; if planning was cut short, remove {folder} and plan again"
        )
        return CellCard(
            None, planned, " ".join(str(error).split()) if os.path.lexists(path) else gone
        )
    return CellCard(
        card, RunDirectory(card.paths, card.kill_switch), _changed(path, study, cell, card, load)
    )


def _changed(path: Path, study: str, cell: ManifestCell, card: RunCard, load: Load) -> str:
    """What of the plan the card does not say any more: it would train something else, or elsewhere."""
    if card.paths.root.resolve() != path.parent.resolve():
        return (
            f"{path}: its run directory is {card.paths.root}, not the folder that it is in: the study was moved, or"
            " the card changed; put it back"
        )
    own = as_options({"run.name": study, "run.variant": cell.name, **cell.derived})
    try:
        planned = load(path, (*own, *(f"{key}={value}" for key, value in cell.settings.items())))
    except CardError as error:
        return f"{' '.join(str(error).split())} (as it was planned)"
    found = [
        f"{key} = {now} where {was} was planned" for key, now, was in differences(card, planned)
    ]
    if found:
        return f"{path}: {'; '.join(found)}: put it back, or make it a study of its own"
    return ""
