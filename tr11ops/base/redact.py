"""What may be shown of a text that came from elsewhere, a library or the network: one line, and no
secret in it.

What a secret looks like is in `trainer.contract.secret_shapes`. A message has no use for more than
that, so here everything goes that may be one: what follows `key=`, a token of any length, the query
of an address. And an error in words that are the same each time it comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trainer.contract.secret_shapes import without_secrets
from trainer.contract.units import printable, shortened


def signature(text: str) -> str:
    """An error without what changes from one time to the next: numbers, addresses, paths, node
    names' numbers.
    """
    plain = re.sub(r"0x[0-9a-fA-F]+|\S*/\S+", "~", text)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "#", plain)).strip()[:160].lower()


LONGEST_TEXT = 300
HIDDEN = "***"

# Patterns as text: `re` compiles each at its first use, and most commands have nothing to hide. No
# repeat but the last has no bound, as in the shapes, so that a long text that a server sends takes
# no longer than its length says.
_TOKEN = r"\b(?:(?:hf|api_org|hf_oauth|hf_jwt)_[A-Za-z0-9._-]{6,}|ya29\.\S+)"  # the hub's, Google's
_KEY = r"(?s)-----BEGIN.*"
_HEADER = r"(?i)\b(authorization\s{0,9}:\s{0,9}(?:bearer\s{1,9}|basic\s{1,9})?|bearer\s{1,9}|basic\s{1,9})[^\s\"',;]+"
_FIELD = (
    r"(?i)\b((?:[a-z-]{0,60}(?:signature|token|passw(?:or)?d|credential|secret)|[a-z_]{1,60}_token|api_?key)"
    r"(?:\s{0,9}=\s{0,9}|\s{0,9}:\s{1,9})|(?:upload_id|key)(?:=|:\s{1,9}))"
    r"[^\s&\"',;]+"
)
_USER_INFO = r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/@]{0,1000}@"
# signed addresses are credentials too
_QUERY = r"(?i)\b([a-z][a-z0-9+.-]{0,30}://[^\s?\"'<>]{0,2000})\?[^\s\"'<>]*"


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets, tokens, keys, authorization headers, users in URLs and
    queries of URLs.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    # first: it reads names and quotes, which the rest takes away
    text = without_secrets(text, HIDDEN)
    text = re.sub(_USER_INFO, rf"\1{HIDDEN}@", text)
    text = re.sub(_QUERY, r"\1?...", text)
    text = re.sub(_FIELD, rf"\1{HIDDEN}", re.sub(_HEADER, rf"\1{HIDDEN}", text))
    return re.sub(_KEY, HIDDEN, re.sub(_TOKEN, HIDDEN, text))


def one_line(text: str, secrets: Iterable[str] = (), limit: int = LONGEST_TEXT) -> str:
    """The redacted text on one line, without what no terminal prints, `shortened` to `limit`
    characters.
    """
    return shortened(" ".join(printable(redact(text, secrets), " ").split()), limit)
