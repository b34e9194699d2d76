"""What is wrong now, the faults that stopped the training, and the alerts. Pure."""

from __future__ import annotations

from datetime import tzinfo

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.detect.detector import Finding, by_cause
from tr11ops.goodput.causes import Interruption
from tr11ops.goodput.history_values import History
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, table
from tr11ops.report.sections.formats import ROWS_SHOWN, moment, severity


def open_findings(material: ReportMaterial) -> ReportSection | None:
    """The findings of this moment by their causes, with the command to type; None where nothing is
    wrong.
    """
    if not material.findings:
        return None
    rows = [
        (
            severity(finding.severity),
            _with_consequences(finding),
            "; ".join(finding.evidence[:3]),
            Cell("; ".join(finding.commands), "code"),
        )
        for finding in by_cause(material.findings)
    ]
    columns = (
        Column("severity"),
        Column("what", is_wide=True),
        Column("seen", is_wide=True),
        Column("to type"),
    )
    return ReportSection("findings", "What is wrong now", table=table(columns, rows))


def _with_consequences(finding: Finding) -> str:
    return finding.title + "".join(
        f"; from it follows: {one.title}" for one in finding.consequences
    )


def faults(material: ReportMaterial, zone: tzinfo) -> ReportSection:
    """Each unplanned end: its cause, and the time to detect and to recover."""
    title = "Faults that stopped the training"
    found = material.goodput.faults
    if not found:
        return ReportSection("faults", title, empty="none")
    labels = material.history.labels
    rows = []
    for fault in found[-ROWS_SHOWN:]:
        before = _last_step_before(material.history, fault)
        if before is None:
            noticed = "-"
        else:
            noticed = duration(fault.time - before)
        recovered = Cell("not yet", "warning")
        if fault.recovered is not None:
            recovered = Cell(duration(fault.recovered - fault.time))
        label = labels.get(fault.job_id, fault.job_id)
        rows.append(
            (moment(fault.time, zone), label, str(fault.launch), fault.words, noticed, recovered)
        )
    columns = (
        Column("first sign"),
        Column("attempt"),
        Column("launch", True),
        Column("cause", is_wide=True),
        Column("to detect", True),
        Column("to recover", True),
    )
    lines = (
        "To detect: from the last iteration to the first sign of the failure.",
        "To recover: from there until the training went on.",
    )
    return ReportSection("faults", title, lines, table=table(columns, rows))


def _last_step_before(history: History, fault: Interruption) -> float | None:
    times = [
        step.time
        for step in known(history.steps, ())
        if step.job_id == fault.job_id and step.time <= fault.time
    ]
    return max(times, default=None)


def alerts(material: ReportMaterial, zone: tzinfo) -> ReportSection:
    """Every incident that the watchdog reported: when, who took it, until when."""
    title = "Alerts"
    if isinstance(material.incidents, Unknown):
        return ReportSection("incidents", title, empty=f"cannot be read: {material.incidents.why}")
    rows = [
        (
            moment(incident.lasted_from, zone),
            severity(incident.severity),
            incident.title,
            duration(incident.opened - incident.lasted_from),
            incident.acknowledged_by or "-",
            Cell("open", "warning")
            if incident.lasted_to is None
            else Cell(duration(incident.lasted_to - incident.lasted_from)),
        )
        for incident in material.incidents[-ROWS_SHOWN:]
    ]
    columns = (
        Column("began"),
        Column("severity"),
        Column("what", is_wide=True),
        Column("to notify", True),
        Column("acknowledged by"),
        Column("until over", True),
    )
    return ReportSection(
        "incidents", title, table=table(columns, rows), empty="none was ever raised"
    )
