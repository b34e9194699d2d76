"""Who the operation is at the hub: a bot account whose token all members of the group use.

The token comes from `hub.credentials_file`, else from $HF_TOKEN, else from what `hf auth login`
stored. It is in no text, repr, log or argument; only `Secret.reveal` gives it out, to the edge that
sends it in a header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tr11ops.base.errors import CredentialsError, PrivateFileError
from tr11ops.base.private_file import private_text
from trainer.contract.record import Record

LONGEST_TOKEN = 4096
TOKEN_KEY = "auth_token"


class Secret:
    """A text that shows itself to no one by accident: not printed, not formatted, not pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one place that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "<secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


class Credentials(Record):
    """A token (None: the hub is read without one), where it came from in words, and whose it is if
    known.
    """

    token: Secret | None = None
    source: str = "no token"
    user: str = ""
    mail: str = ""


def find_credentials(path: Path | None, environment: Mapping[str, str]) -> Credentials:
    """The token of the file, else of $HF_TOKEN, else of the stored login; none of them is no error.

    Raises CredentialsError for a file that cannot be used: a named file that is wrong is never
    passed over.
    """
    if path is not None:
        return read_credentials(path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if text := environment.get(name, "").strip():
            return Credentials(_token(text, f"${name}"), f"${name}")
    return _stored(environment)


def read_credentials(path: Path) -> Credentials:
    """A JSON file with `auth_token`, and `username` and `email` of the bot. Group members may read
    it, others not.

    Raises CredentialsError.
    """
    try:
        content = private_text(path, group=True)
    except PrivateFileError as error:
        raise CredentialsError(str(error)) from None
    try:
        value = json.loads(content)
    except ValueError:
        raise CredentialsError(f'{path}: is not JSON; write {{"{TOKEN_KEY}": "hf_..."}}') from None
    if not isinstance(value, dict) or not isinstance(value.get(TOKEN_KEY), str):
        raise CredentialsError(f'{path}: holds no token; write {{"{TOKEN_KEY}": "hf_..."}}')
    user, mail = (
        value[key] if isinstance(value.get(key), str) else "" for key in ("username", "email")
    )
    return Credentials(_token(value[TOKEN_KEY].strip(), str(path)), str(path), user, mail)


def _stored(environment: Mapping[str, str]) -> Credentials:
    """What `hf auth login` left, looked for where the library looks; who owns the file is the
    library's matter.
    """
    home = Path(environment.get("HOME") or Path.home())
    cache = environment.get("XDG_CACHE_HOME") or str(home / ".cache")
    folder = environment.get("HF_HOME") or str(Path(cache) / "huggingface")
    path = Path(
        os.path.expandvars(environment.get("HF_TOKEN_PATH") or str(Path(folder) / "token"))
    ).expanduser()
    try:
        with path.open("rb") as stream:
            text = stream.read(LONGEST_TOKEN + 2).decode("ascii").strip()
    except FileNotFoundError:
        return Credentials()
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(
            f"{path}: cannot be read ({type(error).__name__}); type: hf auth login"
        ) from None
    if text:
        return Credentials(_token(text, str(path)), str(path))
    return Credentials()


def _token(text: str, source: str) -> Secret:
    # a control character or a blank would end up in a header, and the library would print the whole
    # of it
    if (
        not text
        or len(text) > LONGEST_TOKEN
        or not text.isascii()
        or not text.isprintable()
        or " " in text
    ):
        raise CredentialsError(
            f"{source}: what it holds is not a token; make one at the hub, in Settings, Access Tokens"
        )
    return Secret(text)
