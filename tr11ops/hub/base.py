"""What is said to the hub and what comes back (repositories, files, changes, retries, the three
errors), the addresses that people type, and whose token it is.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import urlsplit

from msgspec.structs import replace

from tr11ops.base.errors import PrivateFileError
from tr11ops.base.private_file import private_text
from tr11ops.base.retry import RetryPolicy
from tr11ops.hub.masking import Mask
from trainer.contract.record import Record

# Who the operation is at the hub: a bot account whose token all members of the group use.
#
# The token comes from `hub.credentials_file`, else from $HF_TOKEN, else from what `hf auth login`
# stored. It is in no text, repr, log or argument; only `Secret.reveal` gives it out, to the edge that
# sends it in a header.

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

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no line may show."""
        if self.token is None:
            return ()
        return (self.token.reveal(),)


def find_credentials(path: Path | None, environment: Mapping[str, str]) -> Credentials:
    """The token of the file, else of $HF_TOKEN, else of the stored login; none of them is no error.

    Raises PrivateFileError for a file that cannot be used: a named file that is wrong is never
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

    Raises PrivateFileError.
    """
    content = private_text(path, group=True)
    try:
        value = json.loads(content)
    except ValueError:
        raise PrivateFileError(f'{path}: is not JSON; write {{"{TOKEN_KEY}": "hf_..."}}') from None
    if not isinstance(value, dict) or not isinstance(value.get(TOKEN_KEY), str):
        raise PrivateFileError(f'{path}: holds no token; write {{"{TOKEN_KEY}": "hf_..."}}')
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
        raise PrivateFileError(
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
        raise PrivateFileError(
            f"{source}: what it holds is not a token; make one at the hub, in Settings, Access Tokens"
        )
    return Secret(text)


# Where something lies on a hub, as people type it: OWNER/NAME, OWNER/NAME/PATH,
# datasets/OWNER/NAME/PATH.

PUBLIC_ENDPOINT = "https://huggingface.co"
_ENDPOINT = re.compile(r"https?://[^\s@/?#]+(?:/[^\s@?#]*)?")


class HubRepo(Record):
    """A repository of the hub at `endpoint`, and a file in it ("" for none). `kind` is model or
    dataset.
    """

    endpoint: str
    kind: str
    name: str
    path: str = ""

    @property
    def facts(self) -> str:
        """The address that tells what the repository holds."""
        return f"{self.endpoint}/api/{self.kind}s/{self.name}"

    def file(self, path: str, revision: str = "main") -> str:
        """The address of a file's content."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(
            self.name, path, repo_type=self.kind, revision=revision, endpoint=self.endpoint
        )


def host_of(address: str) -> str:
    """The machine that an address names; never a password that stands before it."""
    return urlsplit(address).hostname or "the hub"


def endpoint_of(
    endpoint: str | None, environment: Mapping[str, str], named: str = "hub.endpoint"
) -> str:
    """The hub's address: the one that is given, else $HF_ENDPOINT, else the public hub.

    Raises ValueError, which names where it was given (`named`) and does not repeat it: it may hold
    a password.
    """
    address = (endpoint or environment.get("HF_ENDPOINT") or PUBLIC_ENDPOINT).rstrip("/")
    if not _ENDPOINT.fullmatch(address):
        source = named if endpoint else "$HF_ENDPOINT"
        raise ValueError(
            f"{source} must be a hub's address, https://HOST, without a user or a password in it"
        )
    return address


def repo_of(text: str, endpoint: str | None) -> HubRepo:
    """What a person typed. Raises ValueError with the rule, and never repeats an address that may
    hold a password.

    `endpoint` is the hub's address; None: $HF_ENDPOINT, or the public hub.
    """
    from huggingface_hub.errors import HFValidationError

    words = text.strip("/").split("/")
    kind = {"datasets": "dataset", "models": "model"}.get(words[0])
    if kind:
        words = words[1:]
    if "://" in text or "@" in text:
        raise ValueError("give OWNER/NAME, not an address; --endpoint URL names another hub")
    if len(words) < 2 or not all(words):
        raise ValueError("give OWNER/NAME, or OWNER/NAME/PATH of another log")
    repo = HubRepo(
        endpoint_of(endpoint, os.environ, "--endpoint"),
        kind or "model",
        "/".join(words[:2]),
        "/".join(words[2:]),
    )
    try:
        repo.file("any")  # the hub's own rules of names
    except HFValidationError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return repo


FILE_NAME = "status.json"  # at the root of the repository


DEFAULT_BRANCH = "main"
LONG_TRY_SECONDS = 300.0

Progress = Callable[[str, int], None]  # path, bytes of this file that have been read to be sent


class Repository(Record):
    """One branch of one repository."""

    name: str  # OWNER/NAME
    kind: Literal["model", "dataset"] = "model"
    branch: str = DEFAULT_BRANCH


class HubFile(Record):
    """One file of a commit: `oid` is git's name of the blob, `sha256` the digest of the content of
    a large file.
    """

    bytes: int
    oid: str
    sha256: str | None = None


class Add(Record):
    """A file gets this content: bytes, or the first `size` bytes of a local file (None: all it has
    now).

    With `sha256`, the digest of exactly these bytes, the file is not read just to find it. `masks`
    lie over what is read.
    """

    path: str
    content: bytes | Path
    size: int | None = None
    sha256: str | None = None
    masks: tuple[Mask, ...] = ()


class HubCopy(Record):
    """A file gets the content that another one has in the parent commit."""

    path: str
    source: str


class Delete(Record):
    """A file goes."""

    path: str


Operation: TypeAlias = Add | HubCopy | Delete


def hub_retries(
    seconds: float = 600.0,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = random.random,
    say: Callable[[str], object] | None = None,
) -> RetryPolicy:
    """How long a call goes on without getting on. A long upload that broke off got on.

    A wait that the hub asks for and that is longer than that is not begun: the caller gets
    HubUnavailable with it.
    """
    made = RetryPolicy(
        seconds=seconds,
        jitter=(0.5, 1.5),
        longest_asked_seconds=seconds,
        refuses_longer=True,
        long_try_seconds=LONG_TRY_SECONDS,
        sleep=sleep,
        clock=clock,
        chance=chance,
    )
    if say is None:
        return made
    return replace(made, say=say)
