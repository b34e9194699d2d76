"""Everything that the report page is made of, read once. What could not be read is Unknown, and the
page says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import asdict

from tr11ops.alerts.outbox import waiting
from tr11ops.alerts.state import Incident
from tr11ops.alerts.store import incidents, open_alerts
from tr11ops.base.observed import Observed, Unknown, observed
from tr11ops.cluster.base import Scheduler
from tr11ops.curves.curve import WHOLE, CurveRange
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.history_values import History
from tr11ops.observe.forecast import ForecastEnd, end_of
from tr11ops.observe.snapshot import RunFacts, Snapshot
from tr11ops.report.series import TrainingSeries, read_series
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint, list_rows
from tr11ops.rundir.journal import JournalEntry, read_journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import Assessment, assess
from tr11ops.status.extra_observations import ExtraObservations


class ReportMaterial(Assessment):
    """One run, seen as a whole. `end` is when the training will be done, None where that is not
    known.

    `within` is the part of the course in `series`. `read_errors` are what could not be read, each
    cause once.
    """

    history: History
    goodput: Goodput
    series: Observed[TrainingSeries]
    incidents: Observed[tuple[Incident, ...]]
    checkpoints: Observed[tuple[SavedCheckpoint, ...]]
    journal: tuple[JournalEntry, ...]
    end: ForecastEnd | None
    within: CurveRange
    read_errors: tuple[str, ...]


def gather(
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Scheduler | Unknown,
    now: float,
    within: CurveRange = WHOLE,
) -> ReportMaterial:
    """Read it all. Only the run directory and the scheduler are looked at, and nothing is changed.

    `within`: the part of the course that is drawn.
    """

    def beside(snapshot: Snapshot) -> ExtraObservations:
        return ExtraObservations(open_alerts(directory), waiting=waiting(directory))

    assessed = assess(directory, facts, scheduler, beside)
    snapshot = assessed.snapshot
    ledger = read_journal(directory.journal)
    history = read_history(directory, snapshot.jobs, ledger, snapshot.scheduler)
    if isinstance(snapshot.checkpoints, Unknown):
        latest = None
    else:
        latest = snapshot.checkpoints.latest
    named = latest if isinstance(latest, int) else None
    series = observed(read_series, directory.paths.metrics, within)
    rows = observed(lambda: tuple(list_rows(directory.paths.checkpoints, named)))
    seen = incidents(directory)
    parts = (("metrics", series), ("alerts", seen), ("checkpoints", rows))
    unread = tuple(f"{name}: {value.why}" for name, value in parts if isinstance(value, Unknown))
    return ReportMaterial(
        **asdict(assessed),
        history=history,
        goodput=account(history, now),
        series=series,
        incidents=seen,
        checkpoints=rows,
        journal=ledger.entries,
        within=within,
        end=end_of(snapshot),
        read_errors=_each_cause_once((*snapshot.unknowns(), *history.read_errors, *unread)),
    )


def _each_cause_once(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines (`what: why`) without those whose cause an earlier one has named already."""
    kept: list[str] = []
    for line in lines:
        cause = line.partition(": ")[2] or line
        if not any(cause in earlier for earlier in kept):
            kept.append(line)
    return tuple(kept)
