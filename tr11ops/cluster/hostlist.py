"""Slurm's host lists: `jean-zay-iam[01-26,28-49],x1` to names and back."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tr11ops.base.errors import HostlistError

MAXIMUM_NAMES = 65_536  # Slurm's own bound for one range; a longer list is a mistake, not a cluster

_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})", re.DOTALL)
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand(text: str) -> tuple[str, ...]:
    """The names of a host list, in its order, repeated names kept. An empty text has none.

    Raises HostlistError for unbalanced brackets, bad ranges, or more than MAXIMUM_NAMES names.
    """
    names: list[str] = []
    try:
        for part in _split(text) if text.strip() else ():
            names.extend(_expand_part(part))
            if len(names) > MAXIMUM_NAMES:
                raise HostlistError(f"more than {MAXIMUM_NAMES} names")
    except HostlistError as error:
        if len(text) <= 60:
            shown = text
        else:
            shown = text[:57] + "..."
        raise HostlistError(f"host list {shown!r}: {error}") from None
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """The shortest usual host list of these names: sorted, each name once, ranges over the last
    number of a name.
    """
    plain: set[str] = set()
    numbered: dict[str, set[str]] = {}
    for name in names:
        if not name or re.search(r"[\s,\[\]]", name):
            raise HostlistError(
                f"{name!r} is no host name: it is empty or has blanks, commas or brackets"
            )
        match = _LAST_NUMBER.fullmatch(name)
        if match:
            numbered.setdefault(match[1], set()).add(match[2])
        else:
            plain.add(name)
    texts = [(name, name) for name in plain]
    for prefix, digits in numbered.items():
        ranges = _ranges(digits)
        single = len(ranges) == 1 and "-" not in ranges[0]
        texts.append((prefix, prefix + ranges[0] if single else f"{prefix}[{','.join(ranges)}]"))
    return ",".join(text for _, text in sorted(texts))


def nodes_text(names: Iterable[str]) -> str:
    """Node names as people write them, tw[01-04,07]; one after another where that cannot be done."""
    found = set(names)
    try:
        return compress(found)
    except HostlistError:
        return ",".join(sorted(found))


def _ranges(digits: set[str]) -> list[str]:
    """Ranges such as "01-26": a range's width is that of its first number."""
    remaining = set(digits)
    ranges = []
    for first in sorted(digits, key=lambda text: (int(text), len(text))):
        if first not in remaining:
            continue
        last = first
        remaining.discard(first)
        while (following := str(int(last) + 1).zfill(len(first))) in remaining:
            remaining.discard(following)
            last = following
        ranges.append(first if last == first else f"{first}-{last}")
    return ranges


def _split(text: str) -> list[str]:
    """Parts between the commas that stand outside brackets."""
    parts = []
    part = ""
    inside = False
    for character in text.strip():
        if character == "," and not inside:
            parts.append(part.strip())
            part = ""
            continue
        if character in "[]":
            if (character == "[") == inside:
                raise HostlistError("brackets do not match")
            inside = not inside
        part += character
    if inside:
        raise HostlistError("a bracket is not closed")
    parts.append(part.strip())
    if "" in parts:
        raise HostlistError("a name between two commas is missing")
    return parts


def _expand_part(part: str) -> list[str]:
    """All names of one part; several brackets multiply, the last varying fastest."""
    names = [""]
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if index % 2 == 0:
            if re.search(r"\s", piece):
                raise HostlistError("a name has a blank in it")
            choices = [piece]
        else:
            choices = _expand_ranges(piece)
        if len(names) * len(choices) > MAXIMUM_NAMES:
            raise HostlistError(f"more than {MAXIMUM_NAMES} names")
        names = [name + choice for name in names for choice in choices]
    return names


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for entry in ranges.split(","):
        match = _RANGE.fullmatch(entry.strip())
        if match is None:
            raise HostlistError(f"{entry!r} is neither a number nor a range like 01-26")
        first = match[1]
        last = match[2] or match[1]
        count = int(last) - int(first) + 1
        if count < 1:
            raise HostlistError(f"the range {entry!r} runs backwards")
        if len(numbers) + count > MAXIMUM_NAMES:
            raise HostlistError(f"more than {MAXIMUM_NAMES} names")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
