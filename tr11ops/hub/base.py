"""What is said to the hub and what comes back: repositories, files, changes, patience, and the three errors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tr11ops.hub.masking import Mask

DEFAULT_BRANCH = "main"

Progress = Callable[[str, int], None]  # path, bytes of this file that have been read to be sent


class HubError(Exception):
    """Something is wrong with the hub or between it and us. The text is one line."""


class HubAway(HubError):
    """No answer, or one that may be another at the next try; `wait` is what the hub asked for, in seconds."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class HubRefused(HubError):
    """Trying again will not help. `status` is the HTTP status, 0 if there was none."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class HubMissing(HubRefused):
    """There is no such repository, branch or file, or not for us."""


class HubConflict(HubRefused):
    """Somebody else has committed since the parent that was named."""


@dataclass(frozen=True)
class Repository:
    """One branch of one repository."""

    name: str  # OWNER/NAME
    kind: Literal["model", "dataset"] = "model"
    branch: str = DEFAULT_BRANCH


@dataclass(frozen=True)
class Entry:
    """One file of a commit: `oid` is git's name of the blob, `sha256` the digest of the content of a large file."""

    bytes: int
    oid: str
    sha256: str | None = None


@dataclass(frozen=True)
class Add:
    """A file gets this content: bytes, or the first `size` bytes of a local file (None: all it has now).

    With `sha256`, the digest of exactly these bytes, the file is not read just to find it. `masks` lie over what
    is read.
    """

    path: str
    content: bytes | Path
    size: int | None = None
    sha256: str | None = None
    masks: tuple[Mask, ...] = ()


@dataclass(frozen=True)
class Copy:
    """A file gets the content that another one has in the parent commit."""

    path: str
    source: str


@dataclass(frozen=True)
class Delete:
    """A file goes."""

    path: str


Operation: TypeAlias = Add | Copy | Delete


@dataclass(frozen=True)
class Patience:
    """How long a call goes on trying without getting on (`seconds`), and with which clock and chance.

    `say` hears of each new kind of failure. A wait that the hub asks for and that is longer than what is left is not
    begun: the caller gets HubAway with it.
    """

    seconds: float = 600.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    say: Callable[[str], None] | None = None
