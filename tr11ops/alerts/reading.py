"""What commands, status, hand-over and report read of the alerts. Reading changes nothing; what
cannot be read is Unknown.

What a watchdog of this machine kept in its fallback directory, while the run directory could not be
written, counts.
"""

from __future__ import annotations

from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Alert, AlertState, Incident, UndeliveredMessages, merged
from tr11ops.alerts.store import read_alert_state
from tr11ops.base.observed import Observed, observed
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory


def current_alert_state(directory: RunDirectory) -> AlertState:
    """What is known of the alerts, wherever it is kept. Raises OSError and ValueError as
    `read_alert_state` does.
    """
    home = read_alert_state(directory).alert_state
    local = kept_here(directory)
    if local is None:
        return home
    return merged(home, local)


def kept_here(directory: RunDirectory) -> AlertState | None:
    """The alert state in this machine's fallback directory; None where there is none. Raises as
    `read_alert_state`.
    """
    local = existing_fallback(directory)
    if local is None:
        alert_state = AlertState()
    else:
        alert_state = read_alert_state(local).alert_state
    if alert_state == AlertState():
        return None
    return alert_state


def open_alerts(directory: RunDirectory) -> Observed[tuple[Alert, ...]]:
    """The open alerts, the most severe first; empty where no look was ever made."""
    return observed(lambda: current_alert_state(directory).open_alerts)


def incidents(directory: RunDirectory) -> Observed[tuple[Incident, ...]]:
    """Every incident, also those that are over, oldest first."""
    return observed(lambda: current_alert_state(directory).incidents())


def waiting(directory: RunDirectory) -> Observed[UndeliveredMessages]:
    """The messages still to be sent."""

    def read() -> UndeliveredMessages:
        entries = waiting_entries(directory)
        trouble = next((entry.trouble for entry in entries if entry.trouble), "")
        return UndeliveredMessages(
            len(entries), min((entry.message.time for entry in entries), default=None), trouble
        )

    return observed(read)
