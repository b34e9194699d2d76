"""Small drawings made of characters, in Unicode or in plain ASCII, and text that a terminal can be
trusted with.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from trainer.contract.units import printable

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


def wrapped(
    text: str, indent: str = "", further: str | None = None, width: int = WIDTH
) -> list[str]:
    """The text in lines that fit, broken between words; `further` is the indent of all but the
    first.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=(indent and f"{indent}  ") if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
