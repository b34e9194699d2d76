"""Values of a JSON object as a dataclass declares them: a file that many write to may hold anything."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.contract.state_file import DamagedFile, read_json

T = TypeVar("T")

MOST = 1 << 62  # beyond it no count, byte or moment is meant


def read_typed(kind: type[T], path: Path, what: str, schema: int | None = None) -> T | None:
    """The dataclass `kind` from its file; None where there is none. `what` it is, in words.

    Raises OSError; DamagedFile; ValueError for a file of a newer tr11, whose schema is above `schema`.
    """
    value = read_json(path)
    if value is None:
        return None
    try:
        if schema is not None and value.get("schema", 0) > schema:
            raise ValueError(f"{path} was written by a newer tr11")
        return kind(**typed_fields(kind, value))
    except TypeError as error:
        raise DamagedFile(path, f"is not {what}: {error}") from None


def typed_fields(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `value` that are fields of the dataclass `kind`; lists become tuples where it has tuples.

    Raises TypeError, which names the field, for one that is not of its declared type, is not finite, or is beyond 2^62.
    Fields of plain types, `Any`, `Literal`, tuples, lists and dictionaries by name of such, and alternatives of them.
    """
    hints = _hints(kind)
    found = {entry.name: value[entry.name] for entry in fields(kind) if entry.name in value}
    for name, given in found.items():
        if not _is_of(given, hints[name]):
            raise TypeError(f"{name!r} is {str(given)[:40]!r}")
    return {name: tuple(given) if isinstance(given, list) else given for name, given in found.items()}


@functools.cache  # a queue of records is read at every look, and each would evaluate the same annotations
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _is_of(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list):
        return isinstance(value, list) and all(_is_of(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(each, inner[1]) for each in value.values())
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return type(value) in numbers and -MOST < value < MOST
    return hint is Any or type(value) is hint
