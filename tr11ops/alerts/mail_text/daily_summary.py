"""The daily summary, the news that all is trained, and the message that proves that messages
arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from tr11ops.alerts.mail_text.shared import (
    LONGEST_SUBJECT,
    clean,
    command,
    enter,
    message_identity,
    moment,
    place,
)
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import UNKNOWN_SITUATION, RunSituation, Spell
from tr11ops.alerts.state import Alert, AlertState, Message, UndeliveredMessages, stamp
from tr11ops.base.invocation import command_for
from tr11ops.base.units import counted, duration, node_time, wrapped
from tr11ops.detect.detector import Severity

LONGEST_REASON = 160


def digest_message(
    alert_state: AlertState,
    to: tuple[str, ...],
    policy: Policy,
    now: float,
    due: float,
    backlog: UndeliveredMessages | None,
    situation: RunSituation = UNKNOWN_SITUATION,
) -> Message:
    """The daily summary that was due at `due`."""
    name = f"digest-{stamp(due)}"
    subject, lines = digest(alert_state, policy, now=now, backlog=backlog, situation=situation)
    return _of_no_alert("digest", name, subject=subject, lines=lines, to=to, policy=policy, now=now)


def digest(
    alert_state: AlertState,
    policy: Policy,
    now: float,
    backlog: UndeliveredMessages | None,
    situation: RunSituation = UNKNOWN_SITUATION,
) -> tuple[str, tuple[str, ...]]:
    """Subject and lines of the summary: how far the training came, what is open, what ended since
    the last one.
    """
    count = len(alert_state.open_alerts)
    over = len(_ended(alert_state, now))
    words = "nothing to report"
    if count:
        words = counted(count, "open alert")
    elif over:
        words = f"nothing open, {counted(over, 'alert')} over"
    lines = tuple(_digest_lines(alert_state, policy, now=now, backlog=backlog, situation=situation))
    return clean(f"[DIGEST] {policy.run}: {words}", LONGEST_SUBJECT), lines


def _since(alert_state: AlertState, now: float) -> float:
    """When the last summary was sent; a day ago where none was."""
    if alert_state.digested is not None:
        return alert_state.digested
    return now - 86_400.0


def _ended(alert_state: AlertState, now: float) -> list[Alert]:
    since = _since(alert_state, now)
    return [
        alert
        for alert in alert_state.alerts
        if alert.resolved_at is not None and alert.resolved_at >= since
    ]


def _digest_lines(
    alert_state: AlertState,
    policy: Policy,
    now: float,
    backlog: UndeliveredMessages | None,
    situation: RunSituation,
) -> Iterator[str]:
    since = _since(alert_state, now)
    ended = _ended(alert_state, now)
    yield from _training(situation, since, policy)
    yield from place(policy)
    yield f"At:       {moment(now, policy)}"
    duty = ", ".join(policy.on_duty(now))
    if duty:
        yield from wrapped(f"On duty: {duty}")
    yield ""
    if not alert_state.open_alerts:
        yield "Open: nothing."
    for alert in alert_state.open_alerts:
        yield from wrapped(f"{alert.severity.name:8s} {alert.fingerprint}  {alert.title}", "", "  ")
        yield from wrapped(
            f"since {moment(alert.start, policy)} ({duration(now - alert.start)}); {care(alert)}",
            "  ",
        )
    if ended:
        yield ""
        yield "Over since the last digest:"
        for alert in ended:
            lasted = duration((alert.end or now) - alert.start)
            yield from wrapped(f"{alert.severity.name:8s} {alert.title} ({lasted})", "  ")
    yield from _left_out(situation, since, policy)
    if alert_state.blind:
        yield ""
        yield from wrapped(f"Could not be judged at the last look: {', '.join(alert_state.blind)}.")
    if backlog is not None and backlog.count and backlog.since is not None:
        yield ""
        what = counted(backlog.count, "message waits", "messages wait")
        yield from wrapped(f"{what} to be sent, the oldest since {moment(backlog.since, policy)}.")
    yield ""
    yield "A day without this summary means that the watchdog itself stands still."
    yield from enter(policy)
    yield f"  {command('list', policy)}"


def _left_out(situation: RunSituation, since: float, policy: Policy) -> Iterator[str]:
    """The nodes that tr11 has excluded since then: a fault that ended by itself is no alert, and
    yet worth knowing.
    """
    fresh = [
        (entry, entry.since)
        for entry in situation.left_out
        if entry.since is not None and entry.since >= since
    ]
    if not fresh:
        return
    yield ""
    yield from wrapped("Left out by tr11 since the last digest; the run goes on without them:")
    for entry, excluded in fresh:
        why = clean(entry.why, LONGEST_REASON)
        yield from wrapped(f"{entry.node}, since {moment(excluded, policy)}: {why}", "  ")


def _training(situation: RunSituation, since: float, policy: Policy) -> Iterator[str]:
    """Progress, loss, end and goodput: what people open the digest for."""
    spell = situation.since(since)
    if spell is not None:
        yield from wrapped(f"Since {moment(since, policy)}: {_spell(spell)}")
    if situation.progress:
        yield from wrapped(f"Progress: {situation.progress}", "", " " * 10)
    if situation.eta:
        yield from wrapped(f"End:      {situation.eta}", "", " " * 10)
    if situation != UNKNOWN_SITUATION:
        yield ""


def _spell(spell: Spell) -> str:
    parts = [f"{spell.iterations:,} iterations"]
    if spell.loss_now is not None:
        before = ""
        if spell.loss_before is not None:
            before = f"{spell.loss_before:.4f} -> "
        parts.append(f"loss {before}{spell.loss_now:.4f}")
    if spell.useful is not None:
        parts.append(f"goodput {100 * spell.useful:.0f} % of {node_time(spell.held_hours)}")
    return ", ".join(parts)


def care(alert: Alert) -> str:
    """Who looks after an alert, in a few words."""
    parts = []
    if alert.owner:
        parts.append(f"assigned to {alert.owner}")
    if alert.is_acknowledged:
        parts.append(f"acknowledged by {alert.acknowledged_by}")
    if alert.snoozed_until is not None:
        parts.append(f"snoozed by {alert.snoozed_by}")
    return ", ".join(parts) or "unassigned"


def finished_message(
    to: tuple[str, ...], policy: Policy, now: float, situation: RunSituation, words: str
) -> Message:
    """The news that all is trained. `words` are the verdict's."""
    lines = [
        *wrapped(
            f"{words}. Nothing has to be typed: a queued task that starts ends at once, and one that is"
            " held stays until `tr11 launch --repair`."
        ),
        "",
    ]
    if situation.progress:
        lines += wrapped(f"Progress: {situation.progress}", "", " " * 10)
    if situation.trained is not None:
        lines.append(f"Trained:  the last iteration ended {moment(situation.trained, policy)}")
    lines += [*place(policy), "", "The whole run on one page:", *enter(policy)]
    lines.append(f"  {command_for(policy.typed, 'report')}")
    subject = clean(f"[DONE] {policy.run}: the training is finished", LONGEST_SUBJECT)
    return _of_no_alert(
        "finished",
        f"finished-{stamp(now)}",
        subject=subject,
        lines=lines,
        to=to,
        policy=policy,
        now=now,
    )


def trial_message(to: tuple[str, ...], policy: Policy, now: float) -> Message:
    """A message that only proves that messages arrive."""
    name = f"test-{stamp(now)}-{hashlib.sha256(repr((policy.host, to)).encode()).hexdigest()[:6]}"
    body = [
        f"This is a test of the alerts of {policy.run}. Nothing is wrong.",
        "",
        *place(policy),
        f"Sent:     {moment(now, policy)}",
    ]
    subject = clean(f"[TEST] {policy.run}: alerts arrive here", LONGEST_SUBJECT)
    return _of_no_alert("test", name, subject=subject, lines=body, to=to, policy=policy, now=now)


def _of_no_alert(
    kind: str,
    name: str,
    subject: str,
    lines: Sequence[str],
    to: tuple[str, ...],
    policy: Policy,
    now: float,
) -> Message:
    return Message(
        id=name,
        kind=kind,
        alert="",
        detector="",
        severity=Severity.INFO,
        subject=subject,
        body="\n".join(lines) + "\n",
        to=to,
        time=now,
        message_id=message_identity(name, policy),
    )
