"""What an import collects while it goes through a script: keys placed, options left, values
changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.options import Converter, OptionUse
from tr11ops.importer.results import Changed, LeftReason, PlacedValue, Unplaced
from tr11ops.importer.traced import Traced

_LONGEST_SHOWN = 200


@dataclass
class Builder:
    """The card in the making, by dotted key."""

    placed: dict[str, PlacedValue] = field(default_factory=dict)
    unplaced: list[Unplaced] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)

    def put(
        self, key: str, value: Any, source: str, line: int, value_line: int = 0, note: str = ""
    ) -> None:
        """Give `key` a value. A value it already had is told as overruled, when it was another."""
        before = self.placed.get(key)
        if before is not None and before.value != value and before.line:
            self.leave(
                before.source,
                before.value,
                before.line,
                LeftReason.NO_EFFECT,
                f"overruled on line {line} by {source}",
            )
        self.placed[key] = PlacedValue(key, value, source, line, value_line, note)

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
            self.leave(
                source, shown, line, LeftReason.DECISION, f"{problem}: give --set {key}=...", key
            )
            return
        self.put(key, value, source, line, value_line, note)

    def take_use(self, key: str, use: OptionUse, convert: Converter, note: str = "") -> None:
        """As `take`, from an option of the trainer."""
        self.take(key, use.values, convert, use.option, use.line, note)

    def leave(
        self, option: str, value: Any, line: int, reason: LeftReason, why: str, key: str = ""
    ) -> None:
        """Tell of something that is not in the card."""
        shown = _shown(value)
        if not (len(shown) <= _LONGEST_SHOWN):
            shown = shown[: _LONGEST_SHOWN - 3] + "..."
        self.unplaced.append(Unplaced(option, shown, line, reason, why, key))

    def leave_use(self, use: OptionUse, reason: LeftReason, why: str, key: str = "") -> None:
        """As `leave`, of an option of the trainer."""
        self.leave(use.option, use.text, use.line, reason, why, key)

    def change(self, key: str, value: Any, why: str) -> None:
        """Put another value than the script's into the card, and tell so."""
        before = self.placed[key]
        self.changed.append(Changed(key, before.value, value, before.line, why))
        note = f"the script's {before.value} {why}"
        self.placed[key] = PlacedValue(
            key, value, before.source, before.line, before.value_line, note
        )

    def drop(self, key: str, why: str, reason: LeftReason = LeftReason.ELSEWHERE) -> None:
        """Take a key out again, with the reason."""
        before = self.placed.pop(key)
        self.leave(before.source, before.value, before.line, reason, why)

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
