"""What is said to the hub and what comes back: repositories, files, changes, retries, and the three
errors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tr11ops.base.retry import RetryPolicy
from tr11ops.hub.masking import Mask
from trainer.contract.record import Record

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
