"""Records as JSON documents: one way to read them, one to write them.

A document is read strictly by the annotations of its record: another type, a missing field or a
number that no count, size or moment can be is an error that names the place (`$.nodes[2]`). What a
newer tr11 wrote beside is left out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from trainer.contract.errors import DamagedFile, NewerFormat
from trainer.contract.files import write_json
from trainer.contract.record import LARGEST_NUMBER, JsonObject, Record
from trainer.contract.state_file import LARGEST_BYTES, read_json

T = TypeVar("T")
# the classes of which msgspec knows the fields; of two threads that meet one first at once, it reads
# what the other has half made, and the process is gone (msgspec 0.22)
_known: set[Any] = set()
_learning = threading.Lock()


def record_of(kind: type[T], value: Any) -> T:
    """The record of class `kind` that a JSON object holds; or a tuple or dict of records, by such a
    type.

    Raises ValueError, which names the place and the fault.
    """
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
            raise ValueError(f"`{name}` is out of range")
    if kind not in _known:
        with _learning:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return msgspec.convert(value, kind, dec_hook=_decoded)


def record_of_text(kind: type[T], text: bytes | str) -> T:
    """The record of class `kind` in a line, or in all that a file says. Raises ValueError for
    anything else.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return record_of(kind, value)


def read_record(
    kind: type[T], path: Path, what: str, schema: int | None = None, largest: int = LARGEST_BYTES
) -> T | None:
    """The record in a file; None where there is none. `what` it is, in words; `schema`: the newest
    that is understood.

    Raises DamagedFile where the file holds something else, NewerFormat where its schema is above
    `schema`, OSError.
    """
    value = read_json(path, largest)
    if value is None:
        return None
    try:
        if schema is not None:
            refuse_newer(path, value, schema)
        return record_of(kind, value)
    except NewerFormat:
        raise
    except ValueError as error:
        raise DamagedFile(path, f"is not {what}: {error}") from None


def newer_schema(value: Any, schema: int) -> str:
    """What to say of a file with this content after its name; "" where its schema is `schema` or
    below, or none.
    """
    found = None
    if isinstance(value, Mapping):
        found = value.get("schema")
    if not isinstance(found, int) or isinstance(found, bool) or found <= schema:
        return ""
    return f"was written by a newer tr11 (schema {found}, this one knows {schema})"


def refuse_newer(path: Path, value: Any, schema: int) -> None:
    """Raises NewerFormat where the content of a file is of a newer schema than `schema`."""
    why = newer_schema(value, schema)
    if why:
        raise NewerFormat(f"{path} {why}")


def document(record: Record) -> JsonObject:
    """The record, and all that it holds, as plain JSON values; paths are text."""
    value: JsonObject = msgspec.to_builtins(record, enc_hook=_encoded)
    return value


def write_record(path: Path, record: Record) -> None:
    """Replace a file by the record, whole or not at all. Raises OSError."""
    write_json(path, document(record))


def _decoded(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise NotImplementedError(f"no {kind.__name__} stands in a document")


def _encoded(value: Any) -> str | int | float:
    """What other libraries have in place of a plain value: versions that are text, numbers of
    NumPy.
    """
    if isinstance(value, PurePath | str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} stands in no document")
