"""How an option of the old trainer becomes a key (kinds of rules, converters of their values), and
what an import collects on its way and says at its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.traced import Traced, is_placeholder
from trainer.contract.documents import document
from trainer.contract.record import Record

SCHEMA = 1


class LeftReason(StrEnum):
    """Why an option of the script is not a key of the card."""

    DROPPED = "dropped on purpose"
    NO_EFFECT = "had no effect"
    NO_COUNTERPART = "has no counterpart"
    ELSEWHERE = "is said elsewhere"
    UNKNOWN = "is not known"
    DECISION = "needs a decision"


class DefectSeverity(StrEnum):
    """How bad a defect is: an error needs a person, a warning should be read, a note explains."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class PlacedValue(Record):
    """`key` holds `value` because of `source` on `line`; the value itself was written on
    `value_line`.
    """

    key: str
    value: Any
    source: str
    line: int
    value_line: int
    note: str = ""

    @property
    def comment(self) -> str:
        """The remark beside the key in the card."""
        if not self.line:
            return self.note or self.source
        origin = ""
        if self.value_line not in {0, self.line}:
            origin = f", from line {self.value_line}"
        note = ""
        if self.note:
            note = f": {self.note}"
        return f"line {self.line}, {self.source}{origin}{note}"


class Unplaced(Record):
    """An option of the script that is not in the card. `key`: what `--set` would have to give, if
    anything.
    """

    option: str
    value: str
    line: int
    reason: LeftReason
    why: str
    key: str = ""


class ChangedOption(Record):
    """A key whose value is not the script's, which the card would refuse or which would lose work."""

    key: str
    script_value: Any
    card_value: Any
    line: int
    why: str


class Defect(Record):
    """Something wrong with the script itself: where, what, what it costs, what to do. `key`: what
    it is about.
    """

    code: str
    severity: DefectSeverity
    line: int
    what: str
    cost: str
    fix: str
    key: str = ""


class CardProblem(Record):
    """A rule of the run card that the imported values break, with the line they came from."""

    key: str
    line: int
    text: str


class Imported(Record):
    """A whole import. `text` is the run card as it would be written."""

    script: str
    text: str
    tables: dict[str, Any]
    placed: tuple[PlacedValue, ...]
    unplaced: tuple[Unplaced, ...]
    changed: tuple[ChangedOption, ...]
    defects: tuple[Defect, ...]
    problems: tuple[CardProblem, ...]
    overridden: frozenset[str] = frozenset()

    @property
    def decisions(self) -> tuple[Unplaced, ...]:
        """Left-over options that a person must decide about and has not, with `--set`."""
        return tuple(
            item
            for item in self.unplaced
            if item.reason is LeftReason.DECISION and item.key not in self.overridden
        )

    @property
    def errors(self) -> tuple[Defect, ...]:
        """Defects of severity error whose key no `--set` has given."""
        return tuple(
            item
            for item in self.defects
            if item.severity is DefectSeverity.ERROR and item.key not in self.overridden
        )

    @property
    def exit_code(self) -> int:
        """0: the card is sound and complete; 1: a person must decide something."""
        return int(bool(self.decisions or self.errors or self.problems))

    def to_json(self, card: str | None) -> dict[str, Any]:
        """The import as one JSON object; `card` is where the run card was written."""
        return {
            "schema": SCHEMA,
            "script": self.script,
            "card": card,
            "exit_code": self.exit_code,
            "placed": [document(item) for item in self.placed],
            "changed": [document(item) for item in self.changed],
            "unplaced": [document(item) for item in self.unplaced],
            "defects": [document(item) for item in self.defects],
            "problems": [document(item) for item in self.problems],
            "decisions": len(self.decisions),
            "text": self.text,
        }


ALL_VALUES = -1
# variables that only a node has
IN_THE_JOB = ("${SLURM_", "${TMPDIR}", "${HOSTNAME}", "${JOBSCRATCH}")
_QUOTES = "'\""


Converter = Callable[[Sequence[Traced]], Any]


class OptionRule(Record):
    """One option of the old trainer. Without `key`, `reason` and `note` say what becomes of it."""

    option: str
    count: int  # values it takes; ALL_VALUES: everything up to the next option
    key: str = ""
    convert: Converter | None = None
    note: str = ""
    reason: LeftReason | None = None


class OptionUse(Record):
    """An option as the script gives it."""

    option: str
    values: tuple[Traced, ...]
    line: int

    @property
    def text(self) -> str:
        """Its values as one text, for showing."""
        return " ".join(value.for_shell() for value in self.values)

    @property
    def value_line(self) -> int:
        """Line on which the value itself was put together."""
        return max((value.last_line for value in self.values), default=self.line)


def unquoted(value: Traced) -> Traced:
    """Without quotes that stand around it as characters: nested quoting that no shell took away."""
    text = value.text
    if len(text) >= 2 and text[0] == text[-1] and text[0] in _QUOTES:
        return value.cut(1, len(text) - 1)
    return value


