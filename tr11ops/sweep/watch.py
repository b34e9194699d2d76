"""The launched cells of a card's studies, watched beside the card's own run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import Late
from tr11ops.cron.jobs import PeriodicJob, table as job_table, wanted
from tr11ops.cron.runner import CronContext, CronRound, run_due, wait_for_rounds
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.sweep.manifest import CARD, studies_in
from trainer.config.card import CardError

if TYPE_CHECKING:
    from tr11ops.base.stop_signals import StopEvent

# a launched cell, and the jobs that watch it
Watched: TypeAlias = tuple[CronContext, tuple[PeriodicJob, ...]]

WATCHING = "pulse"


class CellWatch:
    """The rounds of the launched cells of every study that was planned from a card; `report` is told
    of each.

    They are looked for each time, in the current folder and beside the card's run directory; one that is damaged is
    left out. A cell is watched by `pulse` alone, which only tells: what goes on in a study is decided by `tr11 sweep
    resume`. It has no archive and no hub (its card is planned without), and the rest would come once for each cell, of
    the same disks and nodes.
    One whose file system does not answer is watched as it was last seen, and holds up no other.
    `context_of` says where a cell's rounds run. `forced`: due or not.
    """

    def __init__(
        self,
        card: RunCard,
        path: Path,
        context_of: Callable[[RunCard, Path], CronContext],
        must_end: StopEvent,
        report: Callable[[str, CronRound], None],
        forced: bool = False,
    ) -> None:
        self._card, self._path, self._context_of = card, path, context_of
        self._must_end, self._report, self._forced = must_end, report, forced
        self._places: list[tuple[str, Path]] = []
        self._cells: dict[str, Watched] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._slow: set[str] = set()  # no other waits for these again

    def names(self) -> list[str]:
        """The launched cells. Raises OSError."""
        return [name for name, path in self._found() if self._read(name, path) is not None]

    def look(self, ended: StopEvent) -> None:
        """Begin what is due of each cell, one after another, until `ended`. Raises OSError."""
        for name, path in self._found():
            before = self._threads.get(name)
            if ended.is_set():
                return
            if before is not None and before.is_alive():
                continue
            thread = threading.Thread(target=self._rounds, args=(name, path), daemon=True)
            self._threads[name] = thread
            thread.start()
            thread.join(0 if name in self._slow else deadline.SILENCE_SECONDS)
            if thread.is_alive():
                self._slow.add(name)

    def wait(self) -> None:
        """Until what was begun is over."""
        wait_for_rounds(list(self._threads.values()), self._must_end)

    def _rounds(self, name: str, path: Path) -> None:
        cell = self._read(name, path)
        if cell is not None:
            for done in run_due(*cell, self._forced):
                self._report(name, done)

    def _found(self) -> list[tuple[str, Path]]:
        """Every cell and its card, as last seen where that cannot be seen now."""
        folders, root = (Path.cwd(), self._card.paths.root.parent), self._card.paths.root
        if not any(deadline.is_silent(one, deadline.SILENCE_SECONDS) for one in (*folders, root)):
            with suppress(Late):
                self._places = deadline.within(
                    deadline.LOOK_SECONDS, lambda: list(_cells_of(folders, self._path))
                )
        return self._places

    def _read(self, name: str, path: Path) -> Watched | None:
        """The cell, as last seen where its file system does not answer; None for one that was not
        launched.
        """
        try:
            deadline.require_answer(path.parent)
            found = deadline.within(deadline.LOOK_SECONDS, lambda: self._launched(path))
        except Late:
            return self._cells.get(name)
        except (CardError, OSError):
            return None
        if found is not None:
            self._cells[name] = found
        return found

    def _launched(self, path: Path) -> Watched | None:
        """Raises CardError, OSError."""
        card = load_card(path, (), os.environ)
        if not any(RunDirectory(card.paths, card.kill_switch).submissions.iterdir()):
            return None
        jobs = tuple(
            replace(job, words=(*job.words, "--no-act"))
            for job in wanted(job_table(card))
            if job.name == WATCHING
        )
        return self._context_of(card, path), jobs


def _cells_of(folders: tuple[Path, ...], path: Path) -> Iterator[tuple[str, Path]]:
    """The cells of the studies in these folders that were planned from the card at `path`."""
    for folder, manifest in studies_in(folders):
        if os.path.realpath(manifest.card) == os.path.realpath(path):
            for cell in manifest.cells:
                yield f"{manifest.name}/{cell.name}", folder / cell.name / CARD
