"""What each attempt trained and how it ended, and what people and the watchdog did. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import tzinfo

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.goodput.history_values import AttemptHistory
from tr11ops.report.charts.bars import TimeSpan, timeline
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, table
from tr11ops.report.sections.formats import ROWS_SHOWN, moment
from tr11ops.rundir.attempts import version_words
from tr11ops.rundir.journal_lines import lines_of
from trainer.contract.attempt import BAD_REASONS, NO_MARKER, EndMarker
from trainer.contract.units import shortened

ENDINGS = {
    "trained": "ended as it should, or goes on",
    "excluded": "ended by a fault (thin)",
    "queue": "no exit record",
}  # class of its colour, and what it means
JOBS_DRAWN = 40
LONGEST_LABEL = 120  # characters


def attempts(material: ReportMaterial, zone: tzinfo, with_charts: bool) -> ReportSection:
    """One row an attempt, below a time line of them."""
    title = "Attempts"
    found = material.history.attempts
    if isinstance(found, Unknown):
        return ReportSection("attempts", title, empty=f"cannot be read: {found.why}")
    steps: dict[str, list[int]] = {}
    for step in known(material.history.steps, ()):
        steps.setdefault(step.job_id, []).append(step.iteration)
    rows = []
    for attempt in found[-ROWS_SHOWN:]:
        iterations = steps.get(attempt.job_id, [])
        if iterations:
            trained = f"{min(iterations):,} to {max(iterations):,}"
        else:
            trained = "-"
        rows.append(
            (
                attempt.label,
                moment(attempt.start, zone),
                _length(attempt),
                str(len(attempt.nodes)),
                str(max(1, len(attempt.launches))),
                trained,
                _ending(attempt),
            )
        )
    columns = (
        Column("attempt"),
        Column("start"),
        Column("length", True),
        Column("nodes", True),
        Column("launches", True),
        Column("iterations", True),
        Column("end", is_wide=True),
    )
    charts: tuple[str, ...] = ()
    if with_charts and found:
        spans = list(_spans(found, material.snapshot.time))
        charts = (timeline("attempts-chart", spans, ENDINGS, zone, is_each=True),)
    return ReportSection(
        "attempts", title, charts=charts, table=table(columns, rows), empty="none yet"
    )


def _spans(found: Sequence[AttemptHistory], now: float) -> Iterator[TimeSpan]:
    """When each attempt held its nodes; those of an array stand in one row, the newest JOBS_DRAWN
    rows.
    """
    jobs = dict.fromkeys(_job(attempt) for attempt in found)
    drawn = set(list(jobs)[-JOBS_DRAWN:])
    for attempt in found:
        if _job(attempt) not in drawn:
            continue
        if attempt.ended is not None:
            end = attempt.ended
        elif attempt.is_running:
            end = now
        else:
            end = attempt.last_sign
        ending = _ending(attempt)
        kind = {"critical": "excluded", "warning": "queue"}.get(ending.style, "trained")
        label = shortened(f"{attempt.label}: {ending.text}", LONGEST_LABEL)
        yield TimeSpan(
            _job(attempt), attempt.start, end=max(attempt.start, end), kind=kind, label=label
        )


def _job(attempt: AttemptHistory) -> str:
    """The number of the array that it is a task of; its own where it is of none."""
    return f"job {attempt.label.partition('_')[0]}"


def software(material: ReportMaterial) -> ReportSection | None:
    """Which code each of the newest attempts ran, and what it had otherwise than the one before;
    None: not recorded.
    """
    found = known(material.snapshot.attempts, ())
    rows = [
        (
            attempt.label or attempt.job_id,
            str(attempt.code),
            version_words(attempt.versions),
            "; ".join(line.partition(": ")[2] for line in attempt.changes) or "-",
        )
        for attempt in found
        if attempt.code is not None
    ]
    if not rows:
        return None
    columns = (
        Column("attempt"),
        Column("code"),
        Column("versions"),
        Column("since the one before", is_wide=True),
    )
    folder = next(attempt.code.folder for attempt in found if attempt.code is not None)
    lines = (
        f"Uncommitted changes are in code.diff in the folder of each attempt; the code lies in {folder}.",
    )
    return ReportSection("software", "Which code ran", lines, table=table(columns, rows))


def _length(attempt: AttemptHistory) -> str:
    """From its start to its end; where no one has said when that was, to its last sign of life."""
    if attempt.ended is not None:
        return duration(attempt.ended - attempt.start)
    lived = duration(attempt.last_sign - attempt.start)
    if attempt.is_running or isinstance(attempt.marker, EndMarker):
        return lived
    return f"about {lived}"


def _ending(attempt: AttemptHistory) -> Cell:
    if isinstance(attempt.marker, EndMarker):
        bad = attempt.marker.reason in BAD_REASONS
        text = f"{attempt.marker.reason}: {attempt.marker.message}"
        if bad:
            return Cell(text, "critical")
        return Cell(attempt.marker.reason)
    if attempt.is_running:
        return Cell("running")
    if attempt.ended is None:
        return Cell("no exit record", "warning")
    verdict = attempt.verdict
    if verdict is not None and not isinstance(verdict, Unknown):
        message = verdict.message
    else:
        message = NO_MARKER
    return Cell(message, "critical")


def actions(material: ReportMaterial, zone: tzinfo) -> ReportSection:
    """What people and tr11 did, and why; the newest first."""
    rows = [
        (moment(line.time, zone), line.who, line.text, line.why or "-")
        for line in reversed(lines_of(material.journal)[-ROWS_SHOWN:])
    ]
    columns = (Column("when"), Column("who"), Column("action"), Column("why", is_wide=True))
    return ReportSection(
        "actions", "What was done", table=table(columns, rows), empty="nothing yet"
    )
