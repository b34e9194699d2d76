"""What the report page says, section by section: pure, from what was read to texts, tables and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

from tr11ops.detect import signs
from tr11ops.detect.finding import Severity
from tr11ops.operation import CopyStatus
from tr11ops.report import charts
from tr11ops.report.chain import Fault
from tr11ops.report.history import AttemptHistory, History
from tr11ops.report.material import Material
from tr11ops.report.page import Column, Figure, Page, Section, table
from tr11ops.report.status_care import copies_missing
from tr11ops.report.timeline import Bucket
from tr11ops.snapshot import Unknown, known
from tr11ops.units import duration, quantity, size
from tr11ops.verdict import Word
from trainer.contract import EndMarker

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

VERDICT_CLASSES = {
    Word.HEALTHY: "good", Word.FINISHED: "good", Word.STARTING: "calm", Word.QUEUED: "calm", Word.STOPPED: "warn",
    Word.UNKNOWN: "warn", Word.STALLED: "bad", Word.DOWN: "bad",
}  # fmt: skip
BUCKET_COLOURS = {
    Bucket.USEFUL: "#2f8f4e", Bucket.REDONE: "#c2571a", Bucket.SAVE: "#2563ab", Bucket.EVALUATION: "#7aa6d6",
    Bucket.START_UP: "#8d6cc9", Bucket.LOAD: "#b9a3e3", Bucket.RESTART_GAP: "#d98c5f", Bucket.HANG: "#c81e1e",
    Bucket.NODE_LOST: "#7f1d1d", Bucket.QUEUE: "#9aa5b1", Bucket.OPERATOR_PAUSE: "#cbd2d9", Bucket.UNKNOWN: "#000000",
}  # fmt: skip
NODE_COLOURS = {"trained": "#2f8f4e", "spare": "#7aa6d6", "excluded": "#c81e1e"}
ATTEMPTS_CHARTED = 60
ROWS_SHOWN = 500
PEOPLES = {  # entries of the journal that are a person's or the watchdog's doing, in words
    "submitted": "submitted", "kill-switch-set": "kill switch set", "kill-switch-released": "kill switch released",
    "pause": "paused", "resumed": "resumed", "held": "held what waits", "array-held": "held what waits",
    "node-excluded": "node excluded", "node-included": "node included", "repaired": "chain repaired",
    "replaced": "queue replaced",
    "launch-failed": "launch failed", "checkpoint-asked": "checkpoint asked for",
    "rollback": "rolled back", "rollback-withdrawn": "roll-back withdrawn",
}  # fmt: skip


def page_of(material: Material, zone: tzinfo, with_charts: bool = True) -> Page:
    """The whole page. Times are shown in `zone`; without charts it is text and tables alone."""
    snapshot = material.snapshot
    done, total = signs.iteration(snapshot), signs.total_iterations(snapshot)
    share = None if done is None or not total else min(100.0, round(100.0 * done / total, 2))
    sections = (
        _open_findings(material),
        _course(material, zone, with_charts),
        _goodput(material, with_charts),
        _faults(material, zone),
        _incidents(material, zone),
        _attempts(material, zone),
        _nodes(material, zone, with_charts),
        _checkpoints(material, zone),
        _actions(material, zone),
        _doubts(material),
    )
    return Page(
        name=f"{snapshot.run.name} / {snapshot.run.variant}",
        verdict=material.verdict.word.value.upper(),
        verdict_class=_verdict_class(material),
        answer=material.answer.text,
        why=material.verdict.why,
        share=share,
        progress=_progress(material, zone),
        figures=tuple(_figures(material)),
        sections=tuple(section for section in sections if section is not None),
        footer=(
            f"Made by tr11 at {clock(snapshot.time, zone)} ({zone}) from {snapshot.run.directory}.",
            "This page needs no network: everything is inside the file.",
        ),
    )


def _verdict_class(material: Material) -> str:
    """Good news are shown as such only where a person may sleep."""
    found = VERDICT_CLASSES[material.verdict.word]
    return "warn" if found == "good" and material.answer.may_sleep is not True else found


def clock(time: float | None, zone: tzinfo) -> str:
    """A moment to the minute; a dash for none."""
    return "-" if time is None else datetime.fromtimestamp(time, tz=zone).strftime("%Y-%m-%d %H:%M")


def _progress(material: Material, zone: tzinfo) -> str:
    snapshot = material.snapshot
    done, total = signs.iteration(snapshot), signs.total_iterations(snapshot)
    if done is None:
        return "no iteration yet"
    text = f"iteration {done:,}" + (f" of {total:,}" if total else "")
    left = signs.remaining_seconds(snapshot)
    if left is not None and left > 0:
        text += f"; {duration(left)} of training left at the present speed"
    return f"{text}; seen {clock(snapshot.time, zone)}"


def _figures(material: Material) -> Iterator[Figure]:
    snapshot, goodput = material.snapshot, material.goodput
    steps = known(snapshot.steps, ())
    if steps:
        last = steps[-1].record
        yield Figure("loss", f"{last.lm_loss:.4g}")
        yield Figure("tokens", quantity(last.consumed_tokens))
        yield Figure("TFLOPs per GPU", f"{last.tflops:.4g}")
        yield Figure("seconds an iteration", f"{last.seconds_per_iteration:.4g}")
    if goodput.effective_time_ratio is not None:
        yield Figure("effective training time", f"{100 * goodput.effective_time_ratio:.1f} %")
    if goodput.useful_of_held is not None:
        yield Figure("useful of the nodes held", f"{100 * goodput.useful_of_held:.1f} %")
    yield Figure("node-hours held", _hours(goodput.total.held_micros / 3.6e9))
    yield Figure("faults", str(len(goodput.faults)))
    if goodput.seconds_between_faults is not None:
        yield Figure("between faults", duration(goodput.seconds_between_faults))
    if goodput.seconds_to_recover is not None:
        yield Figure("to recover, on average", duration(goodput.seconds_to_recover))


def _open_findings(material: Material) -> Section | None:
    if not material.findings:
        return None
    rows = [
        ((finding.severity.name.lower(), _style(finding.severity)), finding.title, "; ".join(finding.evidence[:3]),
         (finding.fix, "code"))
        for finding in material.findings
    ]  # fmt: skip
    columns = (Column("severity"), Column("what", is_wide=True), Column("seen", is_wide=True), Column("to type"))
    return Section("findings", "What is wrong now", table=table(columns, rows))


def _hours(hours: float) -> str:
    """Hours of a long run without decimals, of a short one with some."""
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.2f}" if hours >= 1 else f"{hours:.4f}"


def _style(severity: Severity) -> str:
    return severity.name.lower() if severity > Severity.INFO else ""


def _course(material: Material, zone: tzinfo, with_charts: bool) -> Section:
    series = material.series
    title = "Course of the training"
    if isinstance(series, Unknown):
        return Section("course", title, empty=f"cannot be read: {series.why}")
    if not series.points:
        return Section("course", title, empty="no step is logged yet")
    marks = _marks(material)
    lines = [f"{series.total:,} steps; dotted lines are incidents, shaded until they were over."]
    if len(series.points) < series.total:
        lines.append(f"{len(series.points):,} of them are drawn, with every stretch's extremes.")
    chart = charts.as_html(charts.course(series, marks, zone), "course-chart", tools=True) if with_charts else ""
    return Section("course", title, tuple(lines), chart)


def _marks(material: Material) -> list[charts.Mark]:
    faults = [
        charts.Mark(fault.time, fault.recovered, Severity.CRITICAL, fault.cause) for fault in material.goodput.faults
    ]
    told = [
        charts.Mark(incident.began, incident.resolved, incident.severity, incident.title)
        for incident in known(material.incidents, ())
        if incident.severity > Severity.INFO
    ]
    return sorted([*faults, *told], key=lambda mark: -mark.severity)[: charts.MOST_MARKS]


def _goodput(material: Material, with_charts: bool) -> Section:
    goodput = material.goodput
    total = goodput.total
    if not total.node_micros:
        return Section("goodput", "Where the node-hours went", empty="nothing was submitted yet")
    rows = [
        ((bucket.value, BUCKET_COLOURS[bucket]), _hours(amount.node_hours),
         f"{100 * amount.node_micros / total.node_micros:.2f} %", _hours(amount.spare_micros / 3.6e9))
        for bucket, amount in goodput.buckets.items()
        if amount.node_micros
    ]  # fmt: skip
    rows.append((("all", ""), _hours(total.node_hours), "100.00 %", _hours(total.spare_micros / 3.6e9)))
    columns = (Column("bucket"), Column("node-hours", True), Column("share", True), Column("of it spares", True))
    chart = charts.as_html(_goodput_chart(material), "goodput-chart") if with_charts else ""
    return Section("goodput", "Where the node-hours went", chart=chart, table=table(columns, rows))


def _goodput_chart(material: Material) -> PlotlyFigure:
    labels = {attempt.job_id: attempt.label for attempt in known(material.history.attempts, ())}
    by_attempt = material.goodput.by(lambda span: (span.job_id, span.bucket))
    jobs = list(dict.fromkeys(job for job, _ in by_attempt))[-ATTEMPTS_CHARTED:]
    names = [labels.get(job, job) if job else "no nodes held" for job in jobs]
    parts = [
        (bucket.value, BUCKET_COLOURS[bucket],
         [by_attempt[job, bucket].node_hours if (job, bucket) in by_attempt else 0.0 for job in jobs])
        for bucket in Bucket
    ]  # fmt: skip
    return charts.stacked(names, parts, "node-hours")


def _faults(material: Material, zone: tzinfo) -> Section:
    title = "Faults that stopped the training"
    faults = material.goodput.faults
    if not faults:
        return Section("faults", title, empty="none")
    labels = {attempt.job_id: attempt.label for attempt in known(material.history.attempts, ())}
    rows = []
    for fault in faults[-ROWS_SHOWN:]:
        before = _last_step_before(material.history, fault)
        noticed = "-" if before is None else duration(fault.time - before)
        recovered = ("not yet", "warning") if fault.recovered is None else duration(fault.recovered - fault.time)
        label = labels.get(fault.job_id, fault.job_id)
        rows.append(((clock(fault.time, zone), "time"), label, str(fault.launch), fault.cause, noticed, recovered))
    columns = (
        Column("first sign"), Column("attempt"), Column("launch", True), Column("cause", is_wide=True),
        Column("to detect", True), Column("to recover", True),
    )  # fmt: skip
    lines = ("To detect: from the last iteration to the first sign of the failure.",
             "To recover: from there until the training went on.")  # fmt: skip
    return Section("faults", title, lines, table=table(columns, rows))


def _last_step_before(history: History, fault: Fault) -> float | None:
    times = [step.time for step in known(history.steps, ()) if step.job_id == fault.job_id and step.time <= fault.time]
    return max(times, default=None)


def _incidents(material: Material, zone: tzinfo) -> Section:
    title = "Alerts"
    if isinstance(material.incidents, Unknown):
        return Section("incidents", title, empty=f"cannot be read: {material.incidents.why}")
    rows = [
        (
            (clock(incident.began, zone), "time"),
            (incident.severity.name.lower(), _style(incident.severity)),
            incident.title,
            duration(incident.opened - incident.began),
            incident.acknowledged_by or "-",
            ("open", "warning") if incident.resolved is None else duration(incident.resolved - incident.began),
        )
        for incident in material.incidents[-ROWS_SHOWN:]
    ]
    columns = (
        Column("seen"), Column("severity"), Column("what", is_wide=True), Column("until told", True),
        Column("taken by"), Column("until over", True),
    )  # fmt: skip
    return Section("incidents", title, table=table(columns, rows), empty="" if rows else "none was ever raised")


def _attempts(material: Material, zone: tzinfo) -> Section:
    title = "Attempts"
    attempts = material.history.attempts
    if isinstance(attempts, Unknown):
        return Section("attempts", title, empty=f"cannot be read: {attempts.why}")
    steps: dict[str, list[int]] = {}
    for step in known(material.history.steps, ()):
        steps.setdefault(step.job_id, []).append(step.iteration)
    rows = []
    for attempt in attempts[-ROWS_SHOWN:]:
        iterations = steps.get(attempt.job_id, [])
        trained = f"{min(iterations):,} to {max(iterations):,}" if iterations else "-"
        end = attempt.ended if attempt.ended is not None else attempt.last_sign
        rows.append(
            (attempt.label, (clock(attempt.start, zone), "time"), duration(end - attempt.start),
             str(len(attempt.nodes)), str(max(1, len(attempt.launches))), trained, _ending(attempt))
        )  # fmt: skip
    columns = (
        Column("attempt"), Column("start"), Column("length", True), Column("nodes", True), Column("launches", True),
        Column("iterations", True), Column("end", is_wide=True),
    )  # fmt: skip
    return Section("attempts", title, table=table(columns, rows), empty="" if rows else "none yet")


def _ending(attempt: AttemptHistory) -> str | tuple[str, str]:
    if isinstance(attempt.marker, EndMarker):
        bad = attempt.marker.reason in {"error", "refused"}
        return (f"{attempt.marker.reason}: {attempt.marker.message}", "critical") if bad else attempt.marker.reason
    if attempt.is_running or attempt.ended is None:
        return "runs" if attempt.is_running else ("no word of its end", "warning")
    verdict = attempt.verdict
    message = verdict.message if verdict is not None and not isinstance(verdict, Unknown) else "no end marker"
    return message, "critical"


def _nodes(material: Material, zone: tzinfo, with_charts: bool) -> Section | None:
    spans = list(_node_spans(material))
    if not spans:
        return None
    nodes = sorted({span.row for span in spans})
    rows = []
    for node in nodes[:ROWS_SHOWN]:
        own = [span for span in spans if span.row == node]
        hours = {kind: sum(span.end - span.begin for span in own if span.kind == kind) / 3600 for kind in NODE_COLOURS}
        now = next((span for span in own if span.kind == "excluded" and span.end >= material.snapshot.time), None)
        why = next((span.label for span in reversed(own) if span.kind == "excluded"), "")
        rows.append(
            (node, _hours(hours["trained"]), _hours(hours["spare"]), ("excluded", "critical") if now else "", why)
        )
    columns = (
        Column("node"), Column("hours trained", True), Column("hours spare", True), Column("now"),
        Column("last excluded because", is_wide=True),
    )  # fmt: skip
    chart = charts.as_html(charts.timeline(spans, NODE_COLOURS, zone), "nodes-chart") if with_charts else ""
    return Section("nodes", "Nodes", chart=chart, table=table(columns, rows))


def _node_spans(material: Material) -> Iterator[charts.Span]:
    now = material.snapshot.time
    for attempt in known(material.history.attempts, ()):
        end = attempt.ended if attempt.ended is not None else now if attempt.is_running else attempt.last_sign
        stretches: Sequence[tuple[float, float, tuple[str, ...]]] = [
            (launch.start, launch.end if launch.end is not None else end, launch.nodes) for launch in attempt.launches
        ] or [(attempt.start, end, attempt.nodes)]
        for begin, until, working in stretches:
            for node in attempt.nodes:
                kind = "trained" if node in working else "spare"
                yield charts.Span(node, begin, max(begin, until), kind, f"{kind} in attempt {attempt.label}")
    for period in material.history.exclusions:
        yield charts.Span(period.what, period.start, now if period.end is None else period.end, "excluded", period.why)


def _checkpoints(material: Material, zone: tzinfo) -> Section:
    title = "Checkpoints"
    if isinstance(material.checkpoints, Unknown):
        return Section("checkpoints", title, empty=f"cannot be read: {material.checkpoints.why}")
    rows = [
        (f"{row.step:,}", (clock(row.created, zone), "time"), size(row.bytes), row.shape,
         "-" if row.consumed_tokens is None else quantity(row.consumed_tokens),
         (row.state, "critical") if row.faults else row.state + (", latest" if row.is_latest else ""))
        for row in list(material.checkpoints)[::-1][:ROWS_SHOWN]
    ]  # fmt: skip
    columns = (
        Column("step", True), Column("made"), Column("size", True), Column("tensor x pipeline x data"),
        Column("tokens", True), Column("state"),
    )  # fmt: skip
    lines = tuple(_copies(material, zone))
    return Section("checkpoints", title, lines, table=table(columns, rows), empty="" if rows else "none yet")


def _copies(material: Material, zone: tzinfo) -> Iterator[str]:
    for name, copy in (
        ("verified copy elsewhere", material.snapshot.backup),
        ("sync to the hub", material.snapshot.sync),
    ):
        if isinstance(copy, Unknown):
            yield f"Last {name}: unknown ({copy.why})."
        elif copy is not None:
            step = "" if copy.step is None else f", step {copy.step:,}"
            fault = f" Since then: {copy.message}." if copy.message else ""
            yield f"Last {name}: {clock(copy.time, zone)}{step}.{fault}"
    missing = copies_missing(material.snapshot)
    if missing:
        yield f"Not copied yet: {missing} of the copies that the card wants."
    if isinstance(material.snapshot.backup, CopyStatus):
        yield from (f"Damaged: {line}." for line in material.snapshot.backup.damaged)


def _actions(material: Material, zone: tzinfo) -> Section:
    chosen = [entry for entry in material.journal if entry.kind in PEOPLES][-ROWS_SHOWN:]
    rows = []
    for entry in reversed(chosen):
        about = entry.data.get("node") or entry.data.get("job_id") or ", ".join(map(str, entry.data.get("jobs") or ()))
        rows.append(
            ((clock(entry.time, zone), "time"), entry.who, PEOPLES[entry.kind], str(about or "-"), entry.why or "-")
        )
    columns = (Column("when"), Column("who"), Column("did"), Column("of"), Column("why", is_wide=True))
    return Section("actions", "What was done", table=table(columns, rows), empty="" if rows else "nothing yet")


def _doubts(material: Material) -> Section | None:
    if not material.doubts:
        return None
    return Section("unknown", "What could not be seen", material.doubts)
