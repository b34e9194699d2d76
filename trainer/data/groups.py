"""Named, weighted groups of data sets: `NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX,
...`; and which part of a data set belongs to training, validation and test.

One group is trained on; any number of others are validated or tested on, each by itself. A file of
groups holds one line, each group in double quotes, with one space between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.record import Record
from trainer.schedule.rules import NAME

SPLITS = ("train", "valid", "test")


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


class SplitMember(Record):
    """One data set of the mixture of which `split` shares out the sequences: the share at `place`."""

    weight: float
    prefix: str
    split: str
    place: int

    def documents(self, count: int) -> range:
        """The sequences of a data set of `count` that belong to this share. Raises DataError."""
        return split_documents(self.split, count)[self.place]


class DataGroup(Record):
    """A named mixture, e.g. `train`, or one of several validation sets."""

    name: str
    members: tuple[Member | SplitMember, ...]

    def __str__(self) -> str:
        """The group as `parse_group` reads it."""
        parts = ", ".join(
            f"{member.weight!r} {member.start!r}:{member.end!r} {member.prefix}"
            for member in self.members
            if isinstance(member, Member)
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
        if len(fields) > 3:
            more = "; a prefix can hold no space and no comma"
        else:
            more = ""
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


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of training, validation and test from `949,50,1`; they need not sum to anything.
    Raises DataError.
    """
    shares = [parse_number(part, f"split {split!r}") for part in split.split(",")]
    if not 1 <= len(shares) <= 3 or any(share < 0 for share in shares) or sum(shares) <= 0:
        raise DataError(
            f"split {split!r} must be one to three numbers, none negative, such as 949,50,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total)


def split_documents(split: str, count: int) -> tuple[range, range, range]:
    """The sequences of training, validation and test among `count`.

    Each boundary is the one before plus the rounded share; what is too many or too few at the end
    is taken from every boundary but the first. Raises DataError for a malformed split.
    """
    bounds = [0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + round(share * float(count)))
    excess = bounds[-1] - count
    bounds[1:] = [max(0, bound - excess) for bound in bounds[1:]]
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


def split_groups(
    prefixes: Sequence[tuple[float, str | Path]], split: str, samples: Mapping[str, int]
) -> dict[DataGroup, int]:
    """`train`, `valid` and `test` of one mixture of (weight, prefix), each with as many samples as
    asked for.

    A split of which 0 samples are asked is absent. `split` is as `949,50,1`.
    """
    return {
        DataGroup(
            name,
            tuple(SplitMember(weight, str(prefix), split, place) for weight, prefix in prefixes),
        ): samples[name]
        for place, name in enumerate(SPLITS)
        if samples.get(name, 0) > 0
    }


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
