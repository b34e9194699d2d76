"""What the status screen looks at beyond the Snapshot: who has which alert, the launch's nodes, the
best speed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from tr11ops.alerts.state import (
    Alert,
    AlertCare,
    AlertState,
    HeldVerdict,
    OnCall,
    UndeliveredMessages,
    untold,
)
from tr11ops.alerts.store import current_alert_state, outbox_folder
from tr11ops.base.observed import (
    Observed,
    Unknown,
    known,
    observed,
    observed_fields,
    unknown_fields,
)
from tr11ops.detect.detector import STANDS_STILL, Finding, Severity, merged
from tr11ops.detect.nodes_left import (
    excluded_nodes,
    held_nodes,
    lost_nodes,
    spare_nodes,
    training_count,
    unusable_nodes,
)
from tr11ops.detect.registry import unjudged_detectors
from tr11ops.detect.watch import WATCHDOG, watchdog_fault
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.paths import RunDirectory
from tr11ops.watchdog.verdict import Verdict, seen_something
from trainer.contract.metrics_record import parse_record
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import descriptor_of

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.copies import DrillRecord


# Looks into a log of any length at a few places: the best throughput that a run ever kept up, for
# little reading.

PLACES = 24
PLACE_BYTES = 12 << 10  # some 20 records of metrics.jsonl, some 30 lines of main_log.txt
LEAST_RECORDS = 5
# a speed that the run kept up; longer, and what has been slow for as long as it was quick hides the
# best
RECORDS = 10

Rates = tuple[float, float]  # TFLOPs of a worker, samples a second


def best_rates(paths: RunPaths) -> Observed[Rates | None]:
    """The highest medians of a few consecutive steps, at places spread over the whole log; None
    where there is no step.

    0 stands for a rate that was not logged. Reads at most `PLACES * PLACE_BYTES` bytes, whatever
    the log's size.
    """

    def read() -> Rates | None:
        for path, parse in ((paths.metrics, _of_metrics), (paths.main_log, _of_log)):
            found = list(_medians(path, parse))
            if found:
                return max(tflops for tflops, _ in found), max(samples for _, samples in found)
        return None

    return observed(read)


def _medians(path: Path, parse: Callable[[str], Rates | None]) -> Iterator[Rates]:
    try:
        descriptor = descriptor_of(path)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        if size <= PLACE_BYTES:
            places = 1
        else:
            places = min(PLACES, -(-size // PLACE_BYTES))
        for place in range(places):
            if places == 1:
                start = 0
            else:
                start = (size - PLACE_BYTES) * place // (places - 1)
            text = os.pread(descriptor, PLACE_BYTES, start).decode("utf-8", errors="replace")
            lines = text.split("\n")[0 if start == 0 else 1 : -1]
            rates = [found for line in lines if (found := parse(line)) is not None]
            for first in range(0, len(rates), RECORDS):
                kept = rates[first : first + RECORDS]
                if len(kept) >= LEAST_RECORDS:
                    yield (
                        median(tflops for tflops, _ in kept),
                        median(samples for _, samples in kept),
                    )
    finally:
        os.close(descriptor)


def _of_metrics(line: str) -> Rates | None:
    record = parse_record(line)
    if record is None or not record.is_step:
        return None
    return _positive(record.number("tflops")), _positive(record.number("samples_per_second"))


def _of_log(line: str) -> Rates | None:
    if "iteration" not in line:
        return None
    from tr11ops.dialects.reading import step_record

    record = step_record(line)
    if record is None:
        return None
    return (_positive(record.tflops), _positive(record.samples_per_second))


def _positive(value: float) -> float:
    if math.isfinite(value):
        return max(0.0, value)
    return 0.0


SYNC = "sync"
COPY_CLAIMS = {"store": "copy-store", "url": "copy-url", SYNC: "hub-sync"}  # by what is copied to


class NodeUse(Record):
    """How many nodes the run holds: those that the launch trains on, spares, and how many it must
    not use.
    """

    used: int
    spare: int
    excluded: int | None


class RunningCopy(Record):
    """Someone copies now: to an archive of the card, or to the hub (`to` is "sync"), since `since`
    (epoch seconds).
    """

    to: str
    who: str
    host: str
    since: float
    step: int | None = None


class ExtraObservations(Record):
    """Observed beside a Snapshot.

    `drill` is the last restore that was tried. `waiting`: messages that no server has taken yet.
    `looked`: when a watchdog, or a person as one, last looked at the run, and who that was; None for
    never, or where that cannot be read. `verdict`: what the watchdog's looks concluded so far.
    `on_call`: who is told first; None where the alerts, and so who took the shift, are unknown.
    `is_quiet`: only what is critical is told now. `untold`: what a look has found of which the
    watchdog has still to tell people (`seen_with`).
    What the card does not ask for is not looked at.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "best": "best throughput",
        "drill": "restore drill",
        "waiting": "messages",
    }

    alerts: Observed[tuple[Alert, ...]] = ()
    best: Observed[Rates | None] = None
    copying: Observed[tuple[RunningCopy, ...]] = ()
    drill: Observed[DrillRecord | None] = None
    waiting: Observed[UndeliveredMessages | None] = None
    looked: float | None = None
    looked_by: str = ""
    verdict: HeldVerdict | None = None
    on_call: OnCall | None = None
    is_quiet: bool = False
    untold: tuple[AlertCare, ...] = ()

    def unknowns(self) -> tuple[str, ...]:
        """What could not be observed, as `what: why`."""
        return tuple(unknown_fields(self))

    def seen_with(
        self, snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict
    ) -> ExtraObservations:
        """With the open alerts as a look sees them that has found this, and changes none: in its words; of
        what it no longer finds, when the watchdog closes it. And with what no one was told of yet.
        """
        if isinstance(self.alerts, Unknown) or not seen_something(snapshot, verdict):
            return self
        found = {finding.fingerprint: finding for finding in merged(findings)}
        unjudged = unjudged_detectors(snapshot)
        # a standstill may go on under another name: a stall that hangs, a loss that ended the job
        if STANDS_STILL & {finding.detector for finding in findings}:
            unjudged |= STANDS_STILL
        jobs = known(snapshot.operation.periodic_jobs, ())
        watchdog = None
        if not watchdog_fault(jobs, snapshot.time):
            watchdog = next(job for job in jobs if job.name == WATCHDOG)

        def now(alert: Alert) -> Alert:
            finding = found.get(alert.fingerprint)
            if finding is not None and finding.severity >= alert.severity:
                return replace(alert, title=finding.title, clear_looks=0)
            if alert.detector in unjudged or not found.keys().isdisjoint(alert.names):
                return alert
            gone = replace(alert, clear_looks=alert.clear_looks + 1)
            if watchdog is None:
                return gone
            looks = snapshot.run.alerts.resolve_after - gone.clear_looks
            return replace(gone, closes=watchdog.next_due + looks * watchdog.interval_seconds)

        least = Severity.CRITICAL if self.is_quiet else Severity.WARNING
        awaited = tuple(
            AlertCare(
                closes=None if watchdog is None else watchdog.next_due,
                subject=f"{finding.detector} {finding.subject}".strip(),
                is_told=False,
            )
            for finding in untold(findings, self.alerts)
            if finding.severity >= least
        )
        return replace(self, alerts=tuple(map(now, self.alerts)), untold=awaited)


