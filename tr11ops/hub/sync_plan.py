"""What a synchronisation sends, and what it leaves alone. Pure: what was seen here and there goes
in, a plan comes out.

Nothing at the hub is ever lost: a file that vanished here stays there; one that became shorter here
stays there as it is; one whose beginning is another now is kept there under another name before the
new one takes its place.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from posixpath import splitext
from typing import Any, Literal, TypeAlias, get_args

from tr11ops.hub.base import HubFile
from tr11ops.hub.masking import Mask
from trainer.contract.record import Record

QUIET_SECONDS = 900.0  # without a write: then a file is sent as it is, its unfinished end too
MOST_FILES = 500  # of one commit
MOST_BYTES = 20 << 30  # of one commit, unless one file alone has more
LONGEST_PATH_BYTES = 1000
LINE_SUFFIXES = (".txt", ".log", ".out", ".err", ".jsonl", ".csv", ".tsv")
# of the published status: what makes it worth a commit of its own; ages and forecasts change with
# every look
MATERIAL = (
    "run",
    "verdict",
    "exit_code",
    "may_sleep",
    "sleep_needs",
    "iteration",
    "attempts",
    "nodes",
    "findings",
    "unknown",
)
OVER = frozenset({"stopped", "finished"})  # verdicts after which nothing is expected
# intervals after which an unchanged status is published again: each second round, however late it
# is
RENEWED = 1.5

Form: TypeAlias = Literal["lines", "events", "whole"]
Reason: TypeAlias = Literal["new", "grown", "changed", "masked"]


class Stamp(Record):
    """By what a file is told to be the one that was looked at before: bytes, time of change in ns,
    inode.
    """

    bytes: int
    changed_ns: int
    inode: int


class LocalFile(Record):
    """One file to be mirrored; `path` is relative to the mirrored folder, with slashes."""

    path: str
    stamp: Stamp

    @property
    def bytes(self) -> int:
        return self.stamp.bytes

    @property
    def form(self) -> Form:
        name = self.path.rpartition("/")[2]
        if "tfevents" in name:
            return "events"
        if name.lower().endswith(LINE_SUFFIXES):
            return "lines"
        return "whole"

    def is_quiet(self, now: float) -> bool:
        """Whether no one has written for a while; `now` in seconds since the epoch."""
        return now - self.stamp.changed_ns / 1e9 >= QUIET_SECONDS


class MeasuredFile(Record):
    """A file after it was read: the first `end` bytes are whole and have, with `masks` over them,
    this digest.

    `continues` tells whether it begins with all that the hub has of it; None where the hub has
    nothing. `is_bare`: what the hub has of it is not masked as it is to be.
    """

    file: LocalFile
    end: int
    sha256: str
    continues: bool | None
    masks: tuple[Mask, ...] = ()
    is_bare: bool = False


class Send(Record):
    """The first `bytes` bytes of a file go to the hub. `superseded` is the name that the hub's old
    content gets.
    """

    file: LocalFile
    bytes: int
    sha256: str
    reason: Reason
    superseded: str = ""
    masks: tuple[Mask, ...] = ()

    @property
    def path(self) -> str:
        return self.file.path


class Note(Record):
    """A file that is left alone, and why."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


# ----------------------------------------------------------------------------- which files
def is_wanted(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a pattern (`*` crosses slashes). Hidden files and folders, as .git,
    are never wanted.
    """
    if any(part.startswith(".") for part in path.split("/")):
        return False
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def objection(path: str, mode: int, published: Collection[str] = ()) -> str:
    """Why a wanted path is not mirrored, "" if nothing is wrong. `mode` is what lies there, a link
    followed.

    `published` are the files that tr11 itself puts at the root of the repository.
    """
    if (
        not path.isprintable()
        or "\\" in path
        or any(part != part.strip() for part in path.split("/"))
    ):
        return "its name has characters that a repository cannot hold"
    if len(path.encode("utf-8", "surrogateescape")) > LONGEST_PATH_BYTES:
        return "its name is too long"
    if stat.S_ISDIR(mode):
        return "is a folder"
    if not stat.S_ISREG(mode):
        return "is not a file"
    if path in published:
        return "a file of this name is written by tr11"
    return ""


# ----------------------------------------------------------------------------- what happens to one
# file
def judge(
    measured: MeasuredFile, remote: HubFile | None, taken: Collection[str]
) -> Send | Note | None:
    """What to do with one file: send it, leave it alone and say why, or None where there is nothing
    to do.

    `taken` are the paths that the hub has.
    """
    file, end = measured.file, measured.end

    def send(reason: Reason, superseded: str = "") -> Send:
        return Send(file, end, measured.sha256, reason, superseded, measured.masks)

    if remote is None:
        if end:
            return send("new")
        return None
    # written again each time it changes: the repository's history keeps the old ones
    if file.form == "whole" and end:
        is_there = end == remote.bytes and measured.continues and not measured.is_bare
        if is_there:
            return None
        return send("changed")
    if measured.continues:
        if file.bytes < remote.bytes:
            return Note(
                file.path,
                f"has {file.bytes} bytes here and {remote.bytes} at the hub, which keeps them",
            )
        reason: Reason = "grown"
        if measured.is_bare:
            reason = "masked"
        is_news = end > remote.bytes or (measured.is_bare and end == remote.bytes)
        if is_news:
            return send(reason)
        return None
    if not end:
        return Note(
            file.path,
            "is another file now, with nothing whole in it yet; the hub keeps the old one",
        )
    return send("changed", superseded_name(file.path, taken))


def superseded_name(path: str, taken: Collection[str]) -> str:
    """Where the hub's content of a path goes when another file takes its place; a name that is
    still free.
    """
    if "tfevents" not in path:
        stem, suffix = splitext(path)
    else:
        stem, suffix = (path, "")
    number = 1
    while f"{stem}-superseded-{number}{suffix}" in taken:
        number += 1
    return f"{stem}-superseded-{number}{suffix}"


# ----------------------------------------------------------------------------- commits
def batches(sends: Sequence[Send]) -> Iterator[tuple[Send, ...]]:
    """The files in as few commits as their limits allow, normally one; small ones first."""
    batch: list[Send] = []
    total = 0
    for send in sorted(sends, key=lambda send: (send.bytes, send.path)):
        if batch and (len(batch) >= MOST_FILES or total + send.bytes > MOST_BYTES):
            yield tuple(batch)
            batch, total = [], 0
        batch.append(send)
        total += send.bytes
    if batch:
        yield tuple(batch)


def commit_message(sends: Sequence[Send]) -> str:
    """One line for the repository's history."""
    if len(sends) == 1:
        return f"{sends[0].path}: {sends[0].reason}"
    counts = ((reason, sum(send.reason == reason for send in sends)) for reason in get_args(Reason))
    return f"{len(sends)} files: " + ", ".join(
        f"{count} {reason}" for reason, count in counts if count
    )


def material(status: bytes) -> str:
    """The part of a published status whose change is worth a commit when no log has changed; "" for
    garbage.
    """
    value = _object(status)
    if not value:
        return ""
    return json.dumps({key: value.get(key) for key in MATERIAL}, sort_keys=True)


def is_worth_a_commit(status: bytes, published: str, age: float) -> bool:
    """Whether a status is sent though no log has changed. `published` is the material part of the
    last, `age` its own.

    Of a run that is not over, readers take silence for a failure: it says now and then that nothing
    is new.
    """
    if material(status) != published:
        return True
    value = _object(status)
    interval = value.get("interval_seconds")
    return (
        value.get("verdict") not in OVER
        and isinstance(interval, int | float)
        and age >= RENEWED * interval
    )


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}
