"""`tr11 compare`: the curves of two runs, laid over each other; `tr11 numbers`: what looks wrong."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated

import typer

from tr11ops.base.deadline import watch_files
from tr11ops.base.errors import Unobserved, WrongUsage
from tr11ops.base.units import counted, finite, timestamp
from tr11ops.cli.common import directory_of, read_card, require_file, write_output
from tr11ops.cli.runner import JSON, NO_RUN, Outcome, RunContext
from tr11ops.curves.compare import LINES, ROWS, CurveComparison, compare, text_plot
from tr11ops.curves.curve import (
    CurveAxis,
    CurvePlace,
    CurveRange,
    CurveValue,
    RunCurve,
    curve_of,
    range_of,
)
from tr11ops.curves.judge import CurveJudgement, judge
from tr11ops.curves.spikes import NumberAnomaly
from tr11ops.curves.steps import LoggedStep, logged_steps
from tr11ops.report.comparison import comparison_cells, page_of_comparison
from tr11ops.report.page import render
from tr11ops.runcard.card import RunCard
from trainer.contract.documents import document
from trainer.contract.record import Record

SCHEMA = 1
MOST_RUNS = 8


# ----------------------------------------------------------------------------- course
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PLACE",
        help="From there on: an iteration, or 3Msamples, 50Btokens.",
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="PLACE",
        help="Up to there; in the same words as --from.",
    ),
]


def range_of_options(first: str | None, last: str | None) -> CurveRange:
    """The part of a course that --from and --to mean. Raises Refusal with exit code 2."""
    places: list[CurvePlace | None] = []
    for option, text in (("--from", first), ("--to", last)):
        try:
            places.append(None if text is None else CurvePlace.of(text))
        except ValueError as error:
            raise WrongUsage(f"{option}: {error}") from None
    try:
        return range_of(*places)
    except ValueError as error:
        raise WrongUsage(f"--to: {error}; give a place behind --from") from None


class NamedCourse(Record):
    """A log of steps, and what to call it."""

    name: str
    path: Path

    def steps(self) -> Iterator[LoggedStep]:
        """Every step of it, one at a time. Raises Refusal, with exit code 3, where it cannot be
        read or holds none.
        """
        is_empty = True
        try:
            for step in logged_steps(self.path):
                is_empty = False
                yield step
        except OSError as error:
            raise Unobserved(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise Unobserved(str(error)) from None
        if is_empty:
            raise Unobserved(f"{self.path}: holds no line of a training step")


def course_named(text: str) -> NamedCourse:
    """The course that `text` means: a log file, a folder with a card or a run in it, a card's path
    or shipped name.

    Raises CardError for a card that cannot be read; Refusal where nothing has been logged.
    """
    path = Path(text)
    if path.is_dir():
        if (path / "tr11.toml").is_file():
            return course_of(read_card(str(path / "tr11.toml")))
        found = sorted(path.glob("*-logs/logs/*/metrics.jsonl")) or sorted(
            path.glob("metrics.jsonl")
        )
        if not found:
            raise WrongUsage(f"{text}: holds neither a tr11.toml nor the logs of a run")
        if len(found) > 1:
            names = ", ".join(str(one) for one in found[:3])
            raise WrongUsage(f"{text}: holds {len(found)} courses; name one of them, e.g. {names}")
        return NamedCourse(path.resolve().name, found[0])
    if path.exists() and path.suffix != ".toml":
        return NamedCourse(path.name, path)
    if os.sep in text and path.suffix != ".toml":
        raise WrongUsage(f"{text}: does not exist")
    return course_of(read_card(text))


def course_of(card: RunCard) -> NamedCourse:
    """The course that a card's run has logged. Raises Refusal, with exit code 3, where it has not
    trained yet.
    """
    paths = directory_of(card).paths
    watch_files(paths.root)
    log = next((path for path in (paths.metrics, paths.main_log) if path.exists()), None)
    if log is None:
        raise Unobserved(f"{paths.metrics}: does not exist: this run has not trained yet")
    return NamedCourse(f"{card.run.name}/{card.run.variant}", log)


# ----------------------------------------------------------------------------- the commands
WIDTH, PLOT_LINES = 79, 14


RowsOption = Annotated[
    int, typer.Option("--rows", metavar="COUNT", min=1, max=1000, help="Rows of a table.")
]
PageOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE.html", help="Write a page with the curves there."),
]


def compare_runs(
    context: Annotated[RunContext, NO_RUN, JSON],
    *,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="Logs, metrics.jsonl, cards or run directories."),
    ],
    by: Annotated[
        CurveAxis, typer.Option("--by", help="What the runs are laid beside each other by.")
    ] = "iteration",
    value: Annotated[CurveValue, typer.Option("--value", help="What is compared.")] = "loss",
    first: FromOption = None,
    last: ToOption = None,
    rows: RowsOption = ROWS,
    lines: Annotated[
        int,
        typer.Option(
            "--smooth",
            metavar="LINES",
            min=1,
            max=10_000,
            help="A row is the mean of so many lines.",
        ),
    ] = LINES,
    output: PageOption = None,
) -> Outcome:
    """Lay the curves of runs over each other: a table, a plot, and how the others differ from the
    first.

    `~` marks a difference that may be noise: less than two standard errors. Hours are hours of
    training, without waits. What was done again after a restart counts once, as it was done last.
    --from and --to zoom in: table, plot and page hold the steps between them, both included.

    Examples:
      tr11 compare main.toml embedding-norm.toml
      tr11 compare old/main_log.txt new/main_log.txt --by samples -o comparison.html
      tr11 compare main.toml embedding-norm.toml --from 31000 --to 31500
      tr11 compare fp32 bnb-1 bnb-2 --value grad-norm --by hours --from 50Btokens --json
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise WrongUsage(f"give 2 to {MOST_RUNS} runs to compare, not {len(runs)}")
    if output is not None:
        require_file(output, "--output")
    within = range_of_options(first, last)
    courses = _with_names_of_their_own([course_named(run) for run in runs])
    curves = [
        curve_of(course.name, course.steps(), axis=by, value=value, within=within)
        for course in courses
    ]
    try:
        compared = compare(curves, rows, lines, within)
    except ValueError as error:
        raise Unobserved(f"{value} by {by}: {error}") from None
    if output is not None:
        page = page_of_comparison(
            curves,
            compared,
            axis=by,
            value=value,
            made=timestamp(time.time(), None),
            within=str(within),
        )
        write_output(output, render(page))
    screen = _screen(courses, curves, compared=compared, axis=by, value=value, within=within)
    return Outcome(
        _document(courses, compared, axis=by, value=value, within=within),
        screen,
        () if output is None else (f"written: {output}",),
    )


