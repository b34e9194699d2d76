"""How long a destination asks to be left alone. Pure."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Protocol

LONGEST_WAIT_SECONDS = 24 * 3600.0
# of a RateLimit header: none left, seconds to wait
_RESET = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")


class Headers(Protocol):
    """An answer's headers, by names in any case."""

    def get(self, name: str, default: str, /) -> str:
        """The value of a header."""


def wait_of(headers: Headers, now: float) -> float:
    """Seconds that an answer asks to wait: RateLimit's reset or Retry-After (seconds or a date),
    the longer one.

    A date is compared with the destination's own clock (`Date`); `now`, in seconds since the epoch,
    counts where it has none. What cannot be understood asks for nothing.
    """
    limit = _RESET.search(headers.get("RateLimit", ""))
    asked = headers.get("Retry-After", "").strip()
    wait = 0.0
    if limit:
        wait = float(limit[1])
    if asked.isascii() and asked.isdecimal() and len(asked) < 10:
        return min(max(wait, float(asked)), LONGEST_WAIT_SECONDS)
    then = _moment(asked)
    if then is not None:
        there = _moment(headers.get("Date", ""))
        wait = max(wait, then - (now if there is None else there))
    return min(wait, LONGEST_WAIT_SECONDS)


def _moment(text: str) -> float | None:
    """A date of HTTP, which is always in UTC, in seconds since the epoch; None for anything else."""
    try:
        moment = parsedate_to_datetime(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
