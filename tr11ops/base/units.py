"""Numbers and times as people read and type them: durations, sizes, rates, counts, points of time;
small drawings of them, in Unicode or in plain ASCII, and text that a terminal can be trusted with.

What programs read has forms of its own: log lines (`watchdog/log_lines`), Slurm's time limits
(`runcard/slurm_syntax`), JSON (`iso_time`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo

from trainer.contract.record import LARGEST_NUMBER
from trainer.contract.units import printable, size

# Points and lengths of time as people type them, for every option that takes one.

_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(s|m|min|h|d|w)?", re.IGNORECASE)
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604_800}
_NAME = re.compile(r"[\d_/]|\.\w")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")


def span_seconds(text: str, unit: str | None) -> float:
    """Seconds of `90s`, `30m` or `30min`, `2h`, `1.5d`, `2w`; a bare number is in `unit` (None: it
    is refused).

    Raises ValueError.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None or not (match[2] or unit):
        raise ValueError("is no length of time; write 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[(match[2] or unit or "s").lower()]


def since(text: str, now: float) -> float:
    """Seconds since the epoch for `2h`, `3d ago`, `14:30`, `2022-05-01`, `2022-05-01 14:30`, ISO
    with a zone.

    Times without a zone are of this machine; a clock time is the last such moment before `now`.
    Raises ValueError.
    """
    words = text.strip()
    try:
        return now - span_seconds(words.removesuffix(" ago"), None)
    except ValueError:
        pass
    try:
        if clock := _CLOCK.fullmatch(words):
            today = datetime.fromtimestamp(now)
            then = today.replace(
                hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0
            )
            return (then if then <= today else then - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(words).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "is no time; write 12h, 90min, 3d, 14:30, 2022-05-01 or 2022-05-01T14:30"
        ) from None


__all__ = [
    "bytes_of",
    "counted",
    "duration",
    "finite",
    "first_few",
    "iso_time",
    "node_time",
    "number_in",
    "quantity",
    "rough_duration",
    "size",
    "timestamp",
]

DAY = "%Y-%m-%d"
MINUTE = f"{DAY} %H:%M"
ZONED = f"{MINUTE} %Z"
LEAST_NODE_HOURS = 2.0  # of all nodes together; less is shown in seconds
NEAR = "%m-%d %H:%M"  # where the year says nothing


def duration(seconds: float) -> str:
    """Two units at most: `42 s`, `3 min 20 s`, `5 h 07 min`, `12 d 3 h`."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def rough_duration(seconds: float) -> str:
    """The larger of its units alone, for narrow columns and what is known roughly: `42 s`, `3 min`,
    `5 h`, `12 d`.
    """
    return " ".join(duration(seconds).split()[:2])


def timestamp(time: float, zone: tzinfo | None, form: str = ZONED) -> str:
    """A point of time in `zone`, or in local time; "never" for one that no calendar holds."""
    try:
        return datetime.fromtimestamp(time, tz=zone).astimezone(zone).strftime(form).rstrip()
    except (ValueError, OverflowError, OSError):
        return "never"


def counted(count: float, noun: str, nouns: str = "") -> str:
    """A count with its noun, whose plural takes an s where none is given: `1 step`, `3.5 days`,
    `12,800 samples`.
    """
    if count == int(count):
        number = f"{int(count):,}"
    else:
        number = f"{count:g}"
    return f"{number} {noun if count == 1 else nouns or f'{noun}s'}"


def capitalized(text: str) -> str:
    """The text as a sentence begins; a node's or a file's name keeps the letters that one types."""
    first = text.partition(" ")[0]
    if _NAME.search(first):
        return text
    return text[:1].upper() + text[1:]


def first_few(words: Iterable[object], most: int = 4) -> str:
    """Words with commas between them, and how many were left out: `n1, n2 and 3 more`."""
    found = [str(word) for word in words]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def node_time(*hours: float) -> str:
    """Node-hours, node-seconds where these would be next to none: `12.5 node-hours`; two as `3 of
    950 node-seconds`.
    """
    if max(hours) < LEAST_NODE_HOURS:
        return " of ".join(f"{3600 * each:,.0f}" for each in hours) + " node-seconds"
    return " of ".join(f"{each:,.1f}" for each in hours) + " node-hours"


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP]?)(i?)B")


def bytes_of(text: str) -> int:
    """Bytes of a size as a run card writes it: `400 TiB` in powers of 1024, `1.5TB` in powers of
    1000, `512B`.

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text[:40]!r} is not a size, e.g. 400 TiB or 1.5TB")
    factor: int = (1024 if match[3] else 1000) ** " KMGTP".index(match[2] or " ")
    return round(float(match[1]) * factor)


def quantity(count: float) -> str:
    """A large count in three or four digits: `950`, `12.3 k`, `47.8 M`, `97.8 B`."""
    if count < 10_000:
        return f"{count:.0f}"
    for unit in ("k", "M", "B"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} T"