def _with_names_of_their_own(courses: Sequence[NamedCourse]) -> list[NamedCourse]:
    """Two of one name are told apart by their paths."""
    names = [course.name for course in courses]
    return [
        NamedCourse(str(course.path), course.path) if names.count(course.name) > 1 else course
        for course in courses
    ]


def _screen(
    courses: Sequence[NamedCourse],
    curves: Sequence[RunCurve],
    compared: CurveComparison,
    axis: str,
    value: str,
    within: CurveRange,
) -> Iterator[str]:
    yield " ".join(
        filter(None, (f"{value} by {axis}, means of {compared.lines} lines", str(within)))
    )
    for letter, course in zip(ascii_uppercase, courses, strict=False):
        yield f"  {letter}  {course.name}"
    yield ""
    yield from text_plot(curves, WIDTH, PLOT_LINES)
    yield ""
    yield from comparison_lines(compared, axis)


def comparison_lines(compared: CurveComparison, axis: str) -> Iterator[str]:
    """The table, a column for each run by its letter, and a sentence for each run but the first."""
    letters = ascii_uppercase[: len(compared.names)]
    head = [axis, *letters, *(f"{letter}-A" for letter in letters[1:])]
    table = [
        head,
        *(comparison_cells(compared, index, axis) for index in range(len(compared.rows))),
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
    yield ""
    for index in range(1, len(compared.names)):
        yield from textwrap.wrap(compared.sentence(index, axis), WIDTH)


def _document(
    courses: Sequence[NamedCourse],
    compared: CurveComparison,
    axis: str,
    value: str,
    within: CurveRange,
) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "by": axis,
        "value": value,
        **within.document(),
        "runs": [{"name": course.name, "file": str(course.path)} for course in courses],
        **comparison_document(compared, axis),
    }


