"""`tr11 list`: the runs below some folders, a line each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence, Set
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops.base import deadline
from tr11ops.base.deadline import late_words
from tr11ops.base.errors import Late, WrongUsage
from tr11ops.base.observed import Unknown, cause
from tr11ops.base.units import counted, duration
from tr11ops.cli.common import directory_of
from tr11ops.cli.runner import JSON, NO_RUN, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.base import Overview
from tr11ops.cluster.select import SharedOverview
from tr11ops.observe.look import facts_of
from tr11ops.observe.readers import kind_to_watch, looking, open_if_there
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.run_list import ListedRun, exit_code_of, newest_card, run_directories
from trainer.config.card import CardError

SCHEMA = 1


def list_runs(
    context: Annotated[RunContext, NO_RUN, SCHEDULER, JSON],
    *,
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[ROOT]...",
            show_default=False,
            parser=Path,  # click's own asks the file system, which may hang
            help="Folders; else this one.",
        ),
    ] = None,
) -> Outcome:
    """The runs below some folders, a line each: verdict, iteration, loss, time left.

    Each is looked at as `tr11 status` does, with the card of its newest launch; folders four levels
    down are searched.

    Exit code 0: all well; 1: one needs a person; 2: wrong usage; 3: one could not be observed.

    Examples:
      tr11 list
      tr11 list /scratch/six/checkpoints --json | jq '.runs[] | select(.exit_code > 0)'
    """
    places = roots or [Path()]
    silent = {root for root in places if not _is_folder_that_answers(root)}

    @cache
    def edge(kind: str) -> Overview | Unknown:
        found = open_if_there(kind)
        if isinstance(found, Unknown):
            return found
        return SharedOverview(looking(found))

    found = list(_looked_at(places, silent, context.scheduler, edge))
    notes = []
    if not found:
        notes = [f"no run was launched below {', '.join(map(str, places))}"]
    document = {"schema": SCHEMA, "runs": [run.document() for run in found]}
    return Outcome(document, _lines(found), notes, exit_code=exit_code_of(found))


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
    roots: Sequence[Path], silent: Set[Path], kind: str, edge: Any
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
            yield _look(folder, kind, edge)


def _look(folder: Path, kind: str, edge: Any) -> ListedRun:
    def look() -> dict[str, Any]:
        card = newest_card(folder)
        directory = directory_of(card)
        overview = edge(kind_to_watch(directory, kind))
        return assess(directory, facts_of(card), overview, lambda _: ExtraObservations()).document()

    try:
        return ListedRun(folder, deadline.within(deadline.LOOK_SECONDS, look))
    except Late:
        return ListedRun(folder, None, late_words(folder, deadline.LOOK_SECONDS))
    except (CardError, OSError, ValueError) as error:
        return ListedRun(folder, None, " ".join(str(error).split()))


def _lines(runs: Sequence[ListedRun]) -> Iterator[str]:
    if not runs:
        return
    yield f"{'verdict':<10} {'iteration':>15} {'loss':>8} {'left':>11}  run"
    for run in runs:
        if run.status is None:
            yield f"{'unknown':<10} {run.directory}: {run.why}"
            continue
        seen = run.document()
        again = seen["done_again"]  # while it starts, the log still ends with what was lost
        if again is None:
            done = seen["iteration"]
        else:
            done = again["from_step"]
        if done is None:
            step = "-"
        elif seen["total_iterations"] is None:
            step = str(done)
        else:
            step = f"{done}/{seen['total_iterations']}"
        if again is None:
            lost = ""
        else:
            lost = f"  ({counted(again['iterations'], 'iteration')} again)"
        if seen["loss"] is None:
            loss = "-"
        else:
            loss = f"{seen['loss']:.4f}"
        if seen["remaining_seconds"] is None:
            left = "-"
        else:
            left = duration(seen["remaining_seconds"])
        yield f"{seen['verdict']:<10} {step:>15} {loss:>8} {left:>11}  {run.directory}{lost}"
        if run.exit_code:
            yield from textwrap.wrap(seen["why"], 78, initial_indent="  ", subsequent_indent="  ")
