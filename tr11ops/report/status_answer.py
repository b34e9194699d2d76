"""May I sleep? The plain answer to a verdict, with who is at it already. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Observed, Unknown, known
from tr11ops.verdict import Verdict, Word

if TYPE_CHECKING:
    from tr11ops.alerts.book import Alert


@dataclass(frozen=True)
class Answer:
    """`may_sleep` is None where it cannot be told. `text` is a sentence without a full stop."""

    may_sleep: bool | None
    text: str


def answer(verdict: Verdict, findings: tuple[Finding, ...], alerts: Observed[tuple[Alert, ...]]) -> Answer:
    """A verdict that needs a person, or a critical finding, says no; what is lesser waits for the morning.

    A fault that somebody has acknowledged or owns is still a fault, but somebody is up.
    """
    if verdict.word is Word.UNKNOWN:
        return Answer(None, "It cannot be told whether you may sleep")
    critical = [finding for finding in findings if finding.severity is Severity.CRITICAL]
    if verdict.exit_code or critical:
        owner = _owner(critical, known(alerts, ()))
        return Answer(
            False, f"{owner} has it; if that is you, stay up" if owner else "Do not sleep: a person is needed"
        )
    open_ones = [alert for alert in known(alerts, ()) if alert.severity is Severity.CRITICAL]
    if open_ones and not all(_who(alert) for alert in open_ones):
        return Answer(False, "Not yet: a critical alert is open and nobody has it")
    blind = " (alerts are unknown)" if isinstance(alerts, Unknown) else ""
    warnings = sum(finding.severity is Severity.WARNING for finding in findings)
    if warnings:
        return Answer(True, f"You may sleep; {warnings} warning{'s' * (warnings > 1)} can wait for the morning{blind}")
    return Answer(True, f"You may sleep{blind}")


def _owner(critical: list[Finding], alerts: tuple[Alert, ...]) -> str:
    """Who has all that is critical; "" as soon as one thing has nobody."""
    if not alerts or not critical:
        return ""
    from tr11ops.alerts.fingerprint import fingerprint

    owners = {alert.fingerprint: _who(alert) for alert in alerts}
    people = [owners.get(fingerprint(finding.detector, finding.identity), "") for finding in critical]
    return " and ".join(dict.fromkeys(people)) if all(people) else ""


def _who(alert: Alert) -> str:
    return alert.owner or alert.acknowledged_by
