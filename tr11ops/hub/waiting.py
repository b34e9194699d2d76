"""How long the far side asks to be left alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime

LONGEST_WAIT_SECONDS = 24 * 3600.0
_RESET = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")  # of a RateLimit header: none left, seconds to wait


def wait_of(headers: Mapping[str, str], now: float) -> float:
    """Seconds that an answer asks to wait: RateLimit's reset or Retry-After (seconds or a date), the longer one."""
    limit = _RESET.search(headers.get("RateLimit", ""))
    asked = headers.get("Retry-After", "").strip()
    wait = float(limit[1]) if limit else 0.0
    if asked.isascii() and asked.isdecimal() and len(asked) < 10:
        wait = max(wait, float(asked))
    elif asked:
        with suppress(ValueError, TypeError, OverflowError):  # not a date either: as if nothing was asked for
            wait = max(wait, parsedate_to_datetime(asked).timestamp() - now)
    return min(wait, LONGEST_WAIT_SECONDS)
