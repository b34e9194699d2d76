"""How full a file system is, by the command that knows: one part a command, and what it says as a
reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from tr11ops.base.errors import SourceError
from tr11ops.base.processes import ProbeOutput
from tr11ops.runcard.watching import FilesystemSection
from trainer.contract.record import Record
from trainer.contract.units import shortened

KIBI = 1024


class UsageReading(Record):
    """How full one file system is; None where the source does not say (see `disk_usage.Usage`).

    `report` is the source's own text, for sources whose figures are shares alone; `notes` are marks
    that people should see, e.g. a quota's time of grace.
    """

    bytes_used: float | None = None
    bytes_limit: float | None = None
    inodes_used: float | None = None
    inodes_limit: float | None = None
    bytes_free: float | None = None
    bytes_share: float | None = None
    inodes_share: float | None = None
    report: str = ""
    notes: tuple[str, ...] = ()


class UsageSource(Record):
    """One way to ask how full a file system is.

    `commands`: the command lines to run for a place, in order. `parse`: their outputs as a reading;
    raises SourceError. `is_slow`: it may take hours (it walks the tree), and gets the whole time
    that there is.
    """

    name: str
    commands: Callable[[FilesystemSection], tuple[tuple[str, ...], ...]]
    parse: Callable[[Sequence[ProbeOutput]], UsageReading]
    is_slow: bool = False


def required_path(filesystem: FilesystemSection, source: str) -> str:
    """The place's path. Raises SourceError when the card gives none."""
    if not filesystem.path:
        raise SourceError(
            f'source {source} needs a path: add path = "/..." to its [[filesystems]] table'
        )
    return filesystem.path


def answered(output: ProbeOutput) -> str:
    """The text of a command that must not fail. Raises SourceError when it failed or printed
    nothing.
    """
    if output.status != 0 or not output.text.strip():
        said = next(
            (line.strip() for line in reversed(output.error.splitlines()) if line.strip()), ""
        )
        raise SourceError(
            f"exit status {output.status}{f': {shortened(said, 200)}' if said else ', and nothing was printed'}"
        )
    return output.text


# ----------------------------------------------------------------------------- idrquota
_SHARE = re.compile(r" \((\d+(?:\.\d+)?)%\)")


def _idrquota_commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    return (("idrquota", *filesystem.arguments),)


def _idrquota_reading(outputs: Sequence[ProbeOutput]) -> UsageReading:
    """Exactly two figures like ` (85.3%)`; anything else is not understood, and raises SourceError."""
    text = answered(outputs[0])
    shares = [float(share) / 100 for share in _SHARE.findall(text)]
    if len(shares) != 2:
        raise SourceError(
            f"{len(shares)} figures like (12.3%) where two are expected, of the bytes and of the inodes"
        )
    return UsageReading(bytes_share=shares[0], inodes_share=shares[1], report=text.strip())


_IDRQUOTA = UsageSource("idrquota", _idrquota_commands, _idrquota_reading)


# ----------------------------------------------------------------------------- tables of quotas
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGTPE]?)\*?")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_INEXACT = re.compile(r"\[\d[\d.]*[kKMGTPE]?\]\*?")
_TOTALS = ("Total allocated", "uid ", "gid ", "pid ", "projid ")


def reading_of(text: str) -> UsageReading:
    """The fullest file system of the table.

    Its limit is the quota (after which the time of grace runs), else the hard limit; 0 means that
    there is none. Raises SourceError where no row can be understood, or where a server did not
    answer (figures in brackets).
    """
    found = [_reading(filesystem, words) for filesystem, words in _rows(text)]
    if not found:
        raise SourceError("no row of a file system with a quota was found")
    return max(found, key=_share)


