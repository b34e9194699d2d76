"""The kill switch cannot be seen from here: its file system is not mounted, or what lies there is
not the run's.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "WARNING"
NAME = "switch-unseen"
NEEDS = ("switch_fault",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING: the run trains on, but `tr11 kill` does not reach it from here, and nothing is known
    of a stop.
    """
    fault = snapshot.switch_fault
    if isinstance(fault, Unknown) or not fault:
        return
    yield Finding(
        NAME,
        Severity.WARNING,
        "the kill switch cannot be seen from here: whether the run was stopped is not known",
        evidence=(fault, "`tr11 kill` sets nothing here, and says how else the run is stopped"),
        fix=derived.command(snapshot, "kill --dry-run"),
    )
