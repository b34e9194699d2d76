"""What is said to the hub and what comes back (repositories, files, changes, retries, the three
errors), and the addresses that people type.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec.structs import replace

from tr11ops.base.retry import RetryPolicy
from tr11ops.hub.masking import Mask
from trainer.contract.record import Record

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


def repo_of(text: str, endpoint: str | None = None) -> HubRepo:
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
