"""The daily summary, the news that all is trained or that another one is on call, and the message
that proves that messages arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from tr11ops.alerts.mail_text.shared import (
    LONGEST_SUBJECT,
    clean,
    command,
    enter,
    message_identity,
    moment,
    place,
)
from tr11ops.alerts.policy import Policy, unique
from tr11ops.alerts.situation import UNKNOWN_SITUATION, RunSituation, Spell
from tr11ops.alerts.state import Alert, AlertState, Message, OnCall, UndeliveredMessages, stamp
from tr11ops.base.invocation import command_for
from tr11ops.base.units import counted, duration, node_time, wrapped
from tr11ops.detect.detector import Severity
from trainer.contract.record import Record

LONGEST_REASON = 160


class RunMails(Record):
    """The messages of one moment about a run: by whose rules, and how the run is doing then."""

    policy: Policy
    now: float
    situation: RunSituation = UNKNOWN_SITUATION

    def moment(self, seconds: float) -> str:
        return moment(seconds, self.policy)

    def digest_message(
        self, alert_state: AlertState, due: float, backlog: UndeliveredMessages | None
    ) -> Message:
        """The daily summary that was due at `due`."""
        subject, lines = self.digest(alert_state, backlog)
        to = self.policy.readers(alert_state.shift, self.now)
        return self._of_no_alert("digest", f"digest-{stamp(due)}", subject, lines, to=to)

    def digest(
        self, alert_state: AlertState, backlog: UndeliveredMessages | None
    ) -> tuple[str, tuple[str, ...]]:
        """Subject and lines of the summary: how far the training came, what is open, what ended since
        the last one.
        """
        count = len(alert_state.open_alerts)
        since = alert_state.digested
        if since is None:
            since = self.now - 86_400.0
        ended = [
            alert
            for alert in alert_state.alerts
            if alert.resolved_at is not None and alert.resolved_at >= since
        ]
        words = "nothing to report"
        if count:
            words = counted(count, "open alert")
        elif ended:
            words = f"nothing open, {counted(len(ended), 'alert')} over"
        lines = tuple(self._digest_lines(alert_state, since, ended, backlog))
        return clean(f"[DIGEST] {self.policy.run}: {words}", LONGEST_SUBJECT), lines

    def _digest_lines(
        self,
        alert_state: AlertState,
        since: float,
        ended: Sequence[Alert],
        backlog: UndeliveredMessages | None,
    ) -> Iterator[str]:
        yield from self._training(since)
        yield from place(self.policy)
        yield f"At:       {self.moment(self.now)}"
        duty = self.policy.on_call(alert_state.shift, self.now)
        if duty.who:
            yield from wrapped(f"On call: {duty.words(self.now)}")
        yield ""
        yield from self._open_lines(alert_state.open_alerts)
        if ended:
            yield ""
            yield "Over since the last digest:"
            for alert in ended:
                lasted = duration((alert.end or self.now) - alert.start)
                yield from wrapped(f"{alert.severity.name:8s} {alert.title} ({lasted})", "  ")
        yield from self._left_out(since)
        if alert_state.blind:
            yield ""
            yield from wrapped(
                f"Could not be judged at the last look: {', '.join(alert_state.blind)}."
            )
        if backlog is not None and backlog.count and backlog.since is not None:
            yield ""
            what = counted(backlog.count, "message waits", "messages wait")
            yield from wrapped(f"{what} to be sent, the oldest since {self.moment(backlog.since)}.")
        yield ""
        yield "A day without this summary means that the watchdog itself stands still."
        yield from enter(self.policy)
        yield f"  {command('list', self.policy)}"

    def _open_lines(self, alerts: Sequence[Alert]) -> Iterator[str]:
        """What is open, since when, and who looks after it."""
        if not alerts:
            yield "Open: nothing."
        for alert in alerts:
            yield from wrapped(
                f"{alert.severity.name:8s} {alert.fingerprint}  {alert.title}", "", "  "
            )
            lasted = duration(self.now - alert.start)
            yield from wrapped(
                f"since {self.moment(alert.start)} ({lasted}); {alert.care.words(None, self.now)}",
                "  ",
            )

    def _left_out(self, since: float) -> Iterator[str]:
        """The nodes that tr11 has excluded since then: a fault that ended by itself is no alert, and
        yet worth knowing.
        """
        fresh = [
            (entry, entry.since)
            for entry in self.situation.left_out
            if entry.since is not None and entry.since >= since
        ]
        if not fresh:
            return
        yield ""
        yield from wrapped("Left out by tr11 since the last digest; the run goes on without them:")
        for entry, excluded in fresh:
            why = clean(entry.why, LONGEST_REASON)
            yield from wrapped(f"{entry.node}, since {self.moment(excluded)}: {why}", "  ")

    def _training(self, since: float) -> Iterator[str]:
        """Progress, loss, end and goodput: what people open the digest for."""
        spell = self.situation.since(since)
        if spell is not None:
            yield from wrapped(f"Since {self.moment(since)}: {_spell(spell)}")
        yield from self._progress()
        if self.situation.eta:
            yield from wrapped(f"End:      {self.situation.eta}", "", " " * 10)
        if self.situation != UNKNOWN_SITUATION:
            yield ""

    def _progress(self) -> Iterator[str]:
        if self.situation.progress:
            yield from wrapped(f"Progress: {self.situation.progress}", "", " " * 10)

    def finished(self, to: tuple[str, ...], words: str) -> Message:
        """The news that all is trained. `words` are the verdict's."""
        lines = [
            *wrapped(
                f"{words}. Nothing has to be typed: a queued task that starts ends at once, and one that is"
                " held stays until `tr11 launch --repair`."
            ),
            "",
            *self._progress(),
        ]
        if self.situation.trained is not None:
            lines.append(
                f"Trained:  the last iteration ended {self.moment(self.situation.trained)}"
            )
        lines += [*place(self.policy), "", "The whole run on one page:", *enter(self.policy)]
        lines.append(f"  {command_for(self.policy.typed, 'report')}")
        subject = f"[DONE] {self.policy.run}: the training is finished"
        return self._of_no_alert("finished", f"finished-{stamp(self.now)}", subject, lines, to=to)

    def shift(
        self, before: OnCall, alert_state: AlertState, why: str, moved: float | None = None
    ) -> Message:
        """The news of a change of who is on call, that no rota has made, to those `before` it and those
        of the alert state after it, and what is open. `why` says who made it, and why; `moved` is when,
        where that is not now.
        """
        policy = self.policy
        after = policy.on_call(alert_state.shift, self.now)
        following = policy.on_call(alert_state.shift, after.until or self.now)
        text = f"On call now: {policy.span(after)}."
        lines = [*wrapped(text), *wrapped(why), "", *place(policy), ""]
        lines += [*self._open_lines(alert_state.open_alerts), ""]
        lines += ["What is open, and who has it:", *enter(policy), f"  {command('list', policy)}"]
        lines.append("")
        if after.taken is None:
            lines += wrapped(f"The shift that {before.names} took is over: the rota counts again.")
        else:
            lines += wrapped(f"This is in place of {before.names}. Then follows {following.names}.")
            lines += ["", "To give the shift back:", *enter(policy)]
            lines += [f"  {command('end-shift', policy)}"]
        subject = f"[ON CALL] {policy.run}: {policy.span(after)}"
        to = unique((*after.who, *before.who)) if policy.everyone else ()
        name = f"shift-{stamp(moved or self.now)}"
        return replace(self._of_no_alert("shift", name, subject, lines, to=to), urls=False)

    def trial(self, to: tuple[str, ...]) -> Message:
        """A message that only proves that messages arrive."""
        policy = self.policy
        mark = hashlib.sha256(repr((policy.host, to)).encode()).hexdigest()[:6]
        body = [
            f"This is a test of the alerts of {policy.run}. Nothing is wrong.",
            "",
            *place(policy),
            f"Sent:     {self.moment(self.now)}",
        ]
        subject = f"[TEST] {policy.run}: alerts arrive here"
        return self._of_no_alert("test", f"test-{stamp(self.now)}-{mark}", subject, body, to=to)

    def _of_no_alert(
        self, kind: str, name: str, subject: str, lines: Sequence[str], *, to: tuple[str, ...]
    ) -> Message:
        return Message(
            id=name,
            kind=kind,
            alert="",
            detector="",
            severity=Severity.INFO,
            subject=clean(subject, LONGEST_SUBJECT),
            body="\n".join(lines) + "\n",
            to=to,
            time=self.now,
            message_id=message_identity(name, self.policy),
        )


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
