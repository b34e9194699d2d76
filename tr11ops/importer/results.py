"""What an import says: keys placed, options left over, values changed, defects of the script.
Frozen records.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import field

from trainer.contract.documents import document
from trainer.contract.record import Record

SCHEMA = 1


class LeftReason(StrEnum):
    """Why an option of the script is not a key of the card."""

    DROPPED = "dropped on purpose"
    NO_EFFECT = "had no effect"
    NO_COUNTERPART = "has no counterpart"
    ELSEWHERE = "is said elsewhere"
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


class Changed(Record):
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
    changed: tuple[Changed, ...]
    defects: tuple[Defect, ...]
    problems: tuple[CardProblem, ...]
    overridden: frozenset[str] = field(default_factory=frozenset)

    @property
    def decisions(self) -> tuple[Unplaced, ...]:
        """Left-over options that a person must decide about and has not, with `--set`."""
        found = (item for item in self.unplaced if item.reason is LeftReason.DECISION)
        return tuple(item for item in found if not item.key or item.key not in self.overridden)

    @property
    def errors(self) -> tuple[Defect, ...]:
        """Defects of severity error whose key no `--set` has given."""
        found = (item for item in self.defects if item.severity is DefectSeverity.ERROR)
        return tuple(item for item in found if not item.key or item.key not in self.overridden)

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
