"""What may be shown of a text that came from the hub, its library or the network: one line, and no secret in it."""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST_TEXT = 300
HIDDEN = "***"

_TOKEN = re.compile(r"\b(?:hf|api_org|hf_oauth|hf_jwt)_[A-Za-z0-9._-]{6,}")
_HEADER = re.compile(r"(?i)\b(authorization\s*:\s*(?:bearer\s+|basic\s+)?|bearer\s+|basic\s+)[^\s\"',;]+")
_FIELD = re.compile(r"(?i)\b([a-z-]*(?:signature|token|password|credential)=)[^\s&\"',;]+")
_USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]*@")
_QUERY = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s?\"'<>]*)\?[^\s\"'<>]*")  # signed addresses are credentials too
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\s]+")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets, tokens, authorization headers, users in URLs and queries of URLs."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    text = _QUERY.sub(r"\1?...", text)
    text = _FIELD.sub(rf"\1{HIDDEN}", _HEADER.sub(rf"\1{HIDDEN}", text))
    return _TOKEN.sub(HIDDEN, text)


def one_line(text: str, secrets: Iterable[str] = (), limit: int = LONGEST_TEXT) -> str:
    """The redacted text on one line, without control characters, cut at `limit` characters."""
    line = _CONTROL.sub(" ", redact(text, secrets)).strip()
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
