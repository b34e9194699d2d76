"""`tr11 list`: the runs below some folders, what needs a person first; once, or refreshed in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.deadline import late_words
from tr11ops.base.errors import Late, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.observed import cause, known, observed
from tr11ops.base.units import plain
from tr11ops.cli.common import RootsOption, directory_of, in_time
from tr11ops.cli.progress import look_again
from tr11ops.cli.runner import JSON, NO_RUN, SCHEDULER, Outcome, RunContext
from tr11ops.observe.look import facts_of
from tr11ops.observe.readers import SharedReaders
from tr11ops.runcard.find import DEEPEST_NAMED, run_directories
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import observe_extra
from tr11ops.status.run_list import ListedRun, RunList, newest_card
from tr11ops.status.run_list_screen import list_lines
from tr11ops.status.run_use import UseReader
from trainer.config.card import CardError
from trainer.contract.record import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_SECONDS = 30.0
SHORTEST_WATCH_SECONDS = 1.0


def list_runs(
    context: Annotated[RunContext, NO_RUN, SCHEDULER, JSON],
    *,
    roots: RootsOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            metavar="SECONDS",
            help="With --watch: seconds between two looks [30].",
        ),
    ] = None,
) -> Outcome:
    """The runs below some folders, what needs a person first: verdict, reason and since when, who has
    it or is on call, team, nodes, node-hours, GPU-hours, and their price and energy where the card and
    the site tell them.

    Each is looked at as `tr11 status` does, with the card of its newest launch; folders four levels
    down are searched. Sums of each team, and nodes that several runs hold or exclude, are at the end.

    Exit code 0: all well; 1: one needs a person; 2: wrong usage; 3: one could not be observed.

    Examples:
      tr11 list
      tr11 list /scratch/six/checkpoints --watch
      tr11 list /scratch/six/checkpoints --json | jq '.runs[] | select(.exit_code > 0)'
    """
    places = roots or [Path()]
    if every is not None and not watch:
        raise WrongUsage(f"--every {every:g} goes with --watch")
    if every is not None and not SHORTEST_WATCH_SECONDS <= every <= 86400:
        raise WrongUsage(f"--every {every:g}: must be between 1 and 86400 seconds")
    look = partial(_look_at_all, places, context.scheduler, UseReader())
    if watch:
        return look_again(look, every or WATCH_SECONDS, context.as_json)
    seen = look()
    notes = []
    if not seen.found.runs:
        notes = [f"no run was launched below {', '.join(map(str, places))}"]
    return Outcome(seen.document(), seen.lines(), notes, exit_code=seen.exit_code)


def runs_here(context: RunContext, words: str, seconds: float | None = None) -> Outcome | None:
    """What `tr11 list` answers, for a command about one run (`tr11 WORDS`) that names no card, and is
    typed in a folder of runs; None where no run was launched below, or where a document of one run is
    asked for. `seconds`: between two looks, None for one look.
    """
    if context.as_json or context.overrides:
        return None
    nearest = partial(next, run_directories(Path(), DEEPEST_NAMED), None)
    found = known(in_time(partial(observed, nearest)), None)
    if found is None:
        return None
    shown = list_runs(context, watch=seconds is not None, every=seconds)
    one = command_for(str(found.absolute()), words)
    return replace(shown, notes=[f"one of them: {one}"])


class ListFrame(Record):
    """One look at all runs."""

    found: RunList
    time: float

    @property
    def exit_code(self) -> int:
        return self.found.exit_code

    def document(self) -> dict[str, object]:
        """For --json."""
        return self.found.document()

    def lines(self) -> list[str]:
        return list(list_lines(self.found, self.time))

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        """The lines; the caller cuts what is too high, what needs a person is at the top."""
        from rich.text import Text

        lines = self.lines() or ["no run was launched here yet"]
        text = "\n".join(plain(line, unicode=False) for line in lines)
        return Text(text, no_wrap=True, overflow="crop")


def _look_at_all(roots: Sequence[Path], kind: str, uses: UseReader) -> ListFrame:
    silent = {root for root in roots if not _is_folder_that_answers(root)}

    look = partial(_look, readers=SharedReaders(kind), uses=uses)
    found = RunList.of(_looked_at(roots, silent, look))
    return ListFrame(found, time.time())


def _is_folder_that_answers(root: Path) -> bool:
    """False where its file system does not answer: the others are listed all the same. Raises
    Refusal where there is no such folder.
    """
    try:
        is_folder = deadline.within(deadline.LOOK_SECONDS, root.is_dir)
    except Late:
        return False
    if not is_folder:
        raise WrongUsage(f"ROOT {root}: is not a folder")
    return True


def _looked_at(
    roots: Sequence[Path], silent: Set[Path], look: Callable[[Path], ListedRun]
) -> Iterator[ListedRun]:
    for root in roots:
        if root in silent:
            yield ListedRun(root, None, late_words(root, deadline.LOOK_SECONDS))
            continue
        folders = run_directories(root)
        while True:
            try:
                folder = deadline.within(deadline.LOOK_SECONDS, partial(next, folders, None))
            except Late:
                yield ListedRun(root, None, late_words(root, deadline.LOOK_SECONDS))
                break
            except OSError as error:  # a folder that may not be read may hold runs
                yield ListedRun(Path(error.filename or root), None, cause(error))
                break
            if folder is None:
                break
            yield look(folder)


def _look(folder: Path, readers: SharedReaders, uses: UseReader) -> ListedRun:
    def look() -> ListedRun:
        card = newest_card(folder)
        directory = directory_of(card)
        beside = partial(observe_extra, directory, card)
        seen = assess(directory, facts_of(card), readers.of(directory), beside)
        use = uses.read(card, directory, seen.snapshot)
        return ListedRun(folder, seen.document(), use=use)

    try:
        return deadline.within(deadline.LOOK_SECONDS, look)
    except Late:
        return ListedRun(folder, None, late_words(folder, deadline.LOOK_SECONDS))
    except (CardError, OSError, ValueError) as error:
        return ListedRun(folder, None, " ".join(str(error).split()))
