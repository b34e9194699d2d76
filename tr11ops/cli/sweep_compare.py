"""`tr11 sweep compare`: the loss of a study's cells against samples and wall time."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.units import timestamp
from tr11ops.cli.common import JsonOption, SchedulerOption, require_file, say
from tr11ops.cli.compare import PLOT_LINES, WIDTH, comparison_document, comparison_lines
from tr11ops.cli.context import answer
from tr11ops.cli.courses import FromOption, ToOption, range_of_options
from tr11ops.cli.sweep_view import SCHEMA, FolderArgument, aligned, look_at, open_study
from tr11ops.curves.compare import ROWS
from tr11ops.curves.plot import text_plot
from tr11ops.report.html import render
from tr11ops.sweep.results import (
    MOST_CURVES,
    TITLES,
    StudyResult,
    best_sentence,
    page_of_study,
    read_course,
    result_cells,
    result_values,
    study_result,
)
from trainer.contract.files import write_atomically


def compare_cells(
    folder: FolderArgument = Path(),
    *,
    cells: Annotated[
        list[str] | None, typer.Option("--cell", metavar="NAME", help="Only this cell; may be repeated. The first"
                                       " one named is what the others are compared with.")
    ] = None,
    first: FromOption = None,
    last: ToOption = None,
    rows: Annotated[int, typer.Option("--rows", metavar="COUNT", min=1, max=1000, help="Rows of a table.")] = ROWS,
    lines: Annotated[
        int | None,
        typer.Option("--smooth", metavar="LINES", min=1, max=10_000, show_default=False,
                     help="A row is the mean of so many lines; without: 20, at most a tenth of a course."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="Write a page with the curves there.")
    ] = None,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare the cells: results, then the loss against samples and against wall time.

    `valid.` is the last validation loss. `~` marks a difference that may be noise: less than two standard errors.
    `min` are minutes of training, without waits. At most eight curves are drawn: choose them with --cell. --from and
    --to zoom the curves in.

    Examples:
      tr11 sweep compare demo-sweep
      tr11 sweep compare demo-sweep -o comparison.html
      tr11 sweep compare demo-sweep --cell batch512 --cell batch1024 --json
    """
    if output is not None:
        require_file(output, "--output")
    within = range_of_options(first, last)
    study = open_study(folder)
    known = [cell.name for cell in study.manifest.cells]
    for name in cells or ():
        if name not in known:
            raise Refusal(f"--cell {name}: is no cell of {study.folder}; the cells are {', '.join(known)}", exit_code=2)
        if study.cards[name].card is None:
            raise Refusal(f"--cell {name}: {study.cards[name].fault}", exit_code=2)
    look = look_at(study, scheduler)
    for fault in look.faults:
        say(f"tr11: {fault}")
    states = {cell.name: cell.state.value for cell in look.cells}
    chosen = list(dict.fromkeys(cells or known))
    try:
        courses = [read_course(name, states[name], card) for name in chosen if (card := study.cards[name].card)]
        result = study_result(study.manifest.name, courses, lines, rows, within)
    except ValueError as error:
        raise Refusal(str(error), exit_code=3) from None
    if output is not None:
        write_atomically(output, render(page_of_study(result, timestamp(time.time(), None))))
    answer(as_json, {**_document(result), **within.document()}, _screen(result, len(chosen), str(within)))
    if output is not None:
        say(f"written: {output}")


def _screen(result: StudyResult, count: int, within: str) -> Iterator[str]:
    yield from textwrap.wrap(f"sweep {result.name}: {best_sentence(result.rows)}", WIDTH)
    yield ""
    yield from aligned([TITLES, *map(result_cells, result.rows)])
    for axis, compared in result.compared.items():
        curves = result.curves[axis]
        yield ""
        yield " ".join(filter(None, (f"{result.value} by {axis}, means of {compared.lines} lines", within)))
        for letter, curve in zip(ascii_uppercase, curves, strict=False):
            yield f"  {letter}  {curve.name}"
        yield ""
        yield from text_plot(curves, WIDTH, PLOT_LINES)
        yield ""
        yield from comparison_lines(compared, axis)
    if count > MOST_CURVES:
        yield ""
        yield f"{count - MOST_CURVES} cells are not drawn: choose with --cell"


def _document(result: StudyResult) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "name": result.name,
        "cells": [result_values(row) for row in result.rows],
        "compared": {
            axis: {"cells": list(compared.names), **comparison_document(compared, axis)}
            for axis, compared in result.compared.items()
        },
    }
