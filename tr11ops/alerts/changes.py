"""What people do about alerts: acknowledge, snooze, assign, close. Pure: from an alert state to the
alert state after it.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tr11ops.alerts.incidents import ACKNOWLEDGED, ASSIGNED, RESOLVED, SNOOZED
from tr11ops.alerts.mail_text.shared import clean
from tr11ops.alerts.state import Alert, AlertState, event_of
from tr11ops.base.errors import NoSuchAlert
from tr11ops.base.units import span_seconds

Change = Callable[[Alert, float], Alert]

LONGEST_WHO = 100
LONGEST_WHY = 300
SHORTEST_PREFIX = 3
LONGEST_SNOOZE = 90 * 86_400.0


def resolve_prefix(alert_state: AlertState, typed: str) -> Alert:
    """The open alert that a fingerprint, or the beginning of one, names. Raises NoSuchAlert."""
    shown = clean(typed, 40)
    prefix = typed.lower()
    found = [
        alert
        for alert in alert_state.open_alerts
        if any(name.startswith(prefix) for name in alert.names)
    ]
    if len(typed) < SHORTEST_PREFIX:
        raise NoSuchAlert(
            f"{shown!r} is too short for a fingerprint: type three characters or more of it"
        )
    if len(found) > 1:
        names = ", ".join(alert.fingerprint for alert in found[:4])
        raise NoSuchAlert(
            f"{shown!r} is the beginning of {len(found)} open alerts ({names}): type more of it"
        )
    if not found:
        over = any(name.startswith(prefix) for alert in alert_state.alerts for name in alert.names)
        raise NoSuchAlert(
            f"{shown!r} is "
            + ("over already" if over else "not an open alert; see: tr11 alerts list")
        )
    return found[0]


def apply(
    alert_state: AlertState,
    fingerprint: str,
    change: Change,
    kind: str,
    who: str,
    why: str,
    now: float,
) -> AlertState:
    """The alert state after one person's change of one alert, with its entry for the journal."""
    alert = resolve_prefix(alert_state, fingerprint)
    after = change(alert, now)
    more: dict[str, float | str | None] = {}
    if kind == SNOOZED:
        more["until"] = after.snoozed_until
    elif kind == ASSIGNED:
        more["owner"] = after.owner
    event = event_of(after, kind, clean(who, LONGEST_WHO), clean(why, LONGEST_WHY), now, **more)
    return alert_state.with_alert(after).with_events((event,))


def acknowledge(who: str, why: str = "") -> tuple[Change, str]:
    """Someone works on it: no escalation and no repeats for 24 hours. The last one to say so has
    it.
    """
    name, reason = clean(who, LONGEST_WHO), clean(why, LONGEST_WHY)

    def change(alert: Alert, now: float) -> Alert:
        return replace(
            alert,
            acknowledged_by=name,
            acknowledged_at=now,
            acknowledged_why=reason,
            first_acknowledged_by=alert.first_acknowledged_by or name,
            remind=False,
        )

    return change, ACKNOWLEDGED


def snooze(who: str, seconds: float) -> tuple[Change, str]:
    """No message about it for so long, unless it becomes worse; then it is said once again."""
    name = clean(who, LONGEST_WHO)

    def change(alert: Alert, now: float) -> Alert:
        return replace(alert, snoozed_until=now + seconds, snoozed_by=name, remind=False)

    return change, SNOOZED


def assign(owner: str) -> tuple[Change, str]:
    """Someone looks after it. A mail address gets it, and all that follows about it."""
    name = clean(owner, LONGEST_WHO)

    def change(alert: Alert, now: float) -> Alert:
        return replace(alert, owner=name)

    return change, ASSIGNED


def resolve(who: str, why: str) -> tuple[Change, str]:
    """It is over, a person says. Should the next look see it still, the same incident is open
    again.
    """
    name, reason = clean(who, LONGEST_WHO), clean(why, LONGEST_WHY)

    def change(alert: Alert, now: float) -> Alert:
        return replace(alert, resolved_at=now, until=now, resolved_by=name, resolved_why=reason)

    return change, RESOLVED


def seconds_of(text: str) -> float:
    """Seconds of a length of time as people type it: 30m, 2h, 1.5d. Raises ValueError when it is
    none.
    """
    try:
        seconds = span_seconds(text, None)
    except ValueError:
        raise ValueError(
            f"{clean(text, 40)!r} is not a length of time; use 30m, 2h or 1d"
        ) from None
    if not 0 < seconds <= LONGEST_SNOOZE:
        raise ValueError(f"{clean(text, 40)!r} must be above 0 and at most 90d")
    return seconds
