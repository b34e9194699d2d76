"""What a look at the run does to the alert state: incidents begin, go on, come back and end. Pure;
tells no one anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import replace

from tr11ops.alerts.mail_text.shared import clean
from tr11ops.alerts.policy import ACKNOWLEDGED_SECONDS, FLAP_SECONDS, Policy
from tr11ops.alerts.state import (
    CLOSED_KEPT,
    ENDS,
    WATCHDOG,
    Alert,
    AlertEvent,
    AlertState,
    Consequence,
    elapsed,
    event_of,
    incident_of,
)
from tr11ops.base.units import counted
from tr11ops.detect.detector import HELD_FOR_FAULT, NO_CAUSE, Finding, Severity, by_cause, merged
from tr11ops.detect.registry import page_for

OPENED = "alert-opened"
SENT = "alert-sent"
ACKNOWLEDGED = "alert-acknowledged"
ASSIGNED = "alert-assigned"
SNOOZED = "alert-snoozed"
RESOLVED = "alert-resolved"
CAUSE_FOUND = "alert-cause-found"
SHIFT_TAKEN = "shift-taken"
SHIFT_ENDED = "shift-ended"

# of one job, the one becomes the other as its ranks fall silent
STANDSTILLS = frozenset({"hung", "stalled"})
# faults that say that no iteration is finished
NO_TRAINING = frozenset({"down", "hung", "stalled", "suspended"})
# of a node; what ends the job then is the same incident
LOSSES = frozenset({"node-lost", "zombie"})
# classes of faults that a later attempt may prove to be another's
OPEN_CLASSES = frozenset({NO_CAUSE, "node"})
# the headline of an alert of which people were told a cause that proved to be another
SUPPOSED = "supposed"
MOST_EVIDENCE = 12
LONGEST_EVIDENCE = 600
LONGEST_TITLE = 600  # a mail's body has the whole sentence
LONGEST_FIX = 2000
LONGEST_SNOOZE = 366 * 86_400.0  # what lasts for longer is what a clock that ran ahead has left
# as a whole alert: so long it may be asked for by its fingerprint
RESOLVED_KEPT_SECONDS = 2 * 86_400.0


def look(
    alert_state: AlertState,
    findings: Iterable[Finding],
    blind: frozenset[str],
    policy: Policy,
    now: float,
    trained: float | None = None,
) -> AlertState:
    """The alert state after a look that saw `findings`; detectors in `blind` could not judge, and
    theirs stays as it is.

    Findings of one cause are one incident, and one alert (`detector.by_cause`).

    A fault that nothing sees for `resolve_after` looks in a row ends its incident; a look that
    could not judge is no look. One that comes back within an hour of that is the same incident, but
    for a critical one of which people were told that it was over, and for one about another
    subject, which never was there before. One that has become milder for as many looks, or as a
    later attempt trains, is that from then on; when only a remark is left of it, it is over.
    `trained` is when the last iteration ended: one that ended since is proof enough, in one look,
    that a training stands still no more.
    """
    seen = {finding.fingerprint: finding for finding in by_cause(merged(findings))}
    recovering = _recovering(alert_state, seen, now)
    seen = {name: finding for name, finding in seen.items() if name not in recovering}
    alert_state = _with_one_incident(_renamed(alert_state, seen, now), seen)
    seen = _without_standing(alert_state, seen, blind, policy)
    alert_state, events = _joined(alert_state, seen, now)
    changed: list[Alert] = []
    over: list[Alert] = []
    for alert in alert_state.alerts:
        finding = seen.get(alert.fingerprint)
        if finding is not None and (is_over(alert, now) or _is_of_another(alert, finding)):
            over.append(alert)
            continue
        if (
            finding is not None
            and finding.is_to_be_passed
            and alert.is_open
            and is_worth_a_message(alert)
        ):
            finding = replace(finding, severity=max(finding.severity, Severity.WARNING))
        if finding is not None and not _is_but_a_remark(finding, alert):
            if _is_new_to_people(alert, finding):
                over.append(alert)
            after, news = _seen_again(alert, finding, policy, now)
        elif alert.is_open and alert.fingerprint in recovering.values():
            after = alert
            news = ()
        elif alert.is_open and (finding is not None or alert.detector not in blind):
            after, news = _not_seen(alert, policy, now, trained)
        else:
            after = alert
            news = ()
        seen.pop(alert.fingerprint, None)
        after, more = _expired(after, now)
        changed.append(after)
        events += [*news, *more]
    for name, finding in seen.items():
        alert = _opened(name, finding, now)
        changed.append(alert)
        events.append(event_of(alert, OPENED, why=alert.title, now=now))
    closed = (*alert_state.closed, *map(incident_of, over))
    done = replace(
        alert_state, alerts=tuple(changed), closed=closed, looked=now, blind=tuple(sorted(blind))
    )
    return _tidied(done.with_events(events), now)


def is_over(alert: Alert, now: float) -> bool:
    """Whether a fault of this fingerprint would be a new incident: the old one ended an hour ago,
    and all know it.
    """
    if alert.is_open or alert.said is not None:
        return False
    return min(elapsed(alert.resolved_at, now), elapsed(alert.last_sent, now)) > FLAP_SECONDS


def _is_of_another(alert: Alert, finding: Finding) -> bool:
    """Whether all know that an alert is over, and the fault is about something else (another job,
    another array): it has not come back. Where the finding has an identity of its own, that alone
    tells; but one that ended an attempt, and then another, has not come back with the second where
    that began and ended after people were told that it was over.
    """
    if alert.is_open or alert.said is not None:
        return False
    if finding.identity:
        over = alert.called_over
        began = finding.since
        is_later = over is not None and began is not None and began > over
        return finding.detector in ENDS and is_later
    subject = clean(finding.subject, LONGEST_TITLE)
    return alert.sends > 0 and "" not in {alert.subject, subject} and alert.subject != subject


def _renamed(alert_state: AlertState, seen: dict[str, Finding], now: float) -> AlertState:
    """The alert state with the alerts of an older tr11 under the fingerprints of today.

    An older one put faults of several names (nodes, say) into one alert. Each finding whose name
    the old alert mentions goes on from it: people know of it. The old alert is then gone; one that
    mentions none ends as always. The end of an attempt whose cause was not known goes on likewise
    under the cause that is; and the loss of a node as the end of the attempt that it ended, which
    people hear of in the same thread.
    """
    continued = set()
    for name, finding in seen.items():
        if not finding.identity or alert_state.find(name) is not None:
            continue
        old = next(
            (
                alert
                for alert in alert_state.alerts
                if _is_continued(alert, finding, seen) and not is_over(alert, now)
            ),
            None,
        )
        if old is not None:
            renamed = replace(
                old,
                fingerprint=name,
                detector=finding.detector,
                identity=finding.identity,
                told_as=_told_as(old),
            )
            alert_state = alert_state.with_alert(renamed)
            continued.add(old.fingerprint)
    gone = continued - seen.keys()
    return replace(
        alert_state,
        alerts=tuple(alert for alert in alert_state.alerts if alert.fingerprint not in gone),
    )


def _recovering(alert_state: AlertState, seen: dict[str, Finding], now: float) -> dict[str, str]:
    """The stalls that are the end of a hang, by their names; and the hangs.

    Ranks that hung and show life again need a whole iteration to prove that they train: until one
    may have taken so long, counted from the last look that saw them hang, it is no second alarm,
    and not over.
    """
    found = {}
    for name, finding in seen.items():
        hang = next(
            (
                alert
                for alert in alert_state.open_alerts
                if _is_same_standstill(alert, finding, seen)
            ),
            None,
        )
        if hang is None or hang.detector != "hung" or finding.patience is None:
            continue
        if elapsed(hang.last_seen, now) <= finding.patience:
            found[name] = hang.fingerprint
    return found


def _with_one_incident(alert_state: AlertState, seen: dict[str, Finding]) -> AlertState:
    """The alert state in which a stall that became a hang, or the other way round, goes on as the
    same incident; and so does what the loss of the run directory has left, once that is seen again.

    People hear of it once more, in the same thread, where another command helps than those that
    they were told.
    """
    for name, finding in seen.items():
        known = alert_state.find(name)
        if known is not None and known.is_open:
            continue
        before = next(
            (
                alert
                for alert in alert_state.open_alerts
                if _is_same_standstill(alert, finding, seen) or _was_unseen(alert, finding, seen)
            ),
            None,
        )
        if before is None:
            continue
        after = _as_its_cause(before, name, finding)
        is_told = clean(finding.fix, LONGEST_FIX) in {before.fix, *before.commands_after}
        if name in before.names or is_told:
            after = replace(after, headline=name)
        alert_state = _in_their_place(alert_state, after, before, over=known)
    return alert_state


def _in_their_place(
    alert_state: AlertState, alert: Alert, other: Alert, over: Alert | None
) -> AlertState:
    """The alert state with an alert in place of the one of its fingerprint, and of `other`; `over` is
    then an incident of the past.
    """
    names = {alert.fingerprint, other.fingerprint}
    kept = (one for one in alert_state.alerts if one.fingerprint not in names)
    past = [] if over is None else [incident_of(over)]
    return replace(alert_state, alerts=(*kept, alert), closed=(*alert_state.closed, *past))


def _is_same_standstill(alert: Alert, finding: Finding, seen: dict[str, Finding]) -> bool:
    if finding.detector not in STANDSTILLS or alert.fingerprint in seen:
        return False
    is_other = alert.detector in STANDSTILLS - {finding.detector}
    return is_other and alert.subject == clean(finding.subject, LONGEST_TITLE)


def _was_unseen(alert: Alert, finding: Finding, seen: dict[str, Finding]) -> bool:
    """Whether a finding is of what is held, and of the end that holds it, of which people know from
    an alert that the run directory is not seen: it is seen again, and nothing has begun since.
    """
    if alert.detector != "directory-unseen" or alert.fingerprint in seen:
        return False
    faults = {finding.fault, *(one.fault for one in finding.consequences)}
    is_earlier = finding.since is None or finding.since <= alert.last_seen
    return alert.fault == HELD_FOR_FAULT and HELD_FOR_FAULT in faults and is_earlier


def _mentions(alert: Alert, finding: Finding) -> bool:
    """Whether an alert of an older tr11 told people of what the finding names."""
    if alert.identity is not None or alert.detector != finding.detector:
        return False
    text = "\n".join((alert.title, alert.subject, *alert.evidence))
    return all(
        re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in finding.identity
    )


def _is_continued(alert: Alert, finding: Finding, seen: dict[str, Finding]) -> bool:
    """Whether a finding of a new name is what people know of as this alert."""
    return (
        _mentions(alert, finding)
        or _lacked_the_cause(alert, finding, seen)
        or _ended_its_job(alert, finding, seen)
    )


def _ended_its_job(alert: Alert, finding: Finding, seen: dict[str, Finding]) -> bool:
    """Whether an attempt has ended by the loss of the node that an alert is about, and which is no
    finding any more.
    """
    if not alert.is_open or alert.detector not in LOSSES or alert.fingerprint in seen:
        return False
    if finding.detector != "unfinished-end" or alert.subject != finding.subject:
        return False
    return finding.fault == "node" or any(name in finding.title for name in alert.identity or ())


def _lacked_the_cause(alert: Alert, finding: Finding, seen: dict[str, Finding]) -> bool:
    """Whether an alert is of the same end of an attempt, of which no cause was known yet, or its
    class alone.
    """
    if alert.fingerprint in seen or alert.subject != finding.subject:
        return False
    identity = alert.identity or ()
    is_open_end = identity[:1] == (NO_CAUSE,) or identity == (finding.fault,)
    return alert.detector == finding.detector and is_open_end


def _is_but_a_remark(finding: Finding, alert: Alert) -> bool:
    """Whether of a fault that was worth a message only something worth knowing is left."""
    return finding.severity is Severity.INFO and is_worth_a_message(alert)


def _without_standing(
    alert_state: AlertState, seen: dict[str, Finding], blind: frozenset[str], policy: Policy
) -> dict[str, Finding]:
    """What was seen, less what follows from a cause that is not known to be gone.

    A look that could not see the cause, or the first one that did not, does not end it. What has
    become worse counts.
    """
    causes = [
        alert
        for alert in alert_state.alerts
        if alert.is_open
        and alert.fingerprint not in seen
        and (alert.detector in blind or alert.clear_looks + 1 < policy.resolve_after)
    ]
    standing = {one.fingerprint: alert.severity for alert in causes for one in alert.consequences}
    return {
        name: finding
        for name, finding in seen.items()
        if name not in standing
        or finding.severity > standing[name]
        or alert_state.find(name) is not None
    }


def _joined(
    alert_state: AlertState, seen: dict[str, Finding], now: float
) -> tuple[AlertState, list[AlertEvent]]:
    """The alert state in which what follows from another finding has no alert of its own any more;
    and what happened.

    The alert of a consequence goes on as that of its cause, where that has none: people know of the
    incident, and now hear what brought it about. Where the cause has one, the other ends in it, and
    no all-clear is sent.
    """
    events: list[AlertEvent] = []
    for name, finding in seen.items():
        following = {one.fingerprint for one in finding.consequences}
        for alert in alert_state.open_alerts:
            if alert.fingerprint not in following:
                continue
            cause = alert_state.find(name)
            over = cause
            if cause is None or not cause.is_open:
                held_at = alert.held_at
                if cause is not None and not held_at:
                    held_at = cause.held_at
                cause = replace(_as_its_cause(alert, name, finding), held_at=held_at)
            else:
                over, cause = replace(alert, resolved_at=now), cause.joined_with(alert)
            events.append(
                event_of(
                    cause,
                    CAUSE_FOUND,
                    why=f"{alert.title}: follows from {cause.title}",
                    now=now,
                )
            )
            alert_state = _in_their_place(alert_state, cause, alert, over=over)
    return alert_state, events


def _as_its_cause(alert: Alert, name: str, finding: Finding) -> Alert:
    """The alert of a consequence as that of the cause, of which it was the first sign."""
    return replace(
        alert,
        fingerprint=name,
        detector=finding.detector,
        identity=finding.identity,
        title=clean(finding.title, LONGEST_TITLE),
        told_as=_told_as(alert),
        runbook=page_for(finding, finding.consequences),
        members=alert.names,
    )


def _told_as(alert: Alert) -> str:
    """The title that people know an alert by, which goes on as that of another fault."""
    if alert.said is None:
        return ""
    return alert.known_as


def _opened(name: str, finding: Finding, now: float) -> Alert:
    since = now
    if finding.since is not None:
        since = min(now, finding.since)
    return Alert(
        fingerprint=name,
        detector=finding.detector,
        subject=clean(finding.subject, LONGEST_TITLE),
        severity=finding.severity,
        title=clean(finding.title, LONGEST_TITLE),
        evidence=_bounded(finding.evidence),
        fix=clean(finding.fix, LONGEST_FIX),
        runbook=page_for(finding, finding.consequences),
        identity=finding.identity,
        then=tuple(clean(command, LONGEST_FIX) for command in finding.then),
        consequences=tuple(map(_consequence, finding.consequences)),
        fault=finding.fault,
        by_itself=clean(finding.by_itself, LONGEST_FIX),
        members=tuple(one.fingerprint for one in finding.consequences),
        began=now,
        opened=now,
        last_seen=now,
        since=since,
        first_since=since,
    )


def _consequence(finding: Finding) -> Consequence:
    return Consequence(
        finding.fingerprint,
        finding.detector,
        severity=finding.severity,
        title=clean(finding.title, LONGEST_TITLE),
        then=tuple(clean(command, LONGEST_FIX) for command in finding.then),
    )


def _bounded(evidence: Iterable[str]) -> tuple[str, ...]:
    lines = tuple(clean(line, LONGEST_EVIDENCE) for line in evidence)
    if len(lines) <= MOST_EVIDENCE:
        return lines
    return (
        *lines[: MOST_EVIDENCE - 1],
        f"... and {counted(len(lines) - MOST_EVIDENCE + 1, 'more line')}",
    )


def _seen_again(
    alert: Alert, finding: Finding, policy: Policy, now: float
) -> tuple[Alert, tuple[AlertEvent, ...]]:
    fresh = _opened(alert.fingerprint, finding, now)
    milder = 0
    if finding.severity < alert.severity:
        milder = alert.milder_looks + 1
    # an attempt trains; what is back is what it is now
    is_sure = finding.is_to_be_passed or not alert.is_open
    is_lower = milder >= policy.resolve_after or (milder > 0 and is_sure)
    if is_lower:
        severity = finding.severity
    else:
        severity = max(alert.severity, finding.severity)
    since = _began_again(alert, finding, fresh.start, now)
    after = replace(
        alert,
        subject=fresh.subject,
        identity=fresh.identity,
        severity=severity,
        title=fresh.title if finding.severity >= severity else alert.title,
        evidence=fresh.evidence,
        fix=fresh.fix,
        then=fresh.then,
        runbook=fresh.runbook,
        fault=fresh.fault,
        by_itself=fresh.by_itself,
        headline=SUPPOSED if _has_proved_another(alert, finding) else alert.headline,
        consequences=fresh.consequences,
        members=tuple(dict.fromkeys((*alert.members, *fresh.members))),
        last_seen=now,
        clear_looks=0,
        until=None,
        since=since,
        first_since=min(filter(None, (alert.first_since, since)), default=None),
        milder_looks=milder,
    )
    if is_lower:
        after = replace(after, milder_looks=0)
        if alert.said is not None:
            after = replace(after, said=severity)
    if not alert.held_at and alert.said is not None and after.waits_for_person:
        after = replace(after, held_at=after.subject)
    if severity > alert.severity:  # what someone took on, or put off, was a lesser thing
        after = replace(after, snoozed_until=None, snoozed_by="").unacknowledged()
    if alert.is_open:
        return after, ()
    # Who took it on may think that it is over, even where the all-clear is still to come.
    remind = after.remind or (after.said is not None and after.is_acknowledged)
    after = replace(
        after.unacknowledged(), resolved_at=None, resolved_by="", resolved_why="", remind=remind
    )
    if _is_new_to_people(alert, finding):
        after = replace(
            after, began=now, opened=now, first_since=after.since, first_acknowledged_by=""
        )
    return after, (event_of(after, OPENED, why=f"it is back: {after.title}", now=now, again=True),)


def _has_proved_another(alert: Alert, finding: Finding) -> bool:
    """Whether the cause that people were told of, a node's or none that was known, has proved to be
    another.
    """
    is_told = alert.is_open and bool(alert.headline)
    return is_told and alert.fault in OPEN_CLASSES and finding.fault not in {"", *OPEN_CLASSES}


def _is_new_to_people(alert: Alert, finding: Finding) -> bool:
    """Whether a fault that is back is another incident: it calls for someone, and all were told
    that it was over.
    """
    is_called_over = not alert.is_open and alert.said is None and alert.called_over is not None
    return is_called_over and finding.severity is Severity.CRITICAL


def _began_again(alert: Alert, finding: Finding, since: float, now: float) -> float | None:
    """When the fault of an alert began that is seen again, of which a look by itself says `since`:
    not before people were told that it was over.
    """
    if alert.is_open and finding.since is None:
        return alert.since
    if alert.called_over is not None and since < alert.called_over:
        if alert.is_open:
            return alert.since
        return now
    if alert.is_open and not alert.clear_looks:
        return min(alert.start, since)  # a stall that became a hang began with the stall
    return since


def _not_seen(
    alert: Alert, policy: Policy, now: float, trained: float | None
) -> tuple[Alert, tuple[AlertEvent, ...]]:
    looks = alert.clear_looks + 1
    after = replace(alert, clear_looks=looks, until=now if alert.until is None else alert.until)
    trains_again = (
        alert.detector in NO_TRAINING and trained is not None and trained > alert.last_seen
    )
    if looks < policy.resolve_after and not trains_again:
        return after, ()
    if trains_again:
        why = "an iteration has ended since"
    else:
        why = f"not seen in {counted(looks, 'look')}"
    after = replace(after, resolved_at=now, resolved_by=WATCHDOG, resolved_why=why)
    return after, (event_of(after, RESOLVED, why=after.resolved_why, now=now),)


def _expired(alert: Alert, now: float) -> tuple[Alert, tuple[AlertEvent, ...]]:
    """End what has run out: a snooze, and an acknowledgement of something that still stands. Both
    call for a word.
    """
    if not alert.is_open:
        return alert, ()
    events: tuple[AlertEvent, ...] = ()
    if alert.snoozed_until is not None and (
        now >= alert.snoozed_until or alert.snoozed_until - now > LONGEST_SNOOZE
    ):
        alert = replace(alert, snoozed_until=None, snoozed_by="", remind=True)
    if alert.is_acknowledged and elapsed(alert.acknowledged_at, now) >= ACKNOWLEDGED_SECONDS:
        why = f"{alert.acknowledged_by} acknowledged it a day ago, and it still stands"
        events = (event_of(alert, "alert-acknowledgement-expired", why=why, now=now),)
        alert = replace(alert.unacknowledged(), remind=True)
    return alert, events


def _tidied(alert_state: AlertState, now: float) -> AlertState:
    """Keep of old incidents, of which no one waits for word, no more than a report needs."""
    old = [
        alert
        for alert in alert_state.alerts
        if alert.resolved_at is not None
        and alert.said is None
        and elapsed(alert.resolved_at, now) > RESOLVED_KEPT_SECONDS
    ]
    if not old:
        return alert_state
    gone = {alert.fingerprint for alert in old}
    kept = tuple(alert for alert in alert_state.alerts if alert.fingerprint not in gone)
    return replace(
        alert_state,
        alerts=kept,
        closed=(*alert_state.closed, *map(incident_of, old))[-CLOSED_KEPT:],
    )


def is_worth_a_message(alert: Alert) -> bool:
    """What is INFO is in the daily digest, and nowhere else."""
    return alert.severity >= Severity.WARNING
