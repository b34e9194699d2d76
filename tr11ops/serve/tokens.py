"""Who may act from the page: a token for each person, of which only the digest is kept."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.errors import PrivateFileError, Refusal, WrongUsage
from tr11ops.base.private_file import private_text, settings_folder
from trainer.contract.documents import document, record_of
from trainer.contract.files import write_atomically
from trainer.contract.record import Record

SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Token(Record):
    """One person's token. `digest`: SHA-256 of its text, which has 256 random bits."""

    name: str
    digest: str
    made: float


class TokenFile(Record):
    """All tokens, as they lie on disk."""

    tokens: tuple[Token, ...] = ()
    schema: int = SCHEMA


def usual_place(environment: Mapping[str, str]) -> Path:
    """Where tokens are kept: a file of this user alone."""
    return settings_folder(environment) / "serve-tokens.json"


def read_tokens(place: Path) -> TokenFile:
    """The tokens; none where there is no file. Raises PrivateFileError where others may read it or
    it is no file of tokens.
    """
    if not place.exists():
        return TokenFile()
    text = private_text(place)
    try:
        return record_of(TokenFile, json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise PrivateFileError(f"{place}: is no file of tokens; move it away") from None


def make_token(place: Path, name: str) -> str:
    """A new token for a person, in place of the one before; its text, which is kept nowhere.

    Raises WrongUsage for a name that is none, PrivateFileError, OSError.
    """
    if not _NAME.fullmatch(name):
        raise WrongUsage(f"NAME {name!r}: use letters, digits, '.', '_', '@' and '-', at most 64")
    text = f"tr11-{secrets.token_urlsafe(32)}"
    _write(place, name, Token(name, _digest(text), time.time()))
    return text


def revoke_token(place: Path, name: str) -> None:
    """From now on that person's token opens nothing. Raises Refusal where there is none."""
    if all(token.name != name for token in read_tokens(place).tokens):
        raise Refusal(f"{name} has no token in {place}")
    _write(place, name, None)


def owner_of(place: Path, text: str) -> str | None:
    """Whose token it is; None for no one's. Raises PrivateFileError."""
    digest, found = _digest(text), None
    for token in read_tokens(place).tokens:  # all of them, so that time tells nothing
        if hmac.compare_digest(token.digest, digest):
            found = token.name
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _write(place: Path, name: str, token: Token | None) -> None:
    kept = [one for one in read_tokens(place).tokens if one.name != name]
    if token is not None:
        kept.append(token)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(place, json.dumps(document(TokenFile(tuple(kept)))), 0o600)