EXTRA_NAMES = frozenset(observed_fields(ExtraObservations).values())


def observe_extra(directory: RunDirectory, card: RunCard, snapshot: Snapshot) -> ExtraObservations:
    """Look beside what `snapshot` holds."""
    if snapshot.unmounted or not directory.exists:
        return ExtraObservations(
            alerts=Unknown(snapshot.unmounted or f"{directory.root} is not there")
        )
    from tr11ops.alerts.policy import policy_of

    seen = observed(current_alert_state, directory)
    last = known(seen, AlertState())
    on_call = None
    policy = policy_of(card, mark="", host="")
    if not isinstance(seen, Unknown):
        on_call = policy.on_call(last.shift, snapshot.time)
    return ExtraObservations(
        seen if isinstance(seen, Unknown) else last.open_alerts,
        best_rates(directory.paths),
        copying=observed(lambda: tuple(_at_work(directory, card, snapshot.time))),
        drill=_drill(directory, card),
        waiting=_undelivered(directory),
        looked=last.looked,
        looked_by=last.looked_by,
        verdict=last.verdict,
        on_call=on_call,
        is_quiet=policy.is_quiet(snapshot.time),
    )


def _undelivered(directory: RunDirectory) -> Observed[UndeliveredMessages]:
    """The messages still to be sent. What reads them is loaded where there are some."""
    folder = outbox_folder(directory)
    if not known(observed(lambda: folder.is_dir() and any(folder.iterdir())), True):
        return UndeliveredMessages()
    from tr11ops.alerts.outbox import waiting

    return waiting(directory)


def _at_work(directory: RunDirectory, card: RunCard, now: float) -> Iterator[RunningCopy]:
    """Who copies now, for each archive that the card has, and for the hub."""
    wanted = {"store": card.backup.store, "url": card.backup.url, SYNC: card.hub.repository}
    for to, thing in COPY_CLAIMS.items():
        if not wanted[to] or not (directory.paths.state / "cron" / "claims" / thing).is_dir():
            continue
        from tr11ops.rundir.claims import ClaimFolder

        claim = ClaimFolder(directory, thing).holder(now)
        if claim is not None:
            yield RunningCopy(
                to,
                claim.user,
                host=claim.host,
                since=claim.time,
                step=claim.step,
            )


def _drill(directory: RunDirectory, card: RunCard) -> Observed[DrillRecord | None]:
    if not card.backup.store and not card.backup.url:
        return None

    def read() -> DrillRecord | None:
        if not directory.drill.exists():
            return None
        from tr11ops.rundir.copies import read_drill

        return read_drill(directory)

    return observed(read)


def node_use(snapshot: Snapshot) -> NodeUse | None:
    """None where the jobs are unknown. Without a launch on record as many train as its card says."""
    if isinstance(snapshot.jobs, Unknown):
        return None
    held, launched = held_nodes(snapshot), known(snapshot.training.launch_nodes, None)
    if launched is not None:
        used = len(held & set(launched))
    else:
        used = min(len(held), training_count(snapshot) or len(held))
    spares, runs = spare_nodes(snapshot)
    if launched is not None:
        # one that was excluded while it trains takes a spare at the next launch, and none before
        meant = (excluded_nodes(snapshot) - lost_nodes(snapshot)) & held & set(launched)
        beside = held - set(launched) - unusable_nodes(snapshot)
        spares = min(spares + len(meant), max(spares, len(beside)))
    excluded = None
    if not isinstance(snapshot.exclusions, Unknown):
        excluded = len(snapshot.exclusions)
    return NodeUse(used, spares if runs else 0, excluded)
