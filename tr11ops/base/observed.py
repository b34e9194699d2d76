"""A value that was seen, or why it could not be: *unknown* is a value. What a newer tr11 has written
is read as far as it is understood, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from tr11ops.base.errors import NewerFileError
from trainer.contract.documents import newer_schema
from trainer.contract.files import write_json
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

T = TypeVar("T")
P = ParamSpec("P")


class Unknown(Record):
    """An observation that failed, and why. It is never the same as "there is none"."""

    why: str


Observed: TypeAlias = T | Unknown


def known(value: Observed[T], otherwise: T) -> T:
    """The observed value, or `otherwise` where it is unknown. Use it only where unknown may be left
    out safely.
    """
    if isinstance(value, Unknown):
        return otherwise
    return value


def seen(value: Observed[T]) -> T:
    """The observed value, where it has been made sure that it is not unknown. Raises ValueError
    for one that is.
    """
    if isinstance(value, Unknown):
        raise ValueError(f"not observed: {value.why}")
    return value


def cause(error: BaseException) -> str:
    """One line for a failed read."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.filename}: {error.strerror}"
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start + 1})"
    return " ".join(str(error).split()) or type(error).__name__


def observed(read: Callable[P, T], *given: P.args, **named: P.kwargs) -> Observed[T]:
    """What `read` returns; `Unknown` when the file system or the content refuses."""
    try:
        return read(*given, **named)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        return Unknown(cause(error))


def observing(read: Callable[P, T]) -> Callable[P, Observed[T]]:
    """A reader whose value is `Unknown` where `observed` says so."""

    @wraps(read)
    def look(*given: P.args, **named: P.kwargs) -> Observed[T]:
        return observed(read, *given, **named)

    return look


# ----------------------------------------------------------------------------- records with fields
# that may be unknown
@cache
def observed_fields(*kinds: type[Record]) -> dict[str, str]:
    """The fields of records that may be unknown, by their annotation (`Observed[...]`): name ->
    name in words.

    `NAMES` of a record holds another name than the field's own, where it has one.
    """
    found = {}
    for kind in kinds:
        names = vars(kind).get("NAMES", {})
        for name, annotation in vars(kind)["__annotations__"].items():
            if annotation.startswith("Observed["):
                found[name] = names.get(name, name.replace("_", " "))
    return found


def all_unknown(kind: type[Record], why: Unknown) -> dict[str, Any]:
    """Every field of a record that may be unknown, unknown for one reason."""
    return dict.fromkeys(observed_fields(kind), why)


def unknown_fields(*records: Record) -> Iterator[str]:
    """What of these records could not be observed, as `what, what: why`: one line for each cause."""
    causes: dict[str, list[str]] = {}
    for record in records:
        for name, words in observed_fields(type(record)).items():
            value = getattr(record, name)
            if isinstance(value, Unknown):
                causes.setdefault(value.why, []).append(words)
    for why, names in causes.items():
        yield f"{', '.join(names)}: {why}"


def why_only_read(value: Any, schema: int) -> str:
    """What to say of a file with this content, after its name, where this tr11 must not write it;
    "" where it may: its schema is `schema` or below, or none.
    """
    why = newer_schema(value, schema)
    if why:
        return f"{why}: it is only read"
    return ""


def replace_json(path: Path, value: dict[str, Any], known_schema: int) -> None:
    """Write a state file, whole or not at all, unless a newer tr11 has written it. Raises OSError,
    NewerFileError.

    What cannot be read is replaced, as ever: it says of itself no schema.
    """
    why = why_only_read(known(observed(read_json, path), None), known_schema)
    if why:
        raise NewerFileError(path, why)
    write_json(path, value)
