"""What a synchronisation sends, what it leaves alone, and which files of the repository are kept as
LFS. Pure: what was seen here and there goes in, a plan comes out.

Nothing at the hub is ever lost: a file that vanished here stays there; one that became shorter here
stays there as it is; one whose beginning is another now is kept there under another name before the
new one takes its place.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from posixpath import basename, splitext
from typing import Literal, TypeAlias, get_args

from tr11ops.hub.base import HubFile
from tr11ops.hub.masking import Mask
from trainer.contract.record import JsonObject, Record

# Which files of a repository are kept as LFS, by its .gitattributes, and the rules that are
# missing. Pure.
#
# The hub refuses a file of more than 10 MB that is not LFS, and every log grows past that some day:
# so all mirrored files are LFS from their first byte. Rules that are there stay as they are; ours
# come after them.

FILE_NAME = ".gitattributes"
RULE = "filter=lfs diff=lfs merge=lfs -text"
_PLAIN_SUFFIX = re.compile(r"\.[A-Za-z0-9_]+")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./=+,@%-]")
_FILTER = re.compile(r"([-!]?)filter(?:=(\S*))?")


class AttributeRule(Record):
    """One line: the files it is about, and whether it makes them LFS; only lines that speak of the
    filter count.
    """

    pattern: str
    is_lfs: bool


def parse(text: str) -> tuple[AttributeRule, ...]:
    """The lines that say whether files are LFS, in order."""
    found = []
    for line in text.splitlines():
        pattern, words = _split(line.strip())
        for word in words:
            match = _FILTER.fullmatch(word)
            if pattern and match is not None:
                found.append(AttributeRule(pattern, not match[1] and match[2] == "lfs"))
    return tuple(found)


def is_lfs(path: str, rules: Iterable[AttributeRule]) -> bool:
    """Whether a path is kept as LFS: the last rule about it says so."""
    answer = False
    for rule in rules:
        if rule.is_lfs != answer and _matches(rule.pattern, path):
            answer = rule.is_lfs
    return answer


def with_rules(text: str, paths: Iterable[str]) -> str:
    """The file's text with the rules that it lacks for these paths at its end; the same text where
    it lacks none.
    """
    rules = parse(text)
    lacking = sorted({pattern_of(path) for path in paths if not is_lfs(path, rules)})
    if not lacking:
        return text
    if not text or text.endswith("\n"):
        separator = ""
    else:
        separator = "\n"
    return text + separator + "".join(f"{pattern} {RULE}\n" for pattern in lacking)


def pattern_of(path: str) -> str:
    """The rule that is written for a file: of all files like it where its name allows that, else of
    itself.
    """
    name = basename(path)
    if "tfevents" in name:
        return "*tfevents*"
    suffix = splitext(name)[1]
    if _PLAIN_SUFFIX.fullmatch(suffix):
        return f"*{suffix}"
    return "/" + "".join(
        character if _PLAIN_PATH.fullmatch(character) else "?" for character in path
    )


def _split(line: str) -> tuple[str, list[str]]:
    if line.startswith('"'):
        pattern, quote, rest = line[1:].partition('"')
        if quote:
            return (pattern, rest.split())
        return ("", [])
    words = line.split()
    if not words or words[0].startswith(("#", "[attr]")):
        return "", []
    return words[0], words[1:]


def _matches(pattern: str, path: str) -> bool:
    if "/" not in pattern:
        return _compiled(pattern).fullmatch(basename(path)) is not None
    return _compiled(pattern.removeprefix("/")).fullmatch(path) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Git's wildcards: * and ? stop at slashes, ** does not."""
    parts, position = [], 0
    while position < len(pattern):
        for text, expression in (("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"), ("?", "[^/]")):
            if pattern.startswith(text, position):
                parts.append(expression)
                position += len(text)
                break
        else:
            if pattern[position] == "[":
                end = pattern.find("]", position + 2)
            else:
                end = -1
            if pattern.startswith("[[:space:]]", position):
                parts.append(r"\s")
                position += len("[[:space:]]")
            elif end > 0:
                inner = pattern[position + 1 : end].replace("\\", r"\\")
                parts.append(f"[^{inner[1:]}]" if inner.startswith(("!", "^")) else f"[{inner}]")
                position = end + 1
            else:
                position += pattern[position] == "\\" and position + 1 < len(pattern)
                parts.append(re.escape(pattern[position]))
                position += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


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
        return Send(
            file,
            end,
            sha256=measured.sha256,
            reason=reason,
            superseded=superseded,
            masks=measured.masks,
        )

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


def _object(text: bytes) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}
