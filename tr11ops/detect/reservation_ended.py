"""Queued work whose reservation has ended, or was taken away: the scheduler keeps it, and never
starts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.pending_reasons import Cause
from tr11ops.detect.blocked import blocked
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "the scheduler's reason"
SEVERITIES = "WARNING, CRITICAL when nothing else can run"
NAME = "reservation-ended"
NEEDS = ("jobs", "kill_switch", "pause")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each array: CRITICAL when nothing else of the run can run, else a WARNING."""
    severity = Severity.CRITICAL if derived.is_idle(snapshot) else Severity.WARNING
    yield from blocked(snapshot, NAME, Cause.RESERVATION, "without its reservation", severity)
