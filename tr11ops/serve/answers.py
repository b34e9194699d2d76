"""What a link in a mail leads to: who may answer which alerts, as they are now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tr11ops.alerts.answer_link import AnswerLink, opened, signing_key
from tr11ops.alerts.policy import policy_of
from tr11ops.alerts.state import Alert, AlertState, OnCall
from tr11ops.alerts.store import current_alert_state
from tr11ops.base import deadline
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import mark_of_plan
from tr11ops.base.observed import cause
from tr11ops.base.units import counted, duration
from tr11ops.serve.acts import WebAct
from tr11ops.serve.poller import News
from trainer.contract.record import Record

SOURCE = "the link in a mail"
ALERTS_CHANGED = "Nothing was done: these alerts have changed since this page was opened."
BUTTONS = {
    "ack": "Acknowledge",
    "snooze": "Snooze for 2 hours",
    "shift": "Take the shift",
    "shift-back": "Give the shift back",
}
WHAT_THEY_DO = {
    "ack": "No one else is called about it for 24 hours, unless it becomes worse.",
    "snooze": "No message about it for 2 hours, unless it becomes worse; then it is said once again.",
    "shift": "Messages and reminders go to you first until the rota changes, a day at most.",
    "shift-back": "The rota counts again.",
}


class LinkRefused(Refusal):
    """A link that allows nothing: why, and the HTTP status that says so."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class AnswerableLink(Record):
    """A link that counts: what it allows, of which run, which of its alerts are still open, and who is
    on call now.
    """

    link: AnswerLink
    news: News
    alerts: tuple[Alert, ...]
    on_call: OnCall
    asked: float

    @property
    def buttons(self) -> dict[str, str]:
        """What this person can do, by the form's word for it: take the shift, or give it back."""
        has_shift = self.on_call.taken is not None and self.on_call.who == (self.link.who,)
        needless = "shift" if has_shift else "shift-back"
        return {name: words for name, words in BUTTONS.items() if name != needless}

    @property
    def lines(self) -> tuple[str, ...]:
        """Each alert: how severe, what, since when, and who has it."""
        return tuple(self._line(alert) for alert in self.alerts)

    def _line(self, alert: Alert) -> str:
        since = duration(self.asked - alert.start)
        who = alert.care.words(self.on_call, self.asked)
        return f"{alert.severity.name}: {alert.title} (for {since}; {who})"

    @property
    def title(self) -> str:
        """What the page is about."""
        if len(self.alerts) == 1:
            return self.alerts[0].title
        return counted(len(self.alerts), "alert")

    @property
    def shown(self) -> str:
        """What stands for what a person is shown of them."""
        named = [alert.incident for alert in self.alerts]
        return mark_of_plan((*self.lines, *named, self.on_call.names))

    def act(self, action: str) -> WebAct:
        """The change that a button asks for. Raises WrongUsage for a button that the page lacks."""
        names = " ".join(alert.incident for alert in self.alerts)
        wanted = action if action in self.buttons else ""
        act = WebAct(self.news.key, wanted, self.link.who, alert=names, source=SOURCE)
        return act.checked()


def answerable_link(token: str, key: Path, every: Iterable[News]) -> AnswerableLink:
    """Whether a link counts now. Raises LinkRefused: signed by no key of ours, expired, of a run that
    is not here or can only be read, of alerts that are over; PrivateFileError for the key's file.
    """
    now = time.time()
    link = opened(token, signing_key(key))
    if link is None:
        raise LinkRefused(403, "This link was not made for this server, or was changed on its way.")
    if link.until < now:
        raise LinkRefused(410, "This link has expired; a newer mail has a newer one.")
    news = next((one for one in every if _is_run(one, link)), None)
    if news is None or news.run is None:
        raise LinkRefused(404, "This server has not seen that run (yet): try again in a minute.")
    try:
        state = deadline.within(
            deadline.LOOK_SECONDS, partial(current_alert_state, news.run.directory)
        )
    except (OSError, ValueError) as error:
        raise LinkRefused(503, f"The alerts cannot be read: {cause(error)}") from None
    alerts = _still_open(state, link)
    if not alerts:
        raise LinkRefused(410, "That is over: nothing is to be done. What is new has its own mail.")
    on_call = policy_of(news.run.card, mark="", host="").on_call(state.shift, now)
    return AnswerableLink(link, news, alerts, on_call=on_call, asked=now)


def _is_run(news: News, link: AnswerLink) -> bool:
    return news.run is not None and news.can_act and news.run.directory.mark == link.run


def _still_open(state: AlertState, link: AnswerLink) -> tuple[Alert, ...]:
    """The open alerts that the mail was about; not a later incident of the same kind."""
    named = set(link.alerts)
    return tuple(
        alert
        for alert in state.open_alerts
        if named.intersection(alert.names) and alert.began <= link.told
    )
