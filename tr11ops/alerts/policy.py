"""Who is told when: the card's [alerts] section as pure answers about a moment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

# a fault that comes back sooner than this after the all-clear is the same incident
FLAP_SECONDS = 3600.0
# how often at most people are told at once that one critical fault is back after its all-clear
BACK_SECONDS = 600.0
ACKNOWLEDGED_SECONDS = 86_400.0  # an acknowledgement holds so long
FIRST_MONDAY = date(1970, 1, 5)


class Policy(Record):
    """The rules of one run, and what its messages say of it.

    `run` is its name, `directory` its run directory, `typed` the card as the person named it, `host` and `folder` where
    we run, and where commands are typed.
    `kept_in`: where alerts are kept on this machine while the run directory takes none.
    `mark` stands for the run directory in Message-IDs. `has_urls`: messages also go to delivery URLs.
    `support`: the site's own, who hear of what only the site can repair.
    """

    run: str
    directory: str
    typed: str = ""
    host: str = "localhost"
    folder: str = ""
    mark: str = "tr11"
    kept_in: str = ""
    recipients: tuple[str, ...] = ()
    rota: tuple[str, ...] = ()
    rota_days: float = 7.0
    rota_start: date = FIRST_MONDAY
    zone: tzinfo = UTC
    quiet_hours: tuple[time, time] | None = None
    escalate_minutes: tuple[float, ...] = (30.0, 60.0)
    repeat_hours: float = 24.0
    resolve_after: int = 2
    digest_time: time | None = None
    has_urls: bool = False
    support: str = ""

    @property
    def domain(self) -> str:
        """The right half of this run's Message-IDs."""
        return f"{self.mark}.tr11.invalid"

    @property
    def addresses(self) -> frozenset[str]:
        """All that the card names."""
        return frozenset(filter(None, (*self.everyone, self.support)))

    @property
    def everyone(self) -> tuple[str, ...]:
        """Everyone who is ever told: the rota and the recipients."""
        return unique((*self.rota, *self.recipients))

    @property
    def is_reachable(self) -> bool:
        """False where a message would go to no one."""
        return bool(self.everyone) or self.has_urls

    def local(self, now: float) -> datetime:
        return datetime.fromtimestamp(now, self.zone)

    # ------------------------------------------------------------------ the rota
    def turn(self, now: float) -> int:
        """Whose turn it is: a place in the rota. Turns change at midnight, or within the day for
        parts of days.

        Before `rota_start` the first of the rota is on duty.
        """
        return self._turns(now) % max(1, len(self.rota))

    def turn_ends(self, now: float) -> float:
        """When the turn of the person on duty ends."""
        days = (self._turns(now) + 1) * self.rota_days
        end = datetime.combine(self.rota_start, time(), self.zone) + timedelta(days=days)
        return end.timestamp()

    def _turns(self, now: float) -> int:
        """How many turns are over."""
        wall = self.local(now).replace(tzinfo=None)
        days = (wall - datetime.combine(self.rota_start, time())) / timedelta(days=1)
        return max(0, math.floor(days / self.rota_days))

    def on_duty(self, now: float, after: int = 0) -> tuple[str, ...]:
        """Who is told first: the person on duty, or the one `after` turns later; all recipients
        without a rota.
        """
        if not self.rota:
            return self.recipients
        return (self.rota[(self.turn(now) + after) % len(self.rota)],)

    def escalation(self, step: int, told: Collection[str], now: float) -> tuple[str, ...]:
        """Who is asked at a step (1, 2, ...) of the escalation: the next of the rota not told yet,
        at last all.
        """
        turns = (address for after in range(len(self.rota)) for address in self.on_duty(now, after))
        following = next((address for address in turns if address not in told), None)
        if following is None or step >= len(self.escalate_minutes):
            return self.everyone
        return (following,)

    def steps_due(self, alarmed: float) -> int:
        """How many steps of the escalation are due so many seconds after the alarm."""
        return sum(1 for minutes in self.escalate_minutes if alarmed >= minutes * 60.0)

    # ------------------------------------------------------------------ times of day
    def is_quiet(self, now: float) -> bool:
        """Whether it is a time at which only what is critical is sent."""
        if self.quiet_hours is None:
            return False
        start, end = self.quiet_hours
        clock = self.local(now).time()
        if start <= end:
            return start <= clock < end
        return clock >= start or clock < end

    def digest_moment(self, now: float) -> float | None:
        """The last time at which a digest was due; None where the card wants none.

        A time that the clock skips in spring is as long after midnight as on other days; one that
        comes twice in autumn counts the first time.
        """
        if self.digest_time is None:
            return None
        today = self.local(now).date()
        for day in (today, today - timedelta(days=1)):
            moment = datetime.combine(day, self.digest_time, self.zone).timestamp()
            if moment <= now:
                return moment
        return datetime.combine(today - timedelta(days=2), self.digest_time, self.zone).timestamp()


def unique(addresses: Iterable[str]) -> tuple[str, ...]:
    """Each address once, in the order of its first mention."""
    return tuple(dict.fromkeys(addresses))


def policy_of(card: RunCard, *, mark: str, host: str, folder: str = "", typed: str = "") -> Policy:
    """The rules that a card states. Its zone and dates were checked when it was loaded."""
    rules = card.alerts
    return Policy(
        run=card.run.name,
        directory=str(card.paths.root),
        typed=typed,
        host=host,
        folder=folder,
        mark=mark,
        recipients=unique(rules.recipients),
        rota=unique(rules.rota),
        rota_days=rules.rota_days,
        rota_start=date.fromisoformat(rules.rota_start) if rules.rota_start else FIRST_MONDAY,
        zone=ZoneInfo(rules.time_zone),
        quiet_hours=_span(rules.quiet_hours),
        escalate_minutes=tuple(sorted(rules.escalate_minutes)),
        repeat_hours=rules.repeat_hours,
        resolve_after=rules.resolve_after,
        digest_time=time.fromisoformat(rules.digest_time) if rules.digest_time else None,
        has_urls=rules.urls_file is not None,
        support=card.resilience.support_address or "",
    )


def _span(text: str | None) -> tuple[time, time] | None:
    if text is None:
        return None
    start, _, end = text.partition("-")
    return time.fromisoformat(start), time.fromisoformat(end)
