"""What each node did and when, and how fast the training was with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import tzinfo
from statistics import median

from tr11ops.base.observed import known
from tr11ops.goodput.history_values import AttemptHistory
from tr11ops.report.charts.bars import BarRow, TimeSpan, bars, timeline
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, table
from tr11ops.report.sections.formats import ROWS_SHOWN, hours
from tr11ops.report.series import TrainingSeries
from trainer.contract.record import Record

KINDS = {"trained": "trained", "spare": "spare", "excluded": "excluded"}
SLOW = 0.97  # of the run's throughput: below that a bar stands out
NODES_CHARTED = 60


class NodeThroughput(Record):
    """Of the steps in which a node trained: mean TFLOPs of a GPU, and against the run's median at
    the same batch.
    """

    tflops: float
    ratio: float


def nodes(material: ReportMaterial, zone: tzinfo, with_charts: bool) -> ReportSection | None:
    """Each node's hours, its throughput and its exclusions; None where no node was ever held."""
    spans = list(_spans(material))
    if not spans:
        return None
    speed = throughput_by_node(material)
    rows = []
    for node in sorted({span.row for span in spans})[:ROWS_SHOWN]:
        own = [span for span in spans if span.row == node]
        spent = {
            kind: sum(span.end - span.begin for span in own if span.kind == kind) / 3600
            for kind in KINDS
        }
        now = any(span.kind == "excluded" and span.end >= material.snapshot.time for span in own)
        why = next((span.label for span in reversed(own) if span.kind == "excluded"), "")
        if node in speed:
            fast = f"{speed[node].tflops:.4g}"
        else:
            fast = "-"
        state = Cell("excluded", "critical") if now else ""
        rows.append((node, hours(spent["trained"]), hours(spent["spare"]), fast, state, why))
    columns = (
        Column("node"),
        Column("hours trained", True),
        Column("hours spare", True),
        Column("TFLOPs per GPU", True),
        Column("now"),
        Column("last excluded because", is_wide=True),
    )
    if with_charts:
        charts = [timeline("nodes-chart", sorted(spans, key=_row), KINDS, zone)]
    else:
        charts = []
    lines = []
    if speed:
        lines.append(
            "TFLOPs per GPU: the mean of the steps in which the node trained. A step is as slow as its slowest node; "
            "the percentage is against the run's median at the same batch size. All nodes of a step wait for each "
            "other, so a low bar tells of the steps that the node was part of, not that it was the slow one."
        )
        if with_charts:
            charts.append(_speed_bars(speed))
    return ReportSection(
        "nodes", "Nodes so far", tuple(lines), tuple(charts), table=table(columns, rows)
    )


def _speed_bars(speed: Mapping[str, NodeThroughput]) -> str:
    """Throughput by node; the lowest first only where some node's differs by more than is usual."""
    ratios = [found.ratio for found in speed.values()]
    shown, order = sorted(speed.items()), "about the same for all, by name"
    if max(ratios) - min(ratios) > 1.0 - SLOW:
        shown, order = sorted(shown, key=_ratio), "the lowest first"
    rows = []
    for node, found in shown[:NODES_CHARTED]:
        kind = "below" if found.ratio < SLOW else "trained"
        said = f"{found.tflops:.4g} TFLOPs per GPU"
        rows.append(BarRow(node, ((kind, found.ratio, said),), f"{100 * found.ratio:.1f} %"))
    return f"<h3>throughput of the steps each node was part of, {order}</h3>{bars('speed-chart', rows)}"


def _ratio(entry: tuple[str, NodeThroughput]) -> float:
    return entry[1].ratio


def throughput_by_node(material: ReportMaterial) -> dict[str, NodeThroughput]:
    """How fast the training was while each node trained; none where no step or no launch is known."""
    series = known(material.series, TrainingSeries((), 0))
    usual = _usual(series)
    sums: dict[str, list[tuple[float, float, int]]] = {}
    for attempt in known(material.history.attempts, ()):
        job = series.throughput.get(attempt.logged_as or attempt.job_id)
        if job is None:
            continue
        for begin, end, working in _stretches(attempt, math.inf):
            steps = [
                (tflops, tflops / usual[batch])
                for time, tflops, batch in zip(job.times, job.tflops, job.batches, strict=True)
                if begin <= time <= end and usual[batch] > 0
            ]
            part = (
                sum(tflops for tflops, _ in steps),
                sum(ratio for _, ratio in steps),
                len(steps),
            )
            for node in working if steps else ():
                sums.setdefault(node, []).append(part)
    found = {}
    for node, parts in sums.items():
        count = sum(part[2] for part in parts)
        found[node] = NodeThroughput(
            sum(part[0] for part in parts) / count, sum(part[1] for part in parts) / count
        )
    return found


def _usual(series: TrainingSeries) -> dict[float, float]:
    """The run's median TFLOPs of a GPU at each batch size: a small batch is slower on any node."""
    by_batch: dict[float, list[float]] = {}
    for job in series.throughput.values():
        for batch, tflops in zip(job.batches, job.tflops, strict=True):
            by_batch.setdefault(batch, []).append(tflops)
    return {batch: median(values) for batch, values in by_batch.items()}


def _row(span: TimeSpan) -> str:
    return span.row


def _spans(material: ReportMaterial) -> Iterator[TimeSpan]:
    now = material.snapshot.time
    for attempt in known(material.history.attempts, ()):
        if attempt.ended is not None:
            end = attempt.ended
        elif attempt.is_running:
            end = now
        else:
            end = attempt.last_sign
        for begin, until, working in _stretches(attempt, end):
            for node in attempt.nodes:
                kind = "trained" if node in working else "spare"
                yield TimeSpan(
                    node,
                    begin,
                    end=max(begin, until),
                    kind=kind,
                    label=f"{kind} in attempt {attempt.label}",
                )
    for period in material.history.exclusions:
        end = now if period.end is None else period.end
        yield TimeSpan(period.what, period.start, end=end, kind="excluded", label=period.why)


def _stretches(
    attempt: AttemptHistory, end: float
) -> Sequence[tuple[float, float, tuple[str, ...]]]:
    """When which of an attempt's nodes trained: one stretch a launch, the last one until `end`."""
    launches = [
        (launch.start, launch.end if launch.end is not None else end, launch.nodes)
        for launch in attempt.launches
    ]
    return launches or [(attempt.start, end, attempt.nodes)]