def _rows(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each file system with its figures: eight words."""
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
            if 6 <= len(figures) <= 8 and _COUNT.fullmatch(figures[0]):
                yield filesystem or words[0], _eight(figures)
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


def _reading(filesystem: str, words: tuple[str, ...]) -> UsageReading:
    used, quota, limit, grace, files, file_quota, file_limit, file_grace = words
    notes = [
        f"{filesystem}: over its quota of {what}, {_grace_words(left)}"
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


# ----------------------------------------------------------------------------- lfs
def _lfs_commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    return (("lfs", "quota", *filesystem.arguments, required_path(filesystem, "lfs")),)


def _lfs_reading(outputs: Sequence[ProbeOutput]) -> UsageReading:
    return reading_of(answered(outputs[0]))


_LFS = UsageSource("lfs", _lfs_commands, _lfs_reading)


# ----------------------------------------------------------------------------- quota
def _quota_commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    """With a path, of the file system that is mounted there; else the fullest one counts."""
    where = ("-f", filesystem.path) if filesystem.path else ()
    return (("quota", "-w", *filesystem.arguments, *where),)


def _quota_reading(outputs: Sequence[ProbeOutput]) -> UsageReading:
    output = outputs[0]
    return reading_of(
        answered(
            replace(output, status=0) if output.status == 1 and output.text.strip() else output
        )
    )


_QUOTA = UsageSource("quota", _quota_commands, _quota_reading)


# ----------------------------------------------------------------------------- df
# Device and mount point may hold blanks, the figures between them not.
_DF_ROW = re.compile(
    r"^(?P<device>.+?)\s+(?P<total>\d+|-)\s+(?P<used>-?\d+|-)\s+(?P<free>-?\d+|-)\s+(\d+%|-)\s+/.*$"
)


def _df_commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    path = required_path(filesystem, "df")
    return ("df", "-P", "-k", *filesystem.arguments, "--", path), (
        "df",
        "-P",
        "-i",
        *filesystem.arguments,
        "--",
        path,
    )


def _df_reading(outputs: Sequence[ProbeOutput]) -> UsageReading:
    """Bytes from the first output, inodes from the second.

    The limit is used + available, as in df's own percentage: what is kept back for the superuser is
    no one's to fill.
    """
    used, free = _df_row(outputs[0])
    if used is None or free is None:
        raise SourceError("df does not count this file system's blocks")
    inodes, inodes_free = _df_row(outputs[1])
    # some know no such limit
    counted = inodes is not None and inodes_free is not None and inodes + inodes_free > 0
    return UsageReading(
        bytes_used=used * KIBI,
        bytes_limit=(used + max(0, free)) * KIBI,
        bytes_free=max(0, free) * KIBI,
        inodes_used=inodes if counted else None,
        inodes_limit=(inodes or 0) + max(0, inodes_free or 0) if counted else None,
    )


def _df_row(output: ProbeOutput) -> tuple[int | None, int | None]:
    """Used and available of the one row."""
    lines = answered(output).splitlines()
    rows = [match for match in map(_DF_ROW.match, lines[1:]) if match]
    if len(rows) != 1:
        raise SourceError(f"{len(rows)} rows where one is expected")
    used, free = rows[0]["used"], rows[0]["free"]
    return None if used == "-" else int(used), None if free == "-" else int(free)


_DF = UsageSource("df", _df_commands, _df_reading)


# ----------------------------------------------------------------------------- du
_DU_TOTAL = re.compile(r"(\d+)\s+\S.*")


def _du_commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    """One walk for the bytes; a second one for the inodes only where there is a limit to compare
    them with.
    """
    path = required_path(filesystem, "du")
    walks = [("du", "-bs", *filesystem.arguments, "--", path)]
    if filesystem.inodes_limit is not None:
        walks.append(("du", "-s", "--inodes", *filesystem.arguments, "--", path))
    return tuple(walks)


def _du_reading(outputs: Sequence[ProbeOutput]) -> UsageReading:
    """The totals. A non-zero exit status is no failure: on a shared tree some folder is always
    closed to us.
    """
    totals = [_du_total(output) for output in outputs]
    unread = any(output.status != 0 for output in outputs)
    return UsageReading(
        bytes_used=totals[0],
        inodes_used=totals[1] if len(totals) > 1 else None,
        notes=("du could not look into every folder: there is more than it says",)
        if unread
        else (),
    )


def _du_total(output: ProbeOutput) -> int:
    lines = output.text.splitlines()
    match = None
    if lines:
        match = _DU_TOTAL.fullmatch(lines[-1])
    if match is None:
        said = next(
            (line.strip() for line in reversed(output.error.splitlines()) if line.strip()),
            "no total",
        )
        raise SourceError(f"du: {shortened(said, 200)}")
    return int(match[1])


_DU = UsageSource("du", _du_commands, _du_reading, is_slow=True)


SOURCES: Mapping[str, UsageSource] = {
    source.name: source for source in (_IDRQUOTA, _LFS, _QUOTA, _DF, _DU)
}
