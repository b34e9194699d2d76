"""Named, weighted groups of data sets: `NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX,
...`.

One group is trained on; any number of others are validated or tested on, each by itself. A file of
groups holds one line, each group in double quotes, with one space between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainer.config.data_rules import NAME
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.errors import explain_os_errors


class Member(Record):
    """One data set of a mixture: relative weight, prefix of its pair, and the part of its
    sequences, as fractions.
    """

    weight: float
    prefix: str
    start: float = 0.0
    end: float = 1.0

    def documents(self, count: int) -> range:
        """The sequences of a data set of `count` that belong to this part (rounded half to even)."""
        return range(round(self.start * count), round(self.end * count))


class DataGroup(Record):
    """A named mixture, e.g. `train`, or one of several validation sets."""

    name: str
    members: tuple[Member, ...]

    def __str__(self) -> str:
        """The group as `parse_group` reads it."""
        parts = ", ".join(
            f"{member.weight!r} {member.start!r}:{member.end!r} {member.prefix}"
            for member in self.members
        )
        return f"{self.name}: {parts}"


def parse_group(text: str) -> DataGroup:
    """A group from its text. Raises DataError that names the group, the number of the part, and the
    field at fault.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name:
        raise DataError(
            f"data group {text[:60]!r} has no name; write NAME: WEIGHT START:END PREFIX, ..."
        )
    if not NAME.fullmatch(name):
        raise DataError(
            f"data group {name[:60]!r}: the name (all before the first colon) must be letters, digits, '.', '_' or '-',"
            " and begin with a letter or digit; write NAME: WEIGHT START:END PREFIX, ..."
        )
    return DataGroup(
        name,
        tuple(
            _member(f"data group {name}, part {n}", part)
            for n, part in enumerate(rest.split(","), 1)
        ),
    )


def _member(where: str, text: str) -> Member:
    fields = text.split()
    if len(fields) != 3:
        more = "; a prefix can hold no space and no comma" if len(fields) > 3 else ""
        raise DataError(
            f"{where}: {text.strip()[:80]!r} has {len(fields)} fields, expected 3: WEIGHT START:END PREFIX{more}"
        )
    weight = parse_number(fields[0], f"{where}, weight of {fields[2]}")
    if weight <= 0:
        raise DataError(
            f"{where}, weight of {fields[2]}: {fields[0]} must be more than 0; leave the part out instead"
        )
    return Member(weight, fields[2], *parse_range(fields[1], f"{where}, "))


def parse_groups(texts: Sequence[str]) -> tuple[DataGroup, ...]:
    """Several groups of different names. Raises DataError as `parse_group` does, or for a name
    given twice.
    """
    groups = tuple(parse_group(text) for text in texts)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"data group {name} is given {names.count(name)} times; give each group a name of its own"
            )
    return groups


def read_groups_file(path: str | Path) -> tuple[DataGroup, ...]:
    """The groups of a file: one line `"GROUP" "GROUP" ...`. Raises DataError when it is not one,
    naming what is not.
    """
    with explain_os_errors("reading", path):
        data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text; give a file that `tr11 data ratios` wrote") from None
    if (
        text.count("\n") != 1
        or not text.endswith('"\n')
        or not text.startswith('"')
        or len(text) < 4
    ):
        raise DataError(
            f'{path} must hold exactly one line, which begins and ends with a double quote: "NAME: WEIGHT START:END'
            ' PREFIX, ..." "NAME: ..."; write it with `tr11 data ratios`'
        )
    try:
        return parse_groups(text[1:-2].split('" "'))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def parse_range(text: str, where: str = "") -> tuple[float, float]:
    """START:END, two fractions with 0 <= START < END <= 1. Raises DataError, which begins with
    `where`.
    """
    parts = text.split(":")
    if len(parts) != 2:
        raise DataError(f"{where}data range {text!r} must be START:END, for example 0:0.95")
    start, end = (parse_number(part, f"{where}data range {text!r}") for part in parts)
    if not 0.0 <= start < end <= 1.0:
        raise DataError(f"{where}data range {text!r} must have 0 <= START < END <= 1")
    return start, end


def parse_number(text: str, what: str) -> float:
    """A finite number. Raises DataError that says `what` is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{what}: {text!r} is not a number")
    return value
