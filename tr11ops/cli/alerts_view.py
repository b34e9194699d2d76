"""What the `tr11 alerts` commands share: the run, and how alerts are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tr11ops.base.units import duration

if TYPE_CHECKING:
    from tr11ops.alerts.state import Alert, Incident

SCHEMA = 1


def rows(alerts: Sequence[Alert], over: Sequence[Incident], now: float) -> Iterator[tuple[str, ...]]:
    """Cells of the list: open alerts, then incidents that are over, the newest first."""
    for alert in alerts:
        yield alert.severity.name, alert.fingerprint, duration(now - alert.start), _who(alert, now), alert.title
        for one in alert.consequences:
            yield "", "", "", "", f"from it follows: {one.title}"
    for incident in reversed(over):
        began = incident.lasted_from
        ended = f"over, {duration((incident.lasted_to or began) - began)}"
        since = f"{duration(now - began)} ago"
        yield ended, incident.fingerprint, since, incident.acknowledged_by or "-", incident.title


def _who(alert: Alert, now: float) -> str:
    parts = []
    if alert.owner:
        parts.append(alert.owner)
    if alert.is_acknowledged and alert.acknowledged_by != alert.owner:
        parts.append(f"ack {alert.acknowledged_by}")
    if alert.snoozed_until is not None:
        parts.append(f"snoozed {duration(alert.snoozed_until - now)}")
    return ", ".join(parts) or "no one"


def alert_values(alert: Alert) -> dict[str, Any]:
    """One alert for --json. Times are seconds since the epoch."""
    hidden = {"said", "alarmed", "escalated", "remind", "thread", "clear_looks", "heard", "mails", "headline"}
    values = {key: value for key, value in asdict(alert).items() if key not in hidden}
    values["consequences"] = [{**asdict(one), "severity": one.severity.name} for one in alert.consequences]
    return {**values, "severity": alert.severity.name, "said": alert.said.name if alert.said is not None else None}
