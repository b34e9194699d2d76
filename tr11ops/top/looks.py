"""Looks at the runs below some folders for `tr11 top`: first what is on record of each, then each run
itself, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tr11ops import api
from tr11ops.base import deadline
from tr11ops.base.errors import Late
from tr11ops.base.now import now
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.observe.files import read_details
from tr11ops.observe.readers import SharedReaders
from tr11ops.runcard.find import run_directories
from tr11ops.status.run_list import kept_verdict, launches
from tr11ops.top.tables import LookedAt
from trainer.contract.errors import Tr11Error


class RunLooks:
    """The runs at and below some folders, which are searched each time."""

    def __init__(self, roots: Sequence[Path], scheduler: str) -> None:
        self._roots = tuple(root.absolute() for root in roots)
        self._scheduler = scheduler

    def on_record(self) -> Iterator[LookedAt]:
        """What is known of each run before it is looked at. No scheduler is asked."""
        for folder in self._folders():
            yield folder if isinstance(folder, LookedAt) else _on_record(folder)

    def each(self) -> Iterator[LookedAt]:
        """A fresh look at each run; of a folder that cannot be read or hangs, why."""
        readers = SharedReaders(self._scheduler)
        for folder in self._folders():
            if isinstance(folder, LookedAt):
                yield folder
                continue
            try:
                yield deadline.within(deadline.LOOK_SECONDS, partial(self.look, folder, readers))
            except Late:
                yield _unread(folder, deadline.late_words(folder, deadline.LOOK_SECONDS))
            except (Tr11Error, OSError, ValueError) as error:
                yield _unread(folder, " ".join(str(error).split()))

    def _folders(self) -> Iterator[Path | LookedAt]:
        for root in self._roots:
            silent = _silent(root)
            if silent is not None:
                yield silent
                continue
            try:
                for folder in run_directories(root):
                    yield _silent(folder) or folder
            except OSError as error:
                yield _unread(Path(error.filename or root), cause(error))

    def open(self, folder: Path) -> api.Run:
        """The run of a folder, with no reader. Raises as `api.open_run` does."""
        return api.open_run(folder, scheduler=self._scheduler, reader=Unknown("not asked yet"))

    def look(self, folder: Path, readers: SharedReaders | None = None) -> LookedAt:
        """A fresh look at one run. Raises as `api.open_run` does."""
        run = self.open(folder)
        run = replace(run, reader=(readers or SharedReaders(self._scheduler)).of(run.directory))
        return LookedAt(str(folder), name_of(run), run.look())


def name_of(run: api.Run) -> str:
    """What a run is called on the screen."""
    return f"{run.name}/{run.directory.paths.variant}"


def _unread(folder: Path, why: str) -> LookedAt:
    return LookedAt(str(folder), folder.name, None, why)


def _silent(folder: Path) -> LookedAt | None:
    """Why a folder cannot be read whose file system does not answer, so that no other waits for it."""
    if deadline.is_silent(folder, deadline.PROBE_SECONDS):
        return _unread(folder, f"the file system of {folder} does not answer")
    return None


def _on_record(folder: Path) -> LookedAt:
    before = kept_verdict(folder)
    return LookedAt(str(folder), _name_on_record(folder), None, before=before, time=now())


def _name_on_record(folder: Path) -> str:
    """As its newest launch calls it; a run that is only watched is called by its folder."""
    for launch in known(observed(partial(launches, folder)), ()):
        run = read_details(launch / "card.json").get("run")
        if isinstance(run, dict):
            return f"{run.get('name')}/{run.get('variant')}"
    return folder.name