def finite(value: float | None) -> float | None:
    """The number where JSON can hold it; None for infinities, what is no number, and what is not
    known.
    """
    if value is not None and math.isfinite(value):
        return value
    return None


def number_in(value: object) -> float | None:
    """The number that a file holds; None for anything else (JSON as Python reads it knows NaN, and
    integers of any length).
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < LARGEST_NUMBER
    ):
        return None
    return float(value)


def iso_time(moment: float | None) -> str | None:
    """ISO 8601 in UTC, to the second; None for a time that is not known or that no calendar holds."""
    if moment is None:
        return None
    try:
        return datetime.fromtimestamp(moment, tz=UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def format_time_limit(seconds: int) -> str:
    """`seconds` as Slurm reads it, HH:MM:SS (hours may exceed 24)."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-~=+*#"
LARGEST = 1e100  # drawn alike beyond it, so that sums and differences stay finite


def bar(fraction: float, width: int, unicode: bool) -> str:
    """A progress bar of `width` characters. Full only when really done, empty only when nothing is
    done.
    """
    if unicode:
        full, empty = ("█", "░")
    else:
        full, empty = ("#", "-")
    inner = max(1, width if unicode else width - 2)
    share = min(1.0, max(0.0, fraction))
    count = int(share * inner)
    drawn = full * count + empty * (inner - count)
    if unicode:
        return drawn
    return f"[{drawn}]"


def sparkline(values: Sequence[float], width: int, unicode: bool) -> str:
    """The course of `values` in at most `width` characters, each the mean of its share; `x` where
    nothing is finite.
    """
    if not values or width < 1:
        return ""
    shares = means(values, min(width, len(values)))
    finite = [value for value in shares if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    span = high - low or 1.0  # a quotient of differences is at most 1, however small they are
    return "".join(
        "x" if value is None else blocks[round((value - low) / span * (len(blocks) - 1))]
        for value in shares
    )


def means(values: Sequence[float], count: int) -> list[float | None]:
    """The means of `count` consecutive shares of `values` (at least as many); None where nothing in
    one is finite.
    """
    shares: list[float | None] = []
    for index in range(count):
        share = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [min(LARGEST, max(-LARGEST, value)) for value in share if math.isfinite(value)]
        shares.append(math.fsum(finite) / len(finite) if finite else None)
    return shares


def escaped(text: str) -> str:
    """Text without characters that a terminal obeys or an encoding refuses: they are written out."""
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(text: str, unicode: bool) -> str:
    """Text on one line without characters that a terminal obeys; without any beyond ASCII where it
    shows none.
    """
    shown = printable(text, " ")
    if unicode:
        return shown
    return shown.encode("ascii", "backslashreplace").decode("ascii")


def shows_unicode(environment: Mapping[str, str], encoding: str | None) -> bool:
    """Whether the terminal can be trusted to show more than ASCII: what the locale says, not what
    Python made of it.

    Python turns the C locale into UTF-8 for itself (and sets LC_CTYPE=C.UTF-8), which says nothing
    about the terminal.
    """
    if "utf" not in (encoding or "").lower() or environment.get("TERM") == "dumb":
        return False
    character_type = environment.get("LC_CTYPE", "")
    coerced = character_type in {"C.UTF-8", "C.utf8", "UTF-8"}
    chosen = (
        environment.get("LC_ALL")
        or ("" if coerced else character_type)
        or environment.get("LANG")
        or ""
    )
    return "utf" in chosen.lower()


WIDTH = 78  # of a line of prose, in a mail and in a terminal
# a word of a command, with what it has in quotes
_TYPED_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"])+""")


def command_lines(command: str, width: int) -> list[str]:
    """A command in lines that can be copied as they are: broken between words alone, and never inside
    quotes, with a backslash behind each but the last. A longer word is whole.
    """
    line, *words = _TYPED_WORD.findall(command)
    lines = []
    for word in words:
        if len(f"{line} {word} \\") > width:
            lines.append(f"{line} \\")
            line = f"  {word}"
        else:
            line += f" {word}"
    return [*lines, line]


# a command in backquotes, or what a command has in quotes
_TYPED = re.compile(r"`[^`\n]+`|(?<=[ =])'[^'\n]*'")
_KEPT = "\ue000"  # in place of a space at which no line ends


def wrapped(
    text: str,
    indent: str = "",
    further: str | None = None,
    width: int = WIDTH,
    most: int | None = None,
) -> list[str]:
    """The text in lines that fit, `most` of them, broken between words, and never inside a command
    that it tells to type; `further` is the indent of all but the first.
    """
    lines = textwrap.wrap(
        _TYPED.sub(_kept, text),
        width,
        initial_indent=indent,
        subsequent_indent=(indent and f"{indent}  ") if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" ...",
    )
    return [line.replace(_KEPT, " ") for line in lines] or [""]


def _kept(typed: re.Match[str]) -> str:
    return typed[0].replace(" ", _KEPT)