def comparison_document(compared: CurveComparison, axis: str) -> dict[str, object]:
    """A comparison for a machine: what `--json` has beside the names of the runs."""
    return {
        "lines": compared.lines,
        "rows": [
            {
                "x": row.x,
                "levels": [finite(level.mean) for level in row.levels],
                "errors": [finite(level.error) for level in row.levels],
                "differences": [
                    finite(row.difference(index)) for index in range(1, len(row.levels))
                ],
                "sure": [row.is_sure(index) for index in range(1, len(row.levels))],
            }
            for row in compared.rows
        ],
        "reached": list(compared.reached),
        "sentences": [compared.sentence(index, axis) for index in range(1, len(compared.names))],
    }


# ----------------------------------------------------------------------------- numbers
NUMBERS_SCHEMA = 1
MOST_OF_A_KIND = 20


def numbers(
    context: Annotated[RunContext, JSON],
    *,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Logs, metrics.jsonl, cards or run directories, else the card's run.",
        ),
    ] = None,
) -> Outcome:
    """Judge the numbers of a log: spikes, falls of throughput, restarts, gradient norms that
    repeat, missing losses.

    Reads any log with Megatron's iteration lines, metrics.jsonl, or either in gzip. Exit code 1:
    something looks wrong.

    Examples:
      tr11 numbers
      tr11 numbers main_log.txt
      tr11 numbers old/metrics.jsonl.gz --json
    """
    if runs:
        courses = [course_named(name) for name in runs]
    else:
        courses = [course_of(context.seen(missing=None)[0])]
    judged = [(course, judge(course.steps())) for course in courses]
    lines = (line for one in judged for line in _lines(*one))
    return Outcome(
        {"schema": NUMBERS_SCHEMA, "runs": [_judged_document(*one) for one in judged]},
        lines,
        exit_code=1 if any(judgement.wrong for _, judgement in judged) else 0,
    )


def _judged_document(course: NamedCourse, judged: CurveJudgement) -> dict[str, object]:
    return {"name": course.name, "file": str(course.path), **document(judged)}


def _lines(course: NamedCourse, judged: CurveJudgement) -> Iterator[str]:
    yield f"{course.name}: {course.path}"
    starts = counted(judged.starts, "start")
    yield f"{counted(judged.steps, 'line')}, iterations {judged.first:,} to {judged.last:,}, {starts}"
    yield (
        "Nothing looks wrong."
        if not judged.wrong
        else f"{counted(len(judged.wrong), 'thing')} to look at:"
    )
    by_kind: dict[str, list[NumberAnomaly]] = {}
    for anomaly in judged.anomalies:
        by_kind.setdefault(anomaly.kind, []).append(anomaly)
    for kind, found in by_kind.items():
        wrong = sum(anomaly.is_wrong for anomaly in found)
        yield ""
        yield (
            f"{kind} ({wrong} of {len(found)} wrong)"
            if wrong < len(found)
            else f"{kind} ({len(found)})"
        )
        for anomaly in found[:MOST_OF_A_KIND]:
            mark = "!" if anomaly.is_wrong else " "
            yield from textwrap.wrap(
                f"{mark} {anomaly.text} (line {anomaly.line:,})", WIDTH, subsequent_indent="    "
            )
            said = (line for line in anomaly.evidence if line not in anomaly.text)
            yield from (
                part
                for line in said
                for part in textwrap.wrap(
                    line, WIDTH, initial_indent="    ", subsequent_indent="    "
                )
            )
        if len(found) > MOST_OF_A_KIND:
            yield f"  and {len(found) - MOST_OF_A_KIND} more (--json has all)"
    yield ""
