"""Who hears of an alert now: the table of docs/reference/alerts.md as a pure function of the alert state and
the moment.

| | no one knows yet | stands on | is over |
|---|---|---|---|
| INFO | - | - | - |
| WARNING | person on duty | repeated after repeat_hours | all-clear |
| CRITICAL | person on duty | escalates until acknowledged, repeated | all-clear |

In quiet hours only the row of CRITICAL applies; what a WARNING has missed follows when they end, if
it is still true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.alerts.incidents import SHIFT_ENDED, is_worth_a_message
from tr11ops.alerts.mail_text.alert import AlertMails
from tr11ops.alerts.policy import BACK_SECONDS, FLAP_SECONDS, SHIFT_SECONDS, Policy, unique
from tr11ops.alerts.situation import UNKNOWN_SITUATION, RunSituation
from tr11ops.alerts.state import (
    OVER,
    WATCHDOG,
    Alert,
    AlertEvent,
    AlertState,
    Message,
    MessagePart,
    OnCall,
    UndeliveredMessages,
    elapsed,
    stamp,
)
from tr11ops.detect.detector import Severity, lead

_MAIL_ADDRESS = re.compile(r"[^@\s,]+@[^@\s,]+")
SITE_DETECTORS = frozenset({"nodes-short"})  # what only the site can repair
SITE_WORDS = OVER | {"opened", "reopened"}  # and what its support hears of it
# a watchdog that is new to an old run writes of no end that all know
FINISHED_IS_NEWS_SECONDS = 2 * 86_400.0
ALARMS = frozenset(
    {"opened", "raised", "reopened", "again", "uncured"}
)  # escalation counts from these


def tell(
    alert_state: AlertState,
    policy: Policy,
    now: float,
    backlog: UndeliveredMessages | None = None,
    only: frozenset[str] | None = None,
    situation: RunSituation = UNKNOWN_SITUATION,
) -> tuple[AlertState, tuple[Message, ...]]:
    """The messages that are due now, and the alert state that knows of them.

    `only` limits it to alerts of these fingerprints, and leaves the digest out. `situation` is what
    the messages say of the run.
    """
    standing = tuple(alert for alert in alert_state.open_alerts if is_worth_a_message(alert))
    table = _Telling(policy, now, situation, standing=standing, on_duty=alert_state.shift)
    parts: dict[str, MessagePart] = {}
    alerts: list[Alert] = []
    for alert in alert_state.alerts:
        if only is not None and alert.fingerprint not in only:
            alerts.append(alert)
            continue
        if alert.is_open:
            part = table.word(alert)
        else:
            part = table.all_clear(alert)
        after = table.stepped(alert, part)
        if part is not None and policy.is_reachable:
            parts[alert.fingerprint] = replace(part, alert=after)
        elif part is not None and part.kind in OVER:  # no one is left to wait for it
            after = replace(after, said=None)
        alerts.append(after)
    messages = [
        table.message(said, to, urls)
        for said, to, urls in grouped(parts.values())
        if to or (urls and policy.has_urls)
    ]
    by_alert: dict[str, list[Message]] = {}
    for message in messages:
        for name in message.alerts:
            by_alert.setdefault(name, []).append(message)
    if policy.support:
        site = (
            part
            for part in parts.values()
            if part.alert.detector in SITE_DETECTORS and part.kind in SITE_WORDS
        )
        asked = policy.on_call(alert_state.shift, now)
        messages += [table.to_site(part.alert, part.kind, asked.who) for part in site]
    for place, alert in enumerate(alerts):
        name = alert.fingerprint
        if name in parts:
            alerts[place] = told(parts[name], by_alert.get(name, []), now)
    done = replace(alert_state, alerts=tuple(alerts))
    if only is None:
        digested, due = digest_due(done, policy, now)
        if due is not None and policy.is_reachable:
            messages.append(table.digest_message(done, due, backlog))
        done, finished = table.end_of_training(digested)
        done, shift = table.end_of_shift(done)
        messages += (*finished, *shift)
    return replace(done, messages=(*done.messages, *messages)), tuple(messages)


def told(part: MessagePart, messages: Iterable[Message], now: float) -> Alert:
    """The alert after what one look has said of it."""
    alert = part.alert
    identities = tuple(message.message_id for message in messages)
    after = replace(
        alert,
        sends=alert.sends + 1,
        last_sent=now,
        remind=False,
        headline=alert.fingerprint,
        told_as="",
        thread=alert.thread or " ".join(identities),
    )
    if alert.sends == 0:
        after = replace(after, opened=now)
    if part.kind in OVER:
        return replace(after, said=None, called_over=now, held_at="")
    after = replace(
        after,
        said=alert.severity,
        heard=max(alert.severity, alert.heard or alert.severity),
        told=unique((*alert.told, *part.to)),
    )
    if alert.waits_for_person:
        after = replace(after, held_at=alert.subject)
    if part.kind == "reopened":
        after = replace(after, returned=now)
    if part.kind in ALARMS:
        return replace(after, alarmed=now, escalated=0)
    return after


# ----------------------------------------------------------------------------- the table
class _Telling(AlertMails):
    """The table at one moment; `on_duty` is the shift that was taken last."""

    on_duty: OnCall | None = None

    def _is_silent(self, alert: Alert) -> bool:
        """Whether nothing is said of an alert at this time of day, or ever."""
        return not is_worth_a_message(alert) or (
            alert.severity < Severity.CRITICAL and self.policy.is_quiet(self.now)
        )

    def all_clear(self, alert: Alert) -> MessagePart | None:
        """That a fault is over: once the run is well. Where it is not after an hour, what stands in the
        fault's place. A warning that comes and goes is over when an hour was free of it.
        """
        if alert.said is None or self._is_silent(alert):
            return None
        is_critical = any(other.severity is Severity.CRITICAL for other in self.standing)
        by_person = alert.resolved_by not in {"", WATCHDOG}
        is_settled = by_person or elapsed(alert.resolved_at, self.now) >= FLAP_SECONDS
        if (
            not is_critical
            and self.situation.proves_end_of(alert)
            and (is_settled or not _flaps(alert))
        ):
            return MessagePart(alert, "cleared", alert.told)
        if is_settled:
            return MessagePart(alert, "replaced", alert.told)
        return None

    def word(self, alert: Alert) -> MessagePart | None:
        if self._is_silent(alert):
            return None
        # the last look did not see it, or not so bad: the next will tell
        passing = alert.clear_looks or alert.milder_looks
        if alert.snoozed_until is not None or passing:
            return None
        called = self.policy.called(self.on_duty, self.now)
        aware = unique((*called, *alert.told, *_mail(alert.owner)))
        if alert.said is None:
            return self._first_word(alert, aware)
        return self._further_word(alert, alert.said, aware=aware)

    def _first_word(self, alert: Alert, aware: tuple[str, ...]) -> MessagePart | None:
        """About a fault of which people know nothing, or think that it is over.

        What is back is said at once, for an all-clear said that there was nothing; again within an hour
        (`BACK_SECONDS` of what is critical) only where it is worse than all that they heard of it.
        """
        if alert.is_acknowledged:
            return None
        if not alert.sends:
            return MessagePart(alert, "opened", aware)
        is_worse = alert.severity > (alert.heard or Severity.WARNING)
        if alert.severity is Severity.CRITICAL:
            pause = BACK_SECONDS
        else:
            pause = FLAP_SECONDS
        if is_worse or elapsed(alert.returned, self.now) >= pause:
            return MessagePart(alert, "reopened", aware)
        return None

    def _further_word(
        self, alert: Alert, said: Severity, aware: tuple[str, ...]
    ) -> MessagePart | None:
        """About a fault that people know of: that what was done has not helped, that it is worse, or
        that no one has taken it on.
        """
        if alert.is_uncured:
            return MessagePart(alert, "uncured", aware)
        if alert.severity > said:
            return MessagePart(alert, "raised", aware)
        if alert.has_new_cause:  # also to one who has it: another command helps
            return MessagePart(alert, "cause", aware)
        if alert.is_acknowledged:
            return None
        if alert.remind:
            return MessagePart(alert, "again", aware)
        return self._escalation(alert) or self._repetition(alert, aware)

    def _escalation(self, alert: Alert) -> MessagePart | None:
        """The next to be asked; None where that is no one new."""
        steps = self._steps_due(alert)
        if steps <= alert.escalated:
            return None
        to = self.policy.escalation(steps, alert.told, self.on_duty, self.now)
        if set(to) - set(alert.told):
            return MessagePart(alert, "escalated", to)
        return None

    def _steps_due(self, alert: Alert) -> int:
        if alert.severity < Severity.CRITICAL or alert.alarmed is None:
            return 0
        return self.policy.steps_due(elapsed(alert.alarmed, self.now))

    def stepped(self, alert: Alert, part: MessagePart | None) -> Alert:
        """Steps of the escalation that are over, whether or not they found anyone new."""
        stands_unanswered = alert.is_open and alert.said is not None and not alert.is_acknowledged
        if (
            not stands_unanswered
            or alert.snoozed_until is not None
            or (part and part.kind != "escalated")
        ):
            return alert
        return replace(alert, escalated=max(alert.escalated, self._steps_due(alert)))

    def _repetition(self, alert: Alert, aware: tuple[str, ...]) -> MessagePart | None:
        if elapsed(alert.last_sent, self.now) < self.policy.repeat_hours * 3600.0:
            return None
        return MessagePart(alert, "repeated", aware)

    # ------------------------------------------------------------------------- the end
    def end_of_training(self, alert_state: AlertState) -> tuple[AlertState, tuple[Message, ...]]:
        """That all is trained, once, in the day time; again where more was trained after it. What ended
        long ago is known.

        A run that is not seen to train, or to be finished, says nothing.
        """
        now, policy, trained = self.now, self.policy, self.situation.trained
        condition = self.situation.condition
        if condition is None or not (condition.is_finished or condition.trains):
            return alert_state, ()
        if condition.trains:
            return replace(alert_state, finished=None), ()
        if alert_state.finished is not None or policy.is_quiet(now):
            return alert_state, ()
        done = replace(alert_state, finished=now)
        is_old = trained is not None and elapsed(trained, now) > FINISHED_IS_NEWS_SECONDS
        if is_old or not policy.is_reachable:
            return done, ()
        return done, (self.finished(policy.readers(alert_state.shift, now), condition.words),)

    # ------------------------------------------------------------------------- the end of a shift
    def end_of_shift(self, alert_state: AlertState) -> tuple[AlertState, tuple[Message, ...]]:
        """That the time of a shift is over, once, to its person and to those who are on call now: what is
        open is theirs. In quiet hours it waits until they end, where nothing critical is open.

        Nothing is said where the same people go on, nor of an end more than a day ago.
        """
        now, policy, shift = self.now, self.policy, alert_state.shift
        if shift is None or shift.holds(now) or alert_state.shift_over == shift.until:
            return alert_state, ()
        after = policy.on_call(shift, now)
        is_news = after.who != shift.who and elapsed(shift.until, now) < SHIFT_SECONDS
        is_critical = any(alert.severity is Severity.CRITICAL for alert in alert_state.open_alerts)
        if is_news and policy.is_quiet(now) and not is_critical:
            return alert_state, ()
        done = replace(alert_state, shift_over=shift.until)
        if not is_news or shift.until is None:
            return done, ()
        event = AlertEvent(
            f"{SHIFT_ENDED}-{stamp(shift.until)}",
            SHIFT_ENDED,
            who=WATCHDOG,
            why="its time was over",
            time=now,
            data={"before": list(shift.who), "on_call": list(after.who), "until": after.until},
        )
        why = f"Its time was over at {self.moment(shift.until)}."
        message = self.shift(shift, done, why, moved=shift.until)
        return done.with_events((event,)), (message,) if message.to else ()


def digest_due(
    alert_state: AlertState, policy: Policy, now: float
) -> tuple[AlertState, float | None]:
    """When the daily summary was due that is to be sent now, None for none; and the alert state after
    it. The first of a run is that of the first time which anyone has waited for.
    """
    moment, last = policy.digest_moment(now), alert_state.digested
    if moment is None:
        return alert_state, None
    done = replace(alert_state, digested=moment)
    if last is None or last - now > 86_400.0:  # the first look ever; or a clock that ran ahead
        return done, None
    if moment <= last:
        return alert_state, None
    return done, moment


def _flaps(alert: Alert) -> bool:
    """Whether a warning came back after its all-clear, and was gone again within the hour. Who was
    called for what was CRITICAL hears that it is over.
    """
    heard = max(alert.severity, alert.heard or alert.severity)
    is_back = alert.returned is not None and heard < Severity.CRITICAL
    return is_back and elapsed(alert.start, alert.end or alert.start) < FLAP_SECONDS


def _mail(name: str) -> tuple[str, ...]:
    """The mail address that a person's name is, by the run card's own rule; a mere name has none."""
    if _MAIL_ADDRESS.fullmatch(name):
        return (name,)
    return ()


# ----------------------------------------------------------------------------- in how few mails
# Few messages for each person, whatever the number of alerts:
#
# - A CRITICAL alert is in a message of its own, but those of one detector, of which one look says the same, share one.
# - What is over at one look shares one, whatever it was.
# - All that is said of lesser alerts in one look is one message to each person.
# - People who are told the same are told it in one message.

# its parts, the most severe first; who gets it; whether the delivery URLs do too
MessageGroup: TypeAlias = tuple[tuple[MessagePart, ...], tuple[str, ...], bool]
_ORDER = (
    "opened",
    "raised",
    "reopened",
    "cause",
    "uncured",
    "again",
    "escalated",
    "assigned",
    "taken-over",
    "repeated",
    "replaced",
    "cleared",
)


def grouped(parts: Iterable[MessagePart]) -> Iterator[MessageGroup]:
    """The messages of one look, the critical ones first. The delivery URLs are told all, each part
    once.
    """
    ordered = sorted(parts, key=_place)
    bundles: dict[tuple[str, ...], list[MessagePart]] = {}
    for part in ordered:
        bundles.setdefault(_bundle_of(part), []).append(part)
    for bundle in bundles.values():
        yield from _by_person(bundle)


def _place(part: MessagePart) -> tuple[int, int, int, float]:
    """The most severe first; of equals what is newest to people, then the strongest cause, then the
    oldest.
    """
    alert = part.alert
    severity, strength = lead(alert.detector, alert.severity)
    return severity, _ORDER.index(part.kind), strength, alert.began


def _bundle_of(part: MessagePart) -> tuple[str, ...]:
    """What the parts of one message have in common."""
    if part.alert.severity < Severity.CRITICAL:
        return ()
    if part.kind in OVER:
        return (part.kind,)
    return (part.alert.detector, part.kind)


def _by_person(bundle: list[MessagePart]) -> Iterator[MessageGroup]:
    people = dict.fromkeys(address for part in bundle for address in part.to)
    everything = tuple(range(len(bundle)))
    readers: dict[tuple[int, ...], list[str]] = {everything: []}
    for address in people:
        mine = tuple(index for index, part in enumerate(bundle) if address in part.to)
        readers.setdefault(mine, []).append(address)
    for mine, to in readers.items():
        yield tuple(bundle[index] for index in mine), tuple(to), mine == everything
