"""The table that `quota` and `lfs quota` share: used, quota, limit, grace of the space, and the
same of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tr11ops.base.errors import SourceError
from tr11ops.filesystems.reading import KIBI, UsageReading
from trainer.contract.record import Record

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGTPE]?)\*?")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_INEXACT = re.compile(r"\[\d[\d.]*[kKMGTPE]?\]\*?")
_TOTALS = ("Total allocated", "uid ", "gid ", "pid ", "projid ")


class Row(Record):
    """One file system's line: eight words, with the file system before them."""

    filesystem: str
    words: tuple[str, ...]


def reading_of(text: str) -> UsageReading:
    """The fullest file system of the table.

    Its limit is the quota (after which the time of grace runs), else the hard limit; 0 means that
    there is none. Raises SourceError where no row can be understood, or where a server did not
    answer (figures in brackets).
    """
    found = [_reading(row) for row in _rows(text)]
    if not found:
        raise SourceError("no row of a file system with a quota was found")
    return max(found, key=_share)


def _rows(text: str) -> Iterator[Row]:
    filesystem = ""
    in_table = False
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Filesystem"]:
            in_table, filesystem = True, ""
        elif not words or line.startswith(("Disk quotas", *_TOTALS)):
            filesystem = ""
        elif in_table:
            if len(words) == 1:  # a name so long that its figures are on the next line
                filesystem = words[0]
                continue
            if filesystem:
                figures = tuple(words)
            else:
                figures = tuple(words[1:])
            if any(_INEXACT.fullmatch(word) for word in figures):
                raise SourceError("a server did not answer: the figures in [ ] are not complete")
            if 6 <= len(figures) <= 8 and _is_count(figures[0]):
                yield Row(filesystem or words[0], _eight(figures))
            filesystem = ""


def _eight(words: tuple[str, ...]) -> tuple[str, ...]:
    """Time of grace is left out by `quota` where none runs: put a dash in its place."""
    if len(words) == 8:
        return words
    if len(words) == 6:
        return (*words[:3], "-", *words[3:], "-")
    if words[0].endswith("*"):
        return (*words, "-")
    return (*words[:3], "-", *words[3:])


def _reading(row: Row) -> UsageReading:
    used, quota, limit, grace, files, file_quota, file_limit, file_grace = row.words
    notes = [
        f"{row.filesystem}: over its quota of {what}, {_grace_words(left)}"
        for what, count, left in (("bytes", used, grace), ("files", files, file_grace))
        if count.endswith("*")
    ]
    return UsageReading(
        bytes_used=_space(used),
        bytes_limit=_space(quota) or _space(limit) or None,
        inodes_used=_files(files),
        inodes_limit=_files(file_quota) or _files(file_limit) or None,
        notes=tuple(notes),
    )


def _grace_words(left: str) -> str:
    if left in {"none", "expired"}:
        return "no time of grace is left"
    return f"time of grace {left}"


def _is_count(word: str) -> bool:
    return _COUNT.fullmatch(word) is not None


def _space(word: str) -> float:
    """Bytes: a plain number counts blocks of 1 KiB, a unit is a power of 1024."""
    number, unit = _parts(word)
    return float(number * KIBI ** (_POWER[unit] if unit else 1))


def _files(word: str) -> float:
    number, unit = _parts(word)
    return float(number * 1000 ** _POWER[unit])


def _parts(word: str) -> tuple[float, str]:
    match = _COUNT.fullmatch(word)
    if match is None:
        raise SourceError(f"{word[:40]!r} is not a count")
    return float(match[1]), match[2]


def _share(reading: UsageReading) -> float:
    pairs = ((reading.bytes_used, reading.bytes_limit), (reading.inodes_used, reading.inodes_limit))
    return max((used / limit if used is not None and limit else 0.0) for used, limit in pairs)
