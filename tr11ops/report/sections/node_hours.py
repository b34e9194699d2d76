"""Where the node-hours went, in all and by attempt. Pure."""

from __future__ import annotations

from tr11ops.goodput.timeline import Bucket
from tr11ops.report.charts.bars import BarRow, bars
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, table
from tr11ops.report.sections.formats import hours

ATTEMPTS_CHARTED = 60


def node_hours(material: ReportMaterial, with_charts: bool) -> ReportSection:
    """The buckets of `tr11 goodput`."""
    total = material.goodput.total
    title = "Where the node-hours went"
    if not total.node_micros:
        return ReportSection("goodput", title, empty="nothing was submitted yet")
    rows = [
        (
            Cell(bucket.value, swatch=colour(bucket)),
            hours(amount.node_hours),
            f"{100 * amount.node_micros / total.node_micros:.2f} %",
            hours(amount.spare_micros / 3.6e9),
        )
        for bucket, amount in material.goodput.buckets.items()
        if amount.node_micros
    ]
    rows.append(
        (Cell("all"), hours(total.node_hours), "100.00 %", hours(total.spare_micros / 3.6e9))
    )
    columns = (
        Column("bucket"),
        Column("node-hours", True),
        Column("share", True),
        Column("of it spares", True),
    )
    charts = (_by_attempt(material),) if with_charts else ()
    return ReportSection("goodput", title, charts=charts, table=table(columns, rows))


def colour(bucket: Bucket) -> str:
    """The class that gives the bucket its colour."""
    return bucket.value.replace(" ", "-")


def _by_attempt(material: ReportMaterial) -> str:
    labels = material.history.labels
    spent = material.goodput.by(lambda span: (span.job_id, span.bucket))
    jobs = list(dict.fromkeys(job for job, _ in spent))[-ATTEMPTS_CHARTED:]
    rows = []
    for job in jobs:
        amounts = [
            (bucket, spent[job, bucket].node_hours) for bucket in Bucket if (job, bucket) in spent
        ]
        parts = tuple(
            (colour(bucket), amount, f"{hours(amount)} node-hours {bucket.value}")
            for bucket, amount in amounts
        )
        if job:
            name = labels.get(job, job)
        else:
            name = "no nodes held"
        rows.append(BarRow(name, parts, f"{hours(sum(amount for _, amount in amounts))} h"))
    return bars("goodput-chart", rows)
