"""Everything that the report page is made of, read once. What could not be read is Unknown, and the page says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tr11ops.detect.finding import Finding
from tr11ops.evidence import observed
from tr11ops.journal import Entry, read_journal
from tr11ops.report.goodput import Goodput, account
from tr11ops.report.history import History, read_history
from tr11ops.report.series import Series, read_series
from tr11ops.report.status_answer import Answer, answer
from tr11ops.report.status_surroundings import Surroundings
from tr11ops.snapshot import Observed, Snapshot, Unknown
from tr11ops.verdict import Verdict, judge

if TYPE_CHECKING:
    from tr11ops.alerts.book import Incident
    from tr11ops.checkpoints.scan import CheckpointRow
    from tr11ops.cluster.base import Scheduler
    from tr11ops.rundir import RunDirectory
    from tr11ops.snapshot import RunFacts


@dataclass(frozen=True)
class Material:
    """One run, seen as a whole. `doubts` are what could not be read, each cause once."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    answer: Answer
    history: History
    goodput: Goodput
    series: Observed[Series]
    incidents: Observed[tuple[Incident, ...]]
    checkpoints: Observed[tuple[CheckpointRow, ...]]
    journal: tuple[Entry, ...]
    doubts: tuple[str, ...]


def gather(directory: RunDirectory, facts: RunFacts, scheduler: Scheduler | Unknown, now: float) -> Material:
    """Read it all. Only the run directory and the scheduler are looked at, and nothing is changed."""
    from tr11ops.alerts.reading import incidents, open_alerts, waiting
    from tr11ops.checkpoints.scan import list_rows
    from tr11ops.detect.registry import detect_all
    from tr11ops.observe import look_now, observe

    snapshot = observe(directory, facts, scheduler, look_now(directory, facts, scheduler))
    findings = detect_all(snapshot)
    verdict = judge(snapshot, findings)
    ledger = read_journal(directory.journal)
    history = read_history(directory, snapshot.jobs, ledger)
    latest = None if isinstance(snapshot.checkpoints, Unknown) else snapshot.checkpoints.latest
    named = latest if isinstance(latest, int) else None
    series = observed(lambda: read_series(directory.paths.metrics))
    rows = observed(lambda: tuple(list_rows(directory.paths.checkpoints, named)))
    seen = incidents(directory)
    parts = (("metrics", series), ("alerts", seen), ("checkpoints", rows))
    unread = tuple(f"{name}: {value.why}" for name, value in parts if isinstance(value, Unknown))
    return Material(
        snapshot=snapshot,
        findings=findings,
        verdict=verdict,
        answer=answer(snapshot, findings, verdict, Surroundings(open_alerts(directory), waiting=waiting(directory))),
        history=history,
        goodput=account(history, now),
        series=series,
        incidents=seen,
        checkpoints=rows,
        journal=ledger.entries,
        doubts=_each_cause_once((*snapshot.unknowns(), *history.doubts, *unread)),
    )


def _each_cause_once(doubts: Iterable[str]) -> tuple[str, ...]:
    """The lines (`what: why`) without those whose cause an earlier one has named already."""
    kept: list[str] = []
    for doubt in doubts:
        cause = doubt.partition(": ")[2] or doubt
        if not any(cause in line for line in kept):
            kept.append(doubt)
    return tuple(kept)
