"""Who may do what from a browser: sessions, forms that only this page can send, and rates."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import deque
from collections.abc import Iterable

from trainer.contract.record import Record

SESSION_SECONDS = 12 * 3600.0
PREVIEW_SECONDS = 300.0
MOST_KEPT = 4096  # addresses whose rate is known


class WebSession(Record):
    """A person who has shown a token, until a moment."""

    name: str
    until: float


class CookieSigner:
    """Signs what a browser keeps; a restart of the server ends every session."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, *parts: str) -> str:
        """A signature over some texts."""
        joined = b"\0".join(part.encode("utf-8", "surrogateescape") for part in parts)
        return hmac.new(self._secret, joined, hashlib.sha256).hexdigest()

    def session(self, name: str) -> str:
        """A cookie for a person."""
        body = f"{name}|{int(time.time() + SESSION_SECONDS)}|{secrets.token_hex(8)}"
        return f"{body}|{self.sign('session', body)}"

    def opened(self, cookie: str) -> WebSession | None:
        """Whose cookie it is; None for one that is forged or over."""
        body, _, signature = cookie.rpartition("|")
        if not hmac.compare_digest(_plain(signature), self.sign("session", body)):
            return None
        name, until, _ = body.split("|")
        if float(until) < time.time():
            return None
        return WebSession(name, float(until))

    def form(self, cookie: str) -> str:
        """What a form of this session must carry."""
        return self.sign("form", cookie)

    def is_form_of(self, cookie: str, value: str) -> bool:
        return hmac.compare_digest(_plain(value), self.form(cookie))

    def plan(self, cookie: str, *parts: str) -> str:
        """What confirms a change that was previewed, and only that one, for some minutes."""
        until = str(int(time.time() + PREVIEW_SECONDS))
        return f"{until}|{self.sign('plan', cookie, until, *parts)}"

    def is_plan(self, value: str, cookie: str, *parts: str) -> bool:
        """Whether exactly this was previewed in this session a short while ago."""
        until, _, signature = value.partition("|")
        if not hmac.compare_digest(_plain(signature), self.sign("plan", cookie, until, *parts)):
            return False
        return float(until) >= time.time()


def _plain(text: str) -> str:
    """A text that can be compared: what is no ASCII is no signature."""
    return text if text.isascii() else ""


class RateLimit:
    """So many times in a minute, by key."""

    def __init__(self, most: int, seconds: float = 60.0) -> None:
        self._most = most
        self._seconds = seconds
        self._seen: dict[str, deque[float]] = {}

    def allows(self, key: str) -> bool:
        """Whether it may be done once more now; it counts as done."""
        now = time.monotonic()
        times = self._seen.setdefault(key, deque(maxlen=self._most))
        if len(self._seen) > MOST_KEPT:
            del self._seen[next(iter(self._seen))]
        if len(times) == self._most and now - times[0] < self._seconds:
            return False
        times.append(now)
        return True


def is_known_host(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header names this server: an address, localhost, or one of its names. Another
    name is one that a foreign page had resolve to this machine.
    """
    before, _, port = header.rpartition(":")
    host = (before if port.isdigit() else header).strip("[]").lower()
    if host in {"localhost", *(name.lower() for name in names)}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