def single(values: Sequence[Traced]) -> Traced:
    """The only value."""
    if len(values) != 1 or not values[0].text:
        raise ConversionProblem(
            "it has no value" if not values or not values[0].text else "it has more than one value"
        )
    return unquoted(values[0])


def known(value: Traced) -> str:
    """The text, when it does not depend on what only a shell could tell."""
    if not value.is_known:
        raise ConversionProblem(_why_unknown(value.unknowns[0], "when the script runs"))
    return value.text


def _why_unknown(piece: str, when: str) -> str:
    """What a run of unknown text stands for; `when` a variable or command would be known."""
    return _for_a_person(piece) or f"{piece[:60]} is only known {when}"


def _for_a_person(piece: str) -> str:
    if is_placeholder(piece):
        return f"{piece[:60]} is a placeholder, to be filled in"
    if re.match(r"\$\{[0-9@*]+\}", piece):
        return f"{piece[:60]} is an argument of the script, given where it is started"
    return ""


def only_a_person_knows(values: Sequence[Traced]) -> str:
    """What no shell of the job could find out in these values: placeholders, arguments of the
    script; else empty.
    """
    found = (_for_a_person(piece) for value in values for piece in value.unknowns)
    return next((why for why in found if why), "")


def integer(values: Sequence[Traced]) -> int:
    """A whole number; underscores are separators."""
    text = known(single(values))
    if not re.fullmatch(r"[+-]?[0-9]+(?:_[0-9]+)*", text) or len(text) > 40:
        raise ConversionProblem("it is not a whole number")
    return int(text)


def number(values: Sequence[Traced]) -> float:
    """A finite number."""
    text = known(single(values))
    try:
        value = float(text)
    except ValueError:
        raise ConversionProblem("it is not a number") from None
    if not math.isfinite(value):
        raise ConversionProblem("it is not a finite number")
    return value


def whole_if_possible(values: Sequence[Traced]) -> float:
    """A number; whole ones as integers, so that the card shows 5990 and not 5990.0."""
    value = number(values)
    if value.is_integer():
        return int(value)
    return value


def text(values: Sequence[Traced]) -> str:
    """Text for the card: variables of the environment stay `$NAME`; what a command would print is
    refused.
    """
    return card_text(single(values))


def card_text(value: Traced) -> str:
    """As `text`, of one value."""
    for piece in value.unknowns:
        names = re.fullmatch(r"(?:\$\{[A-Za-z_]\w*\})+", piece, re.ASCII)
        if names is None or any(name in piece for name in IN_THE_JOB):
            raise ConversionProblem(_why_unknown(piece, "inside the job"))
    return value.for_card()


def on(values: Sequence[Traced]) -> bool:
    """A switch that is given."""
    return True


def off(values: Sequence[Traced]) -> bool:
    """A switch whose name says no."""
    return False


def always(value: Any) -> Converter:
    """A fixed value, whatever the option carries."""
    return lambda values: value


def one_of(**words: Any) -> Converter:
    """A word of a fixed list; `_` in a name stands for `-` as well."""

    def convert(values: Sequence[Traced]) -> Any:
        word = known(single(values))
        if word not in words:
            raise ConversionProblem(f"is none of {', '.join(words)}")
        return words[word]

    return convert


def ramp(values: Sequence[Traced]) -> dict[str, int]:
    """`--rampup-batch-size START INCREMENT SAMPLES`."""
    if len(values) == 1:  # quoted as one word
        values = words_of(values[0])
    if len(values) != 3:
        raise ConversionProblem("it needs three numbers: start, increment, samples")
    start, increment, samples = (integer([value]) for value in values)
    return {"start": start, "increment": increment, "samples": samples}


def split_shares(values: Sequence[Traced]) -> str:
    """`--split 949,50,1`, with or without blanks."""
    shares = [part for value in values for part in known(unquoted(value)).replace(",", " ").split()]
    return ",".join([*shares, "0", "0"][: max(3, len(shares))])


def ranges(values: Sequence[Traced]) -> list[str]:
    """`--skip-train-iteration-range A-B C-D`; underscores are separators of digits."""
    found = [
        known(value).replace("_", "") for given in values for value in words_of(unquoted(given))
    ]
    for entry in found:
        if not re.fullmatch(r"[0-9]{1,12}-[0-9]{1,12}", entry):
            raise ConversionProblem(f"{entry[:30]!r} is not a range such as 13251-14000")
    return found


def groups(values: Sequence[Traced]) -> list[str]:
    """Quoted groups `NAME: WEIGHT START:END PREFIX, ...`; joined again where the quotes were lost."""
    words = [unquoted(value) for value in values]
    if words and re.fullmatch(r"[^\s:]+:", words[0].text):
        words = [Traced.join(words, " ")]
    return [card_text(word) for word in words]


def one_group(values: Sequence[Traced]) -> str:
    """Exactly one group: what is trained on."""
    found = groups(values)
    if len(found) != 1:
        raise ConversionProblem(f"there must be one training group, not {len(found)}")
    return found[0]


