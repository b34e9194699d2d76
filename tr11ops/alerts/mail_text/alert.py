"""The messages about alerts: what, since when, what tr11 does, what to type; then all that helps to
understand it.

Plain text for a telephone: the first lines say all that is needed. The page of the runbook is in
the mail itself.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter

from tr11ops.alerts.mail_text.daily_summary import RunMails
from tr11ops.alerts.mail_text.shared import (
    LONGEST_SUBJECT,
    clean,
    command,
    enter,
    from_anywhere,
    message_identity,
    place,
)
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.situation import (
    is_cured,
    nodes_now,
    what_is_over,
    what_tr11_does,
)
from tr11ops.alerts.state import OVER, Alert, Message, MessagePart
from tr11ops.base.invocation import for_card, only_looks
from tr11ops.base.shipped import page_lines
from tr11ops.base.units import WIDTH, capitalized, counted, duration, node_time, wrapped
from tr11ops.detect.detector import Severity

MOST_PARTS = 20  # of one message that are told in full; the others by their title
MOST_TITLES = 80
MOST_PAGES = 3  # of the runbook in one mail
MOST_THREADS = 10
MOST_STANDING = 3  # alerts that an all-clear names as still open
LEAST_COST_HOURS = 0.1  # node-hours: less is no cost that anyone needs to hear of
PART_EVIDENCE = 3  # lines of evidence of each of several alerts
LONGEST_DETECTOR = 20  # characters of the name of a detector
LEAST_OVER = 40  # characters: in less, the title of what is over says nothing
LONGEST_RUN = 40  # characters of a run's name, of a subject: what has happened needs the room

NAMES_OF_FILES = frozenset({"latest"})

_NEWS = {
    "raised": "This has become worse.",
    "reopened": "This has come back.",
    "cause": "This is the cause of what you were told before, and its commands take the place of those.",
    "uncured": "",  # it names the attempts
    "repeated": "This is still so, and no one has acknowledged it.",
    "again": "This is still so, and its acknowledgement or snooze has run out.",
}
_SHORT = {
    "opened": "new",
    "raised": "worse",
    "reopened": "back",
    "cause": "the cause",
    "uncured": "not cured",
    "again": "still stands",
}


class AlertMails(RunMails):
    """The messages of one moment about a run and its alerts.

    `standing`: all alerts of the run that are open and worth a message, the most severe first.
    """

    standing: Sequence[Alert] = ()

    def message(
        self, parts: Sequence[MessagePart], to: tuple[str, ...], urls: bool = True
    ) -> Message:
        """The message that says these parts to `to`. The same parts and people give the same id, no
        matter who makes it.
        """
        first = parts[0]
        alerts = tuple(part.alert for part in parts)
        names = [f"{alert.incident}-{alert.sends + 1}" for alert in alerts]
        told = {address for part in parts for address in part.to}
        name = names[0]
        if len(names) > 1 or told != set(to):
            name += (
                "-"
                + hashlib.sha256(repr((names, to)).encode("utf-8", "surrogatepass")).hexdigest()[:8]
            )
        make = self._one if len(parts) == 1 else self._several
        head = tuple(self._first_lines(first))
        body = (*head, *make(parts, to))
        return Message(
            id=name,
            kind=first.kind,
            alert=first.alert.fingerprint,
            alerts=tuple(alert.fingerprint for alert in alerts),
            kinds=tuple(part.kind for part in parts),
            detector=first.alert.detector,
            severity=first.alert.severity,
            subject=self._subject(parts),
            body="\n".join(body) + "\n",
            appendix="\n".join(self._pages(parts)),
            to=to,
            urls=urls,
            opening=len("\n".join(head)),
            time=self.now,
            message_id=message_identity(name, self.policy),
            thread=" ".join(
                dict.fromkeys(
                    word for alert in alerts for word in alert.thread.split()[:MOST_THREADS]
                )
            ),
        )

    def _subject(self, parts: Sequence[MessagePart]) -> str:
        first = parts[0]
        # what is over is no further fault
        others = sum(part.kind not in OVER or first.kind in OVER for part in parts[1:])
        more = ""
        if others:
            more = f" (and {others} more)"
        title = first.alert.known_as if first.kind in OVER else first.alert.title
        if first.kind == "replaced":
            return self._not_ok(self._instead(), first.alert, more)
        if first.kind == "cleared":
            tag = f"[OK] {clean(self.policy.run, LONGEST_RUN)}: {what_is_over(first.alert, self.situation)}: "
        else:
            tag = f"[{first.alert.severity.name}] {clean(self.policy.run, LONGEST_RUN)}: "
            if first.alert.is_uncured:
                title = f"not cured, {title}"
        return f"{tag}{_headline(title, LONGEST_SUBJECT - len(tag) - len(more))}{more}"

    def _not_ok(self, stands: str, over: Alert, more: str) -> str:
        """The subject of an all-clear of a run that is not well: what stands now comes first, and has
        the room; what is over has what is left, or goes by its detector's name.
        """
        tag = f"[NOT OK] {clean(self.policy.run, LONGEST_RUN)}: "
        between = " (over: "
        room = LONGEST_SUBJECT - len(tag) - len(between) - len(")") - len(more)
        said = _headline(stands, room - LONGEST_DETECTOR)
        left = room - len(said)
        title = over.known_as.replace(": ", ", ")
        if left < LEAST_OVER and len(title) > left:
            title = over.detector
        return f"{tag}{said}{between}{clean(title, left)}){more}"

    def _instead(self) -> str:
        """What is in the place of a fault that is over, where the run is not known to be well."""
        if self.standing and self.standing[0].severity is Severity.CRITICAL:
            return self.standing[0].title
        if self.situation.condition is None:
            return "how the run is doing is not known"
        return self.situation.condition.words

    def _one(self, parts: Sequence[MessagePart], to: tuple[str, ...]) -> Iterator[str]:
        """What follows on its first lines."""
        (part,) = parts
        alert = part.alert
        news = self._news(part)
        if news:
            yield ""
            yield from wrapped(news)
        if part.kind not in OVER:
            yield ""
            yield from self._to_take_it_on((alert,))
        yield ""
        yield from self._state(part)
        if alert.evidence:
            yield ""
            yield "It was:" if part.kind in OVER else "Evidence:"
            for line in alert.evidence:
                yield from wrapped(line, "  ")
        yield ""
        yield from _people(part, to)

    def _first_lines(self, part: MessagePart) -> Iterator[str]:
        """What, since when, what tr11 does, what to type."""
        alert = part.alert
        if part.kind in OVER:
            yield from self._all_clear(part)
            return
        title = _sentence(alert.title)
        if alert.is_uncured:
            title = f"Not cured: {alert.title}"
        what = f"{title}. {self._since(alert.start)}"
        yield from wrapped(
            for_card(self.policy.typed, f"{what} {what_tr11_does(alert, self.situation)}".rstrip())
        )
        yield from self._type(alert, is_cured(alert, self.situation))

    def _since(self, start: float) -> str:
        """A sentence of its own: a title may say "for 31 min" or "since iteration 5" of what it is
        about.
        """
        age = self.now - start
        ago = f"{duration(age)} ago" if age >= 1 else "just now"
        return f"This began at {self.moment(start)}, {ago}."

    def _all_clear(self, part: MessagePart) -> Iterator[str]:
        """That it is over, and how the run is now: no one is sent to bed while it is down."""
        alert = part.alert
        end = self.now if alert.end is None else alert.end
        by = "" if alert.resolved_by in {"", "tr11"} else f"{alert.resolved_by}: "
        lasted = f"lasted {duration(end - alert.start)}, from {self.moment(alert.start)} to"
        first = alert.comes_and_goes_since
        if first is not None:
            lasted = f"came and went from {self.moment(first)} to"
        what = f"{_sentence(what_is_over(alert, self.situation))}: {alert.known_as}"
        over = f"{what}. It {lasted} {self.moment(end)} ({by}{alert.resolved_why})."
        resume = words = ""
        if self.situation.condition is not None:
            resume = self.situation.condition.resume
            words = f" Now {self.situation.condition.words}."

        # their commands would be against what this very look has seen
        passing = [
            other
            for other in self.standing
            if other.clear_looks and self.situation.proves_end_of(other)
        ]
        asks = any(
            other.fix or other.commands_after for other in self.standing if other not in passing
        )
        if part.kind == "replaced":
            is_ill = bool(self.standing) and self.standing[0].severity is Severity.CRITICAL
            if is_ill:
                but = "But the run is not well"
            else:
                but = "But that the run is well is not known"
            yield from wrapped(f"{over} {but}. Now: {self._instead()}.")
        else:
            nodes = "".join(f" {sentence}" for sentence in nodes_now(alert, self.situation))
            if not resume and not asks:
                words += " Nothing to type."
            yield from wrapped(f"{over}{self._training_goes_on(alert)}{nodes}{words}")
        for other in self.standing[:MOST_STANDING]:
            if other in passing:
                yield from wrapped(
                    f"Not seen any more, {other.severity.name}: {other.title} (since"
                    f" {self.moment(other.start)}). It is over if the next looks do not see it.",
                    "",
                    "  ",
                )
                continue
            yield from wrapped(
                f"Still open, {other.severity.name}: {other.title} (since {self.moment(other.start)}).",
                "",
                "  ",
            )
            yield from self._type(other, is_cured(other, self.situation))
        if resume:
            yield "It goes on only when it is resumed. When it may, type:"
            yield from (*enter(self.policy), f"  {resume}")

    def _training_goes_on(self, alert: Alert) -> str:
        """A sentence: since when the training goes on that stood still, in which job, and in which it
        is now; "" where it did not, or unknown.
        """
        step = self.situation.went_on(alert)
        if step is None or step.time is None:
            return ""
        job = self.situation.labels.get(step.job_id, step.job_id)
        at = f"{self.moment(step.time)}: job {job}, from step {step.record.iteration:,}"
        last = self.situation.steps[-1].job_id
        if last == step.job_id:
            return f" Training goes on since {at}."
        return f" Training went on at {at}; now it is job {self.situation.labels.get(last, last)}."

    def _type(self, alert: Alert, is_cured: bool) -> Iterator[str]:
        after = alert.commands_after
        if alert.fix:
            yield "Type nothing now. Only if that fails:" if is_cured else "Type:"
            yield from (*enter(self.policy), f"  {alert.fix}")
        if after:
            yield _when(alert.fix)
            yield from (*enter(self.policy), *(f"  {command}" for command in after))
        if alert.consequences:
            yield ""
            yield "What follows from it:"
            for one in alert.consequences:
                yield from wrapped(one.title, "- ", "  ")

    def _news(self, part: MessagePart) -> str:
        alert = part.alert
        if alert.is_uncured:
            return (
                f"What was done since has not helped: it went on after {alert.held_at}, and {alert.subject}"
                " has ended in the same way."
            )
        if part.kind == "escalated":
            return f"No one has acknowledged this for {duration(self.now - (alert.alarmed or alert.began))}."
        if part.kind == "assigned":
            return f"This is now yours ({alert.owner})."
        if part.kind == "taken-over":
            return f"This is no longer yours: {alert.holder or 'no one'} has it."
        if part.kind == "reopened" and alert.called_over is not None:
            between = max(0.0, alert.start - alert.called_over)
            return f"This came back {duration(between)} after its all-clear."
        news = _NEWS.get(part.kind, "")
        if part.kind == "raised" and alert.has_new_cause:
            news += f" {_NEWS['cause']}"
        if part.kind == "raised" and alert.first_acknowledged_by:
            news += (
                f" {alert.first_acknowledged_by} took on the lesser fault; this is no one's yet."
            )
        return news

    def _to_take_it_on(self, alerts: Sequence[Alert]) -> Iterator[str]:
        """How to acknowledge, of all that works here."""
        names = " ".join(alert.incident for alert in alerts[:MOST_PARTS])
        lines = wrapped(command(f"ack {names}", self.policy), width=WIDTH - 4)
        yield "To take it on, so that no one else is called:"
        yield from enter(self.policy)
        yield from (f"  {line} \\" for line in lines[:-1])
        yield f"  {lines[-1]}"
        line = f"ack {alerts[0].incident}"
        each = ", and a file for each other alert" if len(alerts) > 1 else ""
        there = self.policy.directory
        where = ""
        if self.policy.kept_in:
            there = self.policy.kept_in
            where = f" on {self.policy.host}"
        yield from wrapped(
            f"or write the line `{line}` into a file in {there}/state/alerts/replies/{where}{each}"
        )
        yield "Replies to this mail are not read."

    def _state(self, part: MessagePart) -> Iterator[str]:
        if self.situation.progress:
            yield from wrapped(f"Progress: {self.situation.progress}", "", " " * 10)
        yield from self._cost(part)
        yield from place(self.policy)

    def _cost(self, part: MessagePart) -> Iterator[str]:
        """What an incident has cost: of one that is over, to its own end."""
        began = min(part.alert.start, self.now)
        is_over = part.kind == "cleared"
        if is_over:
            cost = self.situation.cost_until_over(part.alert)
        else:
            cost = self.situation.cost_of(began)
        if cost is None:
            return
        when = self.moment(cost[0])
        spell = cost[1]
        if is_over:
            when = f"from {self.moment(began)} to {when}"
        else:
            when = f"since {when}"
        if spell.lost_hours >= LEAST_COST_HOURS:
            share = f"{node_time(spell.lost_hours, spell.wanted_hours)} lost"
            yield from wrapped(f"Cost:     {share} {when}", "", " " * 10)

    def _several(self, parts: Sequence[MessagePart], to: tuple[str, ...]) -> Iterator[str]:
        """What follows on the first lines of the first of them."""
        news = [part.alert for part in parts if part.kind not in OVER]
        over = len(parts) - len(news)
        counts = []
        if news:
            counts.append(counted(len(news), "alert"))
        if over:
            counts.append(f"{over} over")
        yield from wrapped(f"All in this mail: {' and '.join(counts)}.")
        if news:
            yield ""
            yield from self._to_take_it_on(news)
        yield ""
        for number, part in enumerate(parts[:MOST_PARTS], 1):
            yield from self._numbered(number, part)
        for part in parts[MOST_PARTS:MOST_TITLES]:
            yield from wrapped(
                f"- {part.alert.fingerprint} {_short(part)}: {part.alert.title}", "  "
            )
        if len(parts) > MOST_TITLES:
            yield f"  and {len(parts) - MOST_TITLES} more: {command('list', self.policy)}"
        yield ""
        first = min(parts, key=attrgetter("alert.start"))
        yield from self._state(first)
        yield ""
        yield from wrapped(f"This goes to: {', '.join(to) or 'the delivery URLs'}.")

    def _numbered(self, number: int, part: MessagePart) -> Iterator[str]:
        alert = part.alert
        if part.kind in OVER:
            label = "over"
            title = alert.known_as
        else:
            label = f"{alert.severity.name}, {_short(part)}"
            title = alert.title
        yield from wrapped(
            f"{number}. {label}: {title} ({duration((alert.end or self.now) - alert.start)})",
            "",
            "   ",
        )
        if part.kind in OVER:
            return
        news = self._news(part)
        if news:
            yield from wrapped(news, "   ")
        for line in alert.evidence[:PART_EVIDENCE]:
            yield from wrapped(line, "   ")
        if alert.fix:
            if is_cured(alert, self.situation):
                when = "If tr11 fails, type"
            else:
                when = "Type"
            yield f"   {when}: {from_anywhere(alert.fix, self.policy)}"
        for command_after in alert.commands_after:
            yield f"   Then: {from_anywhere(command_after, self.policy)}"
        for one in alert.consequences:
            yield from wrapped(f"Consequence: {one.title}", "   ")
        yield f"   Alert: {alert.incident}"

    def _pages(self, parts: Sequence[MessagePart]) -> Iterator[str]:
        """The pages of the runbook that treat what stands, for the mail alone."""
        pages = tuple(
            dict.fromkeys(
                part.alert.runbook for part in parts if part.kind not in OVER and part.alert.runbook
            )
        )
        shown = [(page, lines) for page in pages[:MOST_PAGES] if (lines := page_lines(page, WIDTH))]
        if not shown:
            return
        yield "What follows is the runbook. Before its commands, type:"
        yield from enter(self.policy)
        if self.policy.typed:
            yield f"  {run_variable(self.policy)}"
        for page, lines in shown:
            yield ""
            head = f"---- tr11 runbook {page.removesuffix('.md')} "
            yield head + "-" * max(4, WIDTH - len(head))
            yield from lines
        left = pages[MOST_PAGES:]
        if left:
            yield from wrapped(
                f"See also: {', '.join(f'`tr11 runbook {page[:-3]}`' for page in left)}."
            )

    # ------------------------------------------------------------------------- to the site's support
    def to_site(self, alert: Alert, kind: str, asked: Sequence[str]) -> Message:
        """The mail about a fault that only the site can repair, when it began or is over (`kind` in
        OVER): no commands of ours, and who can be `asked`. The delivery URLs do not get it.
        """
        policy = self.policy
        name = f"{alert.incident}-{alert.sends + 1}-site"
        over = kind in OVER
        return Message(
            id=name,
            kind="site",
            alert=alert.fingerprint,
            detector=alert.detector,
            severity=alert.severity,
            subject=clean(f"{'[OK] ' if over else ''}{policy.run}: {alert.title}", LONGEST_SUBJECT),
            body="\n".join(self._site_lines(alert, over, asked)) + "\n",
            to=(policy.support,),
            time=self.now,
            message_id=message_identity(name, policy),
            urls=False,
        )

    def _site_lines(self, alert: Alert, over: bool, asked: Sequence[str]) -> Iterator[str]:
        run = self.policy.run
        yield from ("Hello,", "")
        if over:
            yield from wrapped(f"the training {run} has the nodes again that it needs.")
        else:
            yield from wrapped(
                f"the training {run} does not have the nodes that it needs: {alert.title}."
            )
            yield ""
            for text in alert.evidence:
                yield from wrapped(text, "  ")
            yield from ("", "Could you please look at them? Nothing was drained or resumed by us.")
        yield ""
        yield from wrapped(f"To be asked about it: {', '.join(asked) or 'no one is named'}.")
        yield f"Seen:  {self.moment(alert.last_seen)}"


def _headline(title: str, most: int) -> str:
    """A title in at most `most` characters, with one colon at most, as it stands behind the run's
    name: what follows is set off by commas.
    """
    what, colon, why = clean(title, most).partition(": ")
    return f"{what}{colon}{why.replace(': ', ', ')}"


def _sentence(title: str) -> str:
    """A title that begins a sentence: with a capital letter where it begins with a word, and not
    with a name.
    """
    first = title.partition(" ")[0]
    if first.isalpha() and first not in NAMES_OF_FILES:
        return capitalized(title)
    return title


# ----------------------------------------------------------------------------- one alert


def _when(fix: str) -> str:
    """When the commands after `fix` are to be typed."""
    if fix and not only_looks(fix):
        return "Then:"
    if fix.startswith("tr11 doctor"):
        return "When what it refuses is repaired, type:"
    return "When it is repaired, type:"


def _people(part: MessagePart, to: tuple[str, ...]) -> Iterator[str]:
    yield from wrapped(f"This goes to: {', '.join(to) or 'the delivery URLs'}.")
    others = [address for address in part.alert.told if address not in to]
    if others:
        yield from wrapped(f"Told before: {', '.join(others)}.")
    if part.alert.owner:
        yield from wrapped(f"Assigned to: {part.alert.owner}.")


# ----------------------------------------------------------------------------- several alerts


def _short(part: MessagePart) -> str:
    """What is new of an alert, in a word or two."""
    if part.kind in OVER:
        return "over"
    return _SHORT.get(part.kind, part.kind)


# ----------------------------------------------------------------------------- the runbook


def run_variable(policy: Policy) -> str:
    """The line that makes all further commands mean this run."""
    return f"export TR11_RUN={shlex.quote(policy.typed)}"


def is_alarm(message: Message) -> bool:
    """Whether a message wants someone at once."""
    return message.severity is Severity.CRITICAL and message.kind not in OVER | {"digest", "test"}
