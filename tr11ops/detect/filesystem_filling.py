"""A watched file system is not full yet, but will be soon at the pace of the last days."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.filesystems.history import forecast, newest
from tr11ops.filesystems.judge import filling, full, with_limits
from tr11ops.snapshot import Snapshot, known

NAME = "filesystem-filling"
NEEDS = ("usage",)

SOON_SECONDS = 2 * signs.DAY


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING when it fills within two days, INFO within the card's `forecast_days`; silent where it is full now."""
    samples = known(snapshot.usage, ())
    last = newest(samples)
    for rule in snapshot.run.operation.filesystems:
        if rule.name not in last or full(with_limits(last[rule.name], rule), rule):
            continue
        own = [with_limits(sample, rule) for sample in samples if sample.name == rule.name]
        found = forecast(own, snapshot.time)
        line = filling(found, rule, snapshot.time)
        if line and found.full_at is not None:
            growth = "" if found.per_day is None else f"it grows by {found.per_day:.2g} % of its limit a day"
            yield Finding(
                NAME,
                Severity.WARNING if found.full_at - snapshot.time < SOON_SECONDS else Severity.INFO,
                line,
                subject=rule.name,
                identity=(rule.name,),
                evidence=(growth,) if growth else (),
                fix=signs.command(snapshot, "fs-watchdog"),
            )
