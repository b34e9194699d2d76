"""Several runs at once: which run directories lie below some folders, and what each one's status
says in short.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tr11ops.runcard.card import RunCard, card_from_resolved, load_card
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

DEEPEST = 4  # folders below a root in which run directories are looked for
_MARK = Path("state") / "submissions"  # every run that was launched has it
_PROGRESS = ("iteration", "total_iterations", "loss", "remaining_seconds", "eta", "done_again")
_SHOWN = ("verdict", "why", "exit_code", *_PROGRESS)


class ListedRun(Record):
    """A run directory, and its status; `status` is None where it could not be read, and `why` says
    why not.
    """

    directory: Path
    status: dict[str, Any] | None
    why: str = ""

    @property
    def exit_code(self) -> int:
        if self.status is None:
            return 3
        return int(self.status["exit_code"])

    def document(self) -> dict[str, Any]:
        """For --json."""
        if self.status is None:
            unknown: dict[str, Any] = dict.fromkeys(_SHOWN)
            return {
                "directory": str(self.directory),
                "name": None,
                "variant": None,
                **unknown,
                "verdict": "unknown",
                "why": self.why,
                "exit_code": 3,
            }
        run = self.status["run"]
        shown = {key: self.status[key] for key in _SHOWN}
        return {
            "directory": str(self.directory),
            "name": run["name"],
            "variant": run["variant"],
            **shown,
        }


def run_directories(root: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """The run directories at and below `root`, by name; none inside another. Raises OSError for a
    folder unread.
    """
    if (root / _MARK).is_dir():
        yield root
        return
    if deepest == 0:
        return
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in folders:
        if not name.startswith("."):
            yield from run_directories(root / name, deepest - 1)


def newest_card(root: Path) -> RunCard:
    """The card of the newest launch; of a job that is only watched, the one that was made for it.
    Raises CardError, OSError or ValueError where there is none that can be read.
    """
    for folder in sorted((root / _MARK).iterdir(), reverse=True):
        value = read_json(folder / "card.json")
        if value is None:
            continue
        card = card_from_resolved(value, str(folder / "card.json"))
        if card.paths.root.resolve() != root.resolve():
            raise ValueError(f"its card names another directory, {card.paths.root}")
        return card
    from tr11ops.launch.watched import CARD_FILE  # of no use to most runs

    if (root / CARD_FILE).is_file():
        return load_card(root / CARD_FILE, (), os.environ)
    raise ValueError("nothing was launched there")


def exit_code_of(runs: Sequence[ListedRun]) -> int:
    """1 where a run needs a person, else 3 where one could not be observed, else 0."""
    codes = {run.exit_code for run in runs}
    if 1 in codes:
        return 1
    if 3 in codes:
        return 3
    return 0
