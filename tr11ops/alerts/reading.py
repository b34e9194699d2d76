"""What status, hand-over and report read of the alerts. Reading changes nothing; what cannot be read is Unknown."""

from __future__ import annotations

from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Alert, Incident, UndeliveredMessages
from tr11ops.alerts.store import read_alert_state
from tr11ops.base.observed import Observed, observed
from tr11ops.rundir.paths import RunDirectory


def open_alerts(directory: RunDirectory) -> Observed[tuple[Alert, ...]]:
    """The open alerts, the most severe first; empty where no look was ever made."""
    return observed(lambda: read_alert_state(directory).alert_state.open_alerts)


def incidents(directory: RunDirectory) -> Observed[tuple[Incident, ...]]:
    """Every incident, also those that are over, oldest first."""
    return observed(lambda: read_alert_state(directory).alert_state.incidents())  # noqa: PLW0108  the alert state is read inside


def waiting(directory: RunDirectory) -> Observed[UndeliveredMessages]:
    """The messages still to be sent."""

    def read() -> UndeliveredMessages:
        entries = waiting_entries(directory)
        trouble = next((entry.trouble for entry in entries if entry.trouble), "")
        return UndeliveredMessages(len(entries), min((entry.message.time for entry in entries), default=None), trouble)

    return observed(read)
