"""The table of step dialects, `steps.toml`: what each trainer prints of a step. Loaded once, when a
line is read.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

from trainer.contract.documents import record_of
from trainer.contract.record import JsonObject, Record

FILE = Path(__file__).with_name("steps.toml")
_INT = r"(?:\d{1,3}(?:,\d{3})+|\d{1,15})"
_WRAPPED = r"(?:['\"]|np\.float\d+\(|tensor\()?"
_NUM = (
    rf"{_WRAPPED}(?P<value>[-+]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"|(?i:nan|inf(?:inity)?)(?![A-Za-z])))(?P<unit>(?-i:[KkMBT])(?![A-Za-z]))?"
)
_WORD_OR_COLOUR = r"(?:\b|(?<=\dm))"
_UNITS = {None: 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class StepDialect(Record, eq=False, dict=True):
    """How one trainer prints its steps. The fields are told at the head of `steps.toml`."""

    name: str
    source: str
    words: tuple[str, ...]
    step: str
    fields: Mapping[str, str | tuple[str, ...]]
    never: str = ""
    end: str = ""
    more: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    guess: bool = False
    omits_nan: bool = False
    averages: bool = False
    zero: tuple[str, ...] = ()
    first_epoch: int = 0

    @property
    def has_numbers(self) -> bool:
        """Whether its lines name their step."""
        return "(?P<iteration>" in self.step

    @cached_property
    def step_pattern(self) -> re.Pattern[str]:
        return re.compile(self.step.replace("INT", _INT))

    @cached_property
    def step_bytes(self) -> re.Pattern[bytes]:
        """As `step_pattern`, to find such lines in the blocks of a file, where a colour may end
        before a word.
        """
        return re.compile(self.step.replace("INT", _INT).replace(r"\b", _WORD_OR_COLOUR).encode())

    @cached_property
    def never_pattern(self) -> re.Pattern[str] | None:
        if self.never:
            return re.compile(self.never)
        return None

    @cached_property
    def end_pattern(self) -> re.Pattern[str] | None:
        if self.end:
            return re.compile(self.end)
        return None

    @cached_property
    def field_patterns(self) -> tuple[tuple[str, tuple[re.Pattern[str], ...]], ...]:
        found = []
        for name, told in self.fields.items():
            patterns = (told,) if isinstance(told, str) else told
            compiled = tuple(re.compile(pattern.replace("NUM", _NUM)) for pattern in patterns)
            found.append((name, compiled))
        return tuple(found)


class DialectWord(Record):
    """A word that lines of a dialect hold: of a step, or of what goes on with one."""

    text: str
    dialect: StepDialect
    goes_on: bool = False


@cache
def words_of(among: tuple[StepDialect, ...]) -> tuple[DialectWord, ...]:
    """The words of these dialects, in the order in which they are tried."""
    found: list[DialectWord] = []
    for dialect in among:
        found += [DialectWord(word, dialect) for word in dialect.words]
        found += [DialectWord(word, dialect, goes_on=True) for word in dialect.more]
    return tuple(found)


@cache
def all_words() -> tuple[DialectWord, ...]:
    """The words of the whole table."""
    return words_of(dialects())


@cache
def progress_words() -> tuple[bytes, ...]:
    """The words of all dialects, in the order in which a log is searched for its last step."""
    return tuple(dict.fromkeys(word.encode() for dialect in dialects() for word in dialect.words))


def number_of(match: re.Match[str]) -> float:
    """The value of a NUM, in full: `1,234`, `1.02M`, `-Infinity`."""
    return float(match["value"].replace(",", "")) * _UNITS[match["unit"]]


def whole_number_of(text: str) -> int:
    """The value of an INT."""
    return int(text.replace(",", ""))


@cache
def dialects() -> tuple[StepDialect, ...]:
    """All dialects, in the order in which they are tried."""
    return record_of(tuple[StepDialect, ...], entries())


@cache
def dialect_named(name: str) -> StepDialect:
    """Raises KeyError."""
    return {dialect.name: dialect for dialect in dialects()}[name]


def entries() -> list[JsonObject]:
    """The table as it stands in the file."""
    found: list[JsonObject] = tomllib.loads(FILE.read_text(encoding="utf-8"))["dialect"]
    return found
