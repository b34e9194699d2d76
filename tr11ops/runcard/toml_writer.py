"""A run card as TOML text: sections and keys in the schema's order, each key with a remark on where
it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tr11ops.base.units import plain
from tr11ops.runcard.kinds import card_kind
from trainer.config.base import section_of

_WIDEST = 120
_REMARK_COLUMN = 44


def write_card(tables: Mapping[str, Any], remarks: Mapping[str, str], head: Sequence[str]) -> str:
    """The text of the card. `remarks` are by dotted key; `head` are lines of comment at its top."""
    lines = [_comment(line) for line in head]
    kind = card_kind(tables)
    for section, table in _ordered(tables, list(kind.model_fields)):
        schema = schema_of(kind, section)
        if isinstance(table, list):
            lines += _tables(section, table)
            continue
        inner = {name: item for name, item in table.items() if _is_free_table(schema, name, item)}
        lines += ["", f"[{_key(section)}]"]
        for name, value in _ordered(table, list(schema.model_fields) if schema else []):
            if name not in inner:
                lines += _entry(name, value, _remark(f"{section}.{name}", value, remarks))
        for name, item in inner.items():
            lines += ["", f"[{_key(section)}.{_key(name)}]"]
            for key, value in item.items():
                lines += _entry(key, value, _remark(f"{section}.{name}.{key}", value, remarks))
    return "\n".join(lines) + "\n"


def _tables(section: str, tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A section of which there may be several."""
    for table in tables:
        yield from ["", f"[[{_key(section)}]]"]
        for name, value in table.items():
            yield from _entry(name, value, "")


def schema_of(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The schema of the table that a key holds; None where it holds none."""
    field = schema.model_fields.get(name)
    if field is None:
        return None
    return section_of(field.annotation)


def _is_free_table(schema: type[BaseModel] | None, name: str, value: Any) -> bool:
    """A table whose keys no one lists beforehand, such as slurm.environment; others are written on
    one line.
    """
    return isinstance(value, dict) and (schema is None or schema_of(schema, name) is None)


def _ordered(table: Mapping[str, Any], known: Sequence[str]) -> Iterator[tuple[str, Any]]:
    places = {name: index for index, name in enumerate(known)}
    yield from sorted(table.items(), key=lambda item: places.get(item[0], len(places)))


def _remark(key: str, value: Any, remarks: Mapping[str, str]) -> str:
    """The key's remark, or those of the keys inside it."""
    if key in remarks or not isinstance(value, dict):
        return remarks.get(key, "")
    return "; ".join(remarks[f"{key}.{name}"] for name in value if f"{key}.{name}" in remarks)


def _entry(name: str, value: Any, remark: str) -> list[str]:
    text = f"{_key(name)} = {toml_value(value)}"
    comment = ""
    if remark:
        comment = _comment(remark)
    if isinstance(value, list) and (len(value) > 1 or len(text) > _WIDEST):
        return [
            f"{_key(name)} = [  {comment}".rstrip(),
            *(f"  {toml_value(item)}," for item in value),
            "]",
        ]
    if comment:
        beside = f"{text.ljust(_REMARK_COLUMN)}  {comment}"
    else:
        beside = text
    if comment and len(beside) > _WIDEST:
        return [comment, text]
    return [beside]


def _comment(text: str) -> str:
    """One line of comment; TOML allows no control characters there."""
    return f"# {plain(text, unicode=True)}".rstrip()


def _key(name: str) -> str:
    plain = (
        name.isascii()
        and name
        and all(character.isalnum() or character in "_-" for character in name)
    )
    if plain:
        return name
    return toml_value(name)


def toml_value(value: Any) -> str:
    """One value on one line. Raises TypeError for what TOML cannot hold."""
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, int):
        if abs(value) >= 10_000:
            return f"{value:_}"
        return str(value)
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        if exponent:
            return f"{mantissa}e{int(power)}"
        return mantissa
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items())
            + " }"
        )
    raise TypeError(f"{type(value).__name__} has no form in TOML")
