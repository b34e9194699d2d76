"""A watched file system is not full yet, but will be soon at the pace of the last days."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.detect.filesystem_rules import filling, full, with_limits
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.disk_usage import forecast, newest

BOUND = "`forecast_days` (14); 2 days"
SEVERITIES = "INFO, WARNING"
NAME = "filesystem-filling"
NEEDS = ("operation.usage",)

SOON_SECONDS = 2 * derived.DAY


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING when it fills within two days, INFO within the card's `forecast_days`; silent where
    it is full now.
    """
    samples = known(snapshot.operation.usage, ())
    last = newest(samples)
    for rule in snapshot.run.operation.filesystems:
        if rule.name not in last or full(with_limits(last[rule.name], rule), rule):
            continue
        own = [with_limits(sample, rule) for sample in samples if sample.name == rule.name]
        found = forecast(own, snapshot.time)
        line = filling(found, rule, snapshot.time)
        if line and found.full_at is not None:
            if found.per_day is None:
                growth = ""
            else:
                growth = f"it grows by {found.per_day:.2g} % of its limit a day"
            yield Finding(
                NAME,
                Severity.WARNING if found.full_at - snapshot.time < SOON_SECONDS else Severity.INFO,
                line,
                subject=rule.name,
                identity=(rule.name,),
                evidence=(growth,) if growth else (),
                fix=derived.command(snapshot, "checkpoints prune --keep 2"),
                then=(derived.command(snapshot, "fs-watchdog"),),
            )
