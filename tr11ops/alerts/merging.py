"""two alert states of alerts that went on from one: the run's own, and that of a machine which
could not write it. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from tr11ops.alerts.state import CLOSED_KEPT, Alert, AlertState, incident_of


def merged(home: AlertState, local: AlertState) -> AlertState:
    """What both alert states know: of each alert the later word, every incident, and all that is
    still to be done.
    """
    alerts = _open_in(home, local)
    closed = {(one.fingerprint, one.began): one for one in (*home.closed, *local.closed)}
    for alert in _open_in(local, home).values():
        other = alerts.get(alert.fingerprint)
        if other is None:
            alerts[alert.fingerprint] = alert
        else:
            alerts[alert.fingerprint] = _later(other, alert)
        if other is not None and other.began != alert.began:  # another incident of the same fault
            older = min(other, alert, key=lambda one: one.began)
            closed[older.fingerprint, older.began] = incident_of(older)
    standing = {(alert.fingerprint, alert.began) for alert in alerts.values()}
    ended = sorted(
        (one for key, one in closed.items() if key not in standing), key=lambda one: one.began
    )
    newest = home if (home.looked or 0.0) >= (local.looked or 0.0) else local
    digests = [
        alert_state.digested for alert_state in (home, local) if alert_state.digested is not None
    ]
    return replace(
        newest,
        alerts=tuple(alerts.values()),
        closed=tuple(ended[-CLOSED_KEPT:]),
        messages=tuple(
            {message.id: message for message in (*home.messages, *local.messages)}.values()
        ),
        events=tuple({event.id: event for event in (*home.events, *local.events)}.values()),
        digested=max(digests, default=None),
        finished=newest.finished or home.finished or local.finished,
    )


def _open_in(alert_state: AlertState, other: AlertState) -> dict[str, Alert]:
    """The alerts of an alert state, by fingerprint, without the incidents that the other has put
    away as over.
    """
    over = {(one.fingerprint, one.began) for one in other.closed}
    return {
        alert.fingerprint: alert
        for alert in alert_state.alerts
        if (alert.fingerprint, alert.began) not in over
    }


def _later(one: Alert, other: Alert) -> Alert:
    """The alert as it was known last, with what a person has said of it meanwhile."""
    older, newer = sorted(
        (one, other), key=lambda alert: max(alert.last_seen, alert.resolved_at or 0.0)
    )
    if older.began != newer.began or newer.is_acknowledged or not older.is_acknowledged:
        return newer
    if (older.acknowledged_at or 0.0) < newer.opened:
        return newer
    return replace(
        newer,
        acknowledged_by=older.acknowledged_by,
        acknowledged_at=older.acknowledged_at,
        acknowledged_why=older.acknowledged_why,
        first_acknowledged_by=newer.first_acknowledged_by or older.first_acknowledged_by,
        owner=newer.owner or older.owner,
    )
