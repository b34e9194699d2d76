"""The whole report page, from what was read. Pure."""

from __future__ import annotations

from datetime import tzinfo

from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Page, ReportSection
from tr11ops.report.sections import (
    attempts,
    checkpoints,
    head,
    incidents,
    node_hours,
    nodes,
    training,
)
from tr11ops.report.sections.formats import clock


def page_of(material: ReportMaterial, zone: tzinfo, with_charts: bool = True) -> Page:
    """Times are shown in `zone`; without charts it is text and tables alone."""
    snapshot = material.snapshot
    sections = (
        incidents.open_findings(material),
        training.course(material, zone, with_charts),
        node_hours.node_hours(material, with_charts),
        incidents.faults(material, zone),
        incidents.alerts(material, zone),
        attempts.attempts(material, zone, with_charts),
        attempts.software(material),
        nodes.nodes(material, zone, with_charts),
        checkpoints.checkpoints(material, zone),
        attempts.actions(material, zone),
        _read_errors(material),
    )
    return Page(
        name=f"{snapshot.run.name} / {snapshot.run.variant}",
        sentence=head.sentence(material, zone),
        verdict=material.verdict.word.value.upper(),
        verdict_class=head.verdict_class(material),
        answer=material.answer.text,
        why=material.verdict.why,
        share=head.share(material),
        progress=head.progress(material, zone),
        tiles=tuple(head.tiles(material, zone)),
        sections=tuple(section for section in sections if section is not None),
        footer=(
            f"Made by tr11 at {clock(snapshot.time, zone)} ({zone}) from {snapshot.run.directory}.",
            "This page needs no network: everything is inside the file.",
        ),
    )


def _read_errors(material: ReportMaterial) -> ReportSection | None:
    if not material.read_errors:
        return None
    return ReportSection("unknown", "What could not be seen", material.read_errors)
