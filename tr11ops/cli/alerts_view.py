"""What the `tr11 alerts` commands share: the run, and how alerts are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tr11ops.alerts.reading import kept_here
from tr11ops.base.observed import known, observed
from tr11ops.base.units import duration
from tr11ops.observe.operation_files import read_unwritable_directories
from trainer.contract.documents import document

if TYPE_CHECKING:
    from tr11ops.alerts.state import Alert, Incident
    from tr11ops.rundir.paths import RunDirectory

SCHEMA = 1


def kept_elsewhere(directory: RunDirectory) -> str:
    """Where else alerts may be that are not seen here; "" where the run directory takes them, or this machine does."""
    shut = known(read_unwritable_directories(directory.paths), ())
    if not shut or known(observed(lambda: kept_here(directory)), None) is not None:
        return ""
    return (
        f"{shut[0].path} cannot be written to ({shut[0].why}): the watchdog keeps what it has opened since on its own "
        "machine; type this on the machine that its mails name"
    )


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
    hidden = {"alarmed", "escalated", "remind", "thread", "clear_looks", "heard", "mails", "headline"}
    return {key: value for key, value in document(alert).items() if key not in hidden}
