"""What there is to say of each key of the run card, read from its schema, for docs/run-card.md and
`config explain`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tr11ops.runcard.card import PATH_KEYS, RunCard
from trainer.contract.record import Record

REQUIRED = object()  # the default of a key that a card must give


class CardKey(Record):
    """One key. `kind`: what its value may be, in words. `default`: as JSON has it; None where there
    is none.
    """

    section: str
    name: str
    kind: str
    default: Any
    meaning: str
    is_path: bool

    @property
    def dotted(self) -> str:
        """As `--set` and the faults of a card name it."""
        return f"{self.section}.{self.name}"

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def default_text(self) -> str:
        """Its default as JSON; "" for none, and where the card must give it."""
        if self.default is None or self.is_required:
            return ""
        return json.dumps(self.default)


class CardSection(Record):
    """One section, or a table inside one (`batch.ramp`). `is_list`: there may be several tables of
    it.
    """

    name: str
    text: str
    keys: tuple[CardKey, ...]
    is_list: bool = False


def card_sections() -> Iterator[CardSection]:
    """Every section in the schema's order, each followed by the tables inside it."""
    for name, entry in RunCard.model_fields.items():
        yield from _sections(name, entry)


def _sections(name: str, entry: FieldInfo) -> Iterator[CardSection]:
    schema = _table(entry)
    assert schema is not None, f"{name} is not a section"
    text = " ".join((schema.__doc__ or "").partition(": ")[2].split())
    keys = tuple(_key(name, key, item) for key, item in schema.model_fields.items())
    yield CardSection(name, text[:1].upper() + text[1:], keys, get_origin(entry.annotation) is list)
    for key, item in schema.model_fields.items():
        if _table(item):
            yield from _sections(f"{name}.{key}", item)


def _key(section: str, name: str, entry: FieldInfo) -> CardKey:
    default = REQUIRED if entry.default is PydanticUndefined else entry.default
    if _table(entry):
        kind = "table"
    else:
        kind = _kind(entry)
    is_path = (*section.split("."), name) in PATH_KEYS
    return CardKey(section, name, kind, default, entry.description or "", is_path)


def _table(entry: FieldInfo) -> type[BaseModel] | None:
    options = (entry.annotation, *get_args(entry.annotation))
    return next(
        (item for item in options if isinstance(item, type) and issubclass(item, BaseModel)), None
    )


def _kind(entry: FieldInfo) -> str:
    words = _words(entry.annotation)
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in entry.metadata
        for name, sign in _BOUNDS
        if hasattr(rule, name)
    ]
    return " ".join([words, *bounds[:1]])


_BOUNDS = (("gt", ">"), ("ge", "≥"))


def _words(annotation: Any) -> str:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(members[0])
    if origin in {Union, UnionType}:
        return " or ".join(_words(item) for item in members if item is not NoneType)
    if origin is Literal:
        return ", ".join(f'"{item}"' for item in members)
    if origin is list:
        return f"list of {_words(members[0])}"
    if origin is dict:
        if members[1] is str:
            return "table of text"
        return "table"
    return {int: "integer", float: "number", bool: "true, false", str: "text"}[annotation]
