"""`tr11 numbers`: what looks wrong in the numbers of a training that is over, or still runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer

from tr11ops.base.units import counted
from tr11ops.cli.compare import NamedCourse, course_named, course_of
from tr11ops.cli.context import JSON, RunContext
from tr11ops.curves.anomaly import NumberAnomaly
from tr11ops.curves.judge import CurveJudgement, judge
from trainer.contract.documents import document

SCHEMA = 1
WIDTH = 79
MOST_OF_A_KIND = 20


def numbers(
    context: Annotated[RunContext, JSON],
    *,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            show_default=False,
            help="Logs, metrics.jsonl, cards or run directories, else the card's run.",
        ),
    ] = None,
) -> None:
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
        courses = [course_of(context.card)]
    judged = [(course, judge(course.steps())) for course in courses]
    lines = (line for one in judged for line in _lines(*one))
    context.emit({"schema": SCHEMA, "runs": [_document(*one) for one in judged]}, lines)
    if any(judgement.wrong for _, judgement in judged):
        raise typer.Exit(1)


def _document(course: NamedCourse, judged: CurveJudgement) -> dict[str, object]:
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
