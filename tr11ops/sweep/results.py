"""What the cells of a study came to: their curves by samples and by wall time, and one row of
results for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tr11ops.base.units import finite
from tr11ops.curves.compare import LINES, CurveComparison, compare
from tr11ops.curves.curve import CurveAxis, CurveRange, RunCurve, curve_of
from tr11ops.curves.steps import LoggedStep, logged_steps
from tr11ops.report.comparison import comparison_section, page_of_sections
from tr11ops.report.page import Column, Page, ReportSection, table
from tr11ops.runcard.card import OwnCard
from trainer.contract.metrics_record import VALIDATION, records
from trainer.contract.record import Record

MOST_CURVES = 8  # that can be told apart in one plot
AXES: tuple[CurveAxis, ...] = ("samples", "hours")
TEST_SET = "test"  # the test share of `data.split`
SHARE = 10  # of the shortest course: a mean over more than a tenth of it would hide how it fell


class CellResult(Record):
    """One cell's outcome. `loss` is the mean of the last `lines` lines, `validation` the last one
    on the first validation set; `hours` are of training, without waits. NaN where nothing was
    logged.
    """

    name: str
    state: str
    batch: int
    rate: float
    steps: int
    samples: int | None
    hours: float
    loss: float
    validation: float


class StudyResult(Record):
    """All cells, the best loss first, and their comparison by each axis, where two or more have
    trained.
    """

    name: str
    rows: tuple[CellResult, ...]
    curves: dict[CurveAxis, list[RunCurve]]
    compared: dict[CurveAxis, CurveComparison]


class CellCourse(Record):
    """One cell's card, state and steps as they were logged."""

    name: str
    state: str
    card: OwnCard
    steps: tuple[LoggedStep, ...]


def read_course(name: str, state: str, card: OwnCard) -> CellCourse:
    """Read a cell's log; no steps where there is none yet. Raises OSError, ValueError for one that
    is damaged.
    """
    paths = card.paths
    log = next((path for path in (paths.metrics, paths.main_log) if path.exists()), None)
    return CellCourse(name, state, card, () if log is None else tuple(logged_steps(log)))


def smoothing(courses: Iterable[CellCourse]) -> int:
    """Lines of one mean: as `tr11 compare`, but at most a tenth of the shortest course. A large
    batch has few steps.
    """
    counts = [len(course.steps) for course in courses if course.steps]
    return max(1, min(LINES, min(counts, default=LINES) // SHARE))


def study_result(
    name: str,
    courses: Sequence[CellCourse],
    lines: int | None,
    rows: int,
    within: CurveRange,
) -> StudyResult:
    """Compare the cells. `lines`: of one mean, None for `smoothing`. The curves are of the steps
    `within` a range.

    Raises ValueError, one line, where the courses share no place.
    """
    if lines is None:
        lines = smoothing(courses)
    trained = [course for course in courses if course.steps][:MOST_CURVES]
    curves: dict[CurveAxis, list[RunCurve]] = {
        axis: [
            curve_of(course.name, course.steps, axis=axis, value="loss", within=within)
            for course in trained
        ]
        for axis in AXES
    }
    if len(trained) > 1:
        compared = _compared(curves, rows, lines, within)
    else:
        compared = {}
    found = sorted(
        (_row(course, lines) for course in courses),
        key=lambda row: (math.isnan(row.loss), row.loss),
    )
    return StudyResult(name, tuple(found), curves=curves, compared=compared)


def _compared(
    curves: Mapping[CurveAxis, Sequence[RunCurve]], rows: int, lines: int, within: CurveRange
) -> dict[CurveAxis, CurveComparison]:
    """By each axis on which they meet: of a part, cells of other batches may have been there at
    other hours.
    """
    found: dict[CurveAxis, CurveComparison] = {}
    for axis in AXES:
        try:
            found[axis] = compare(curves[axis], rows, lines, within)
        except ValueError:
            if within.is_whole or (axis == AXES[-1] and not found):
                raise
    return found


def _row(course: CellCourse, lines: int) -> CellResult:
    curve = curve_of(course.name, course.steps, "hours", "loss")
    last = course.steps[-1].record if course.steps else None
    if curve.x:
        end = curve.x[-1]
    else:
        end = math.nan
    return CellResult(
        course.name,
        course.state,
        batch=course.card.batch.global_batch_size,
        rate=course.card.schedule.learning_rate,
        steps=last.iteration if last else 0,
        samples=last.consumed_samples if last is not None else 0,
        hours=end,
        loss=curve.level(end, lines).mean,
        validation=_last_validation(course.card.paths.metrics),
    )


def _last_validation(path: Path) -> float:
    """The last loss on the first validation set; test sets come behind them all, at the end of a
    training.
    """
    name, last = None, math.nan
    for record in records(path):
        if record.kind != VALIDATION or record.values.get("name") == TEST_SET:
            continue
        if name is None:
            name = record.values.get("name")
        if record.values.get("name") == name:
            last = record.number("lm_loss")
    return last


# ----------------------------------------------------------------------------- words
TITLES = ("cell", "state", "batch", "rate", "steps", "samples", "min", "loss", "valid.")


def result_cells(row: CellResult) -> tuple[str, ...]:
    """One row's texts, below TITLES."""
    return (
        row.name,
        row.state,
        f"{row.batch:,}",
        f"{row.rate:.3g}",
        f"{row.steps:,}",
        _number(row.samples, ","),
        _number(60 * row.hours, ".1f"),
        _number(row.loss, ".4f"),
        _number(row.validation, ".4f"),
    )


def _number(value: float | None, form: str) -> str:
    if value is not None and math.isfinite(value):
        return f"{value:{form}}"
    return "-"


def best_sentence(rows: Sequence[CellResult]) -> str:
    """Which cell ends lowest, in a sentence."""
    trained = [row for row in rows if math.isfinite(row.loss)]
    if not trained:
        return "No cell has trained yet."
    best = trained[0]
    after = f"{best.steps:,} steps"
    if best.samples is not None:
        after = f"{best.samples:,} samples"
    return (
        f"{best.name} has the lowest loss, {best.loss:.4f} after {after}, of {len(trained)} cells."
    )


def page_of_study(result: StudyResult, made: str) -> Page:
    """The comparison as one page that needs nothing else: results, then loss against samples and
    against wall time.
    """
    columns = [Column(title, index > 1) for index, title in enumerate(TITLES)]
    sections = [
        ReportSection(
            "cells", "Cells", (), table=table(columns, [result_cells(row) for row in result.rows])
        )
    ]
    sections += [
        comparison_section(
            result.curves[axis],
            result.compared[axis],
            axis=axis,
            value="loss",
            key=f"by-{axis}",
        )
        for axis in result.compared
    ]
    return page_of_sections(f"sweep {result.name}", best_sentence(result.rows), sections, made)


def result_values(row: CellResult) -> dict[str, object]:
    """One row for a machine."""
    return {
        "name": row.name,
        "state": row.state,
        "global_batch_size": row.batch,
        "learning_rate": row.rate,
        "steps": row.steps,
        "consumed_samples": row.samples,
        "hours": finite(row.hours),
        "loss": finite(row.loss),
        "validation_loss": finite(row.validation),
    }
