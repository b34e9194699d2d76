"""Which findings are the same incident: the same detector, and the same `Finding.identity`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

LENGTH = 12  # hexadecimal digits: two of ten thousand incidents share one with a chance of 2e-7
UNNAMED = "(unnamed)"  # a name that could not be read is still not the incident without a name


def fingerprint(detector: str, identity: Iterable[str]) -> str:
    """Twelve hexadecimal digits that name the incident within its run."""
    text = f"{detector}\0" + "\0".join(word or UNNAMED for word in identity)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]
