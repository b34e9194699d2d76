"""Cases of the status screen's rows around the training, for tests."""

from __future__ import annotations

from typing import Any

from tests.tr11ops.status_cases import HOUR, NOW, with_facts
from tr11ops.alerts.state import Alert
from tr11ops.detect.detector import Finding, Severity, fingerprint
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.disk_usage import Usage
from tr11ops.watchdog.verdict import Verdict, VerdictWord


def alert(detector: str = "stalled", subject: str = "1000_7", **changes: Any) -> Alert:
    values: dict[str, Any] = {
        "fingerprint": fingerprint(detector, ()), "detector": detector, "subject": subject,
        "severity": Severity.CRITICAL, "title": "job 1000_7 stands still", "evidence": (), "fix": "",
        "runbook": "stalled.md", "began": NOW - HOUR, "opened": NOW - HOUR, "last_seen": NOW,
    }  # fmt: skip
    return Alert(**{**values, **changes})


def asked_for(given: Snapshot, **changes: Any) -> Snapshot:
    """The same run, whose card asks for more."""
    return with_facts(given, **changes)


HEALTHY = Verdict(VerdictWord.HEALTHY, "it trains")
FAULT = Finding("stalled", Severity.CRITICAL, "job 1000_7 stands still", "1000_7")
REMARK = Finding("chain-end", Severity.WARNING, "one task is left", "")


def look(name: str, share: float, age: float = 600.0, inodes: float = 10.0) -> Usage:
    used = {"bytes_used": share, "bytes_limit": 100.0, "inodes_used": inodes, "inodes_limit": 100.0}
    return Usage(NOW - age, name, "df", f"/{name}", **used)