def words_of(value: Traced) -> list[Traced]:
    """The value cut where it has blanks that are known to be there: a placeholder is one word."""
    text = "".join(
        "?" if value.unknown_at(index) else character for index, character in enumerate(value.text)
    )
    return [value.cut(match.start(), match.end()) for match in re.finditer(r"\S+", text)]


# What an import collects while it goes through a script: keys placed, options left, values
# changed.

_LONGEST_SHOWN = 200


@dataclass
class Builder:
    """The card in the making, by dotted key."""

    placed: dict[str, PlacedValue] = field(default_factory=dict)
    unplaced: list[Unplaced] = field(default_factory=list)
    changed: list[ChangedOption] = field(default_factory=list)

    def put(
        self, key: str, value: Any, source: str, line: int, value_line: int = 0, note: str = ""
    ) -> None:
        """Give `key` a value. A value it already had is told as overruled, when it was another."""
        before = self.placed.get(key)
        if before is not None and before.value != value and before.line:
            self.leave(
                before.source,
                before.value,
                line=before.line,
                reason=LeftReason.NO_EFFECT,
                why=f"overruled on line {line} by {source}",
            )
        self.placed[key] = PlacedValue(
            key, value, source=source, line=line, value_line=value_line, note=note
        )

    def take(
        self,
        key: str,
        values: tuple[Traced, ...],
        convert: Converter,
        source: str,
        line: int,
        note: str = "",
    ) -> None:
        """Convert and put; a value that cannot be converted needs a decision."""
        value_line = max((value.last_line for value in values), default=line)
        try:
            value = convert(values)
        except ConversionProblem as problem:
            shown = " ".join(value.for_shell() for value in values)
            self.ask(source, shown, line=line, why=str(problem), key=key)
            return
        self.put(key, value, source=source, line=line, value_line=value_line, note=note)

    def take_use(self, key: str, use: OptionUse, convert: Converter, note: str = "") -> None:
        """As `take`, from an option of the trainer."""
        self.take(key, use.values, convert=convert, source=use.option, line=use.line, note=note)

    def leave(
        self, option: str, value: Any, line: int, reason: LeftReason, why: str, key: str = ""
    ) -> None:
        """Tell of something that is not in the card."""
        shown = _shown(value)
        if not (len(shown) <= _LONGEST_SHOWN):
            shown = shown[: _LONGEST_SHOWN - 3] + "..."
        self.unplaced.append(Unplaced(option, shown, line=line, reason=reason, why=why, key=key))

    def ask(self, option: str, value: str, line: int, why: str, key: str = "") -> None:
        """Leave an option to a person, who is told how to give its `key`."""
        if key and "--set" not in why:
            why = f"{why}: give --set {key}=..."
        self.leave(option, value, line=line, reason=LeftReason.DECISION, why=why, key=key)

    def ask_use(self, use: OptionUse, why: str, key: str = "") -> None:
        """As `ask`, of an option of the trainer."""
        self.ask(use.option, use.text, line=use.line, why=why, key=key)

    def leave_use(self, use: OptionUse, reason: LeftReason, why: str, key: str = "") -> None:
        """As `leave`, of an option of the trainer."""
        self.leave(use.option, use.text, line=use.line, reason=reason, why=why, key=key)

    def forget(self, option: str) -> None:
        """Say nothing of an option that was left, or passed on, and has found its place after all."""
        self.unplaced = [item for item in self.unplaced if item.option != option]
        passed = [key for key, item in self.placed.items() if item.source == option]
        for key in passed:
            if key.startswith("slurm.options."):
                del self.placed[key]

    def change(self, key: str, value: Any, why: str) -> None:
        """Put another value than the script's into the card, and tell so."""
        before = self.placed[key]
        self.changed.append(
            ChangedOption(key, before.value, card_value=value, line=before.line, why=why)
        )
        note = f"the script's {before.value} {why}"
        self.placed[key] = PlacedValue(
            key,
            value,
            source=before.source,
            line=before.line,
            value_line=before.value_line,
            note=note,
        )

    def drop(self, key: str, why: str, reason: LeftReason = LeftReason.ELSEWHERE) -> None:
        """Take a key out again, with the reason."""
        before = self.placed.pop(key)
        self.leave(before.source, before.value, line=before.line, reason=reason, why=why)

    def value(self, key: str, default: Any = None) -> Any:
        """What a key holds so far."""
        found = self.placed.get(key)
        if found is None:
            return default
        return found.value

    def line(self, key: str) -> int:
        """The line a key came from; 0 when it came from none."""
        found = self.placed.get(key)
        if found:
            return found.line
        return 0

    def number(self, key: str, default: float | None = None) -> float | None:
        """A key's value, when it is a number."""
        value = self.value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return default

    def integer(self, key: str, default: int = 0) -> int:
        """A key's value, when it is a whole number; else `default`."""
        value = self.value(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return default

    def tables(self) -> dict[str, Any]:
        """The placed keys as tables of a run card."""
        result: dict[str, Any] = {}
        for key, item in self.placed.items():
            table = result
            *sections, name = key.split(".")
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = item.value
        return result


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
