"""The names of the folders in which the starts of a foreign trainer save, where each has its own; see
`tr11ops.trainers.start_folders`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tr11ops.dialects.settings import TrainerSettings

CURRENT = "current"
_START = re.compile(r"start-(?P<number>[1-9]\d{0,8})")


def current_folder(settings: TrainerSettings) -> Path | None:
    """Where the newest start saves; None where nothing tells where checkpoints lie."""
    base = settings.checkpoint_folder
    if base is None or not settings.saves_apart:
        return base
    newest = base / CURRENT
    if newest.is_dir():
        return newest
    return base


def name_fault(settings: TrainerSettings) -> str:
    """Why its starts cannot have folders of their own, though its command asks for that; "" where they can."""
    rules = settings.dialect.checkpoints
    if rules is None or settings.checkpoint_folder is None:
        return "{save} needs to know where checkpoints lie: set trainer.folder and a dialect, or trainer.checkpoints"
    if rules.names.fits("start-1") or rules.names.fits(CURRENT):
        return f"{{save}} makes folders named start-1 and {CURRENT}, which bear the name of a checkpoint ({rules.name})"
    if any("{folder}" in word for word in settings.resume):
        return (
            "trainer.resume says {folder}, and what a start goes on from lies in {save}: say that"
        )
    return ""


def folder_of(base: Path, number: int) -> Path:
    """Where a start saves; what lies beside those folders is of number 0."""
    if number:
        return base / f"start-{number}"
    return base


def base_of(folder: Path) -> Path:
    """Of a folder in which a start saves, or by which the newest is read: where all of them lie."""
    if folder.name == CURRENT or _START.fullmatch(folder.name):
        return folder.parent
    return folder


def start_numbers(base: Path) -> list[int]:
    """Of the starts that have a folder, the newest first. Raises OSError."""
    if not base.is_dir():
        return []
    found = (_START.fullmatch(one.name) for one in base.iterdir() if one.is_dir())
    return sorted((int(match["number"]) for match in found if match is not None), reverse=True)
