"""Who is told when: the card's [alerts] section as pure answers about a moment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

from tr11ops.alerts.state import OnCall
from tr11ops.base.units import timestamp
from tr11ops.runcard.card import RunCard
from trainer.contract.record import Record

# a fault that comes back sooner than this after the all-clear is the same incident
FLAP_SECONDS = 3600.0
# how often at most people are told at once that one critical fault is back after its all-clear
BACK_SECONDS = 600.0
ACKNOWLEDGED_SECONDS = 86_400.0  # an acknowledgement holds so long
SHIFT_SECONDS = 86_400.0  # and a shift that was taken, where the rota does not change before
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

    def on_call(self, shift: OnCall | None, now: float) -> OnCall:
        """Who is on call: the one answer to that question. `shift` is the one that was taken last."""
        if shift is not None and shift.holds(now):
            return shift
        if not self.rota:
            return OnCall(self.recipients)
        return OnCall((self.rota[self.turn(now)],), self.turn_ends(now))

    def called(self, shift: OnCall | None, now: float) -> tuple[str, ...]:
        """The mail addresses of who is on call; none where the card mails no one, and names may be on
        record.
        """
        if not self.everyone:
            return ()
        return self.on_call(shift, now).who

    def readers(self, shift: OnCall | None, now: float) -> tuple[str, ...]:
        """Who gets the digest: the recipients, and who is on call."""
        return unique((*self.recipients, *self.called(shift, now)))

    def taken_by(self, address: str, now: float, seconds: float | None = None) -> OnCall:
        """The shift that someone takes now: for so many seconds; None: until the rota changes, a day
        at most.
        """
        end = now + (SHIFT_SECONDS if seconds is None else seconds)
        if seconds is None and self.rota:
            end = min(self.turn_ends(now), end)
        return OnCall((address,), end, taken=now)

    def turns(
        self, shift: OnCall | None, now: float, count: int
    ) -> Iterator[tuple[OnCall, float, float]]:
        """Who is on call now and who follows, at most so many, each with begin and end."""
        for _ in range(count):
            one = self.on_call(shift, now)
            if one.until is None:
                return
            yield one, now, one.until
            now = one.until

    def span(self, on_call: OnCall) -> str:
        """Who is on call, and until when."""
        if on_call.until is None:
            return on_call.names
        return f"{on_call.names} until {timestamp(on_call.until, self.zone)}"

    def address_of(self, name: str) -> str:
        """The mail address that a person's name stands for: an address as it is, or the only one of
        the card's that begins with `name@`; "" for none. Where the card mails no one, the name.
        """
        if "@" in name or not self.everyone:
            return name
        found = [address for address in self.everyone if address.startswith(f"{name}@")]
        if len(found) == 1:
            return found[0]
        return ""

    def escalation(
        self, step: int, told: Collection[str], shift: OnCall | None, now: float
    ) -> tuple[str, ...]:
        """Who is asked at a step (1, 2, ...) of the escalation: who took the shift, then the next of
        the rota, not told yet; at last all.
        """
        called, turn = self.called(shift, now), self.turn(now)
        asked = (*called, *self.rota[turn:], *self.rota[:turn])
        following = next((address for address in asked if address not in told), None)
        if following is None or step >= len(self.escalate_minutes):
            return unique((*self.everyone, *called))
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
