"""Files of the run directory that a newer tr11 has written: they are read as far as they are
understood, and kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tr11ops.base.errors import NewerFileError
from tr11ops.base.observed import known, observed
from trainer.contract.files import write_json
from trainer.contract.state_file import read_json


def newer_schema(path: Path, value: Any, known_schema: int) -> str:
    """Why a file with this content must not be written by this tr11, in a line; "" where its schema
    is known.
    """
    why = _why(value, known_schema)
    if why:
        return f"{path} {why}"
    return ""


def replace_json(path: Path, value: dict[str, Any], known_schema: int) -> None:
    """Write a state file, whole or not at all, unless a newer tr11 has written it. Raises OSError,
    NewerFileError.

    What cannot be read is replaced, as ever: it says of itself no schema.
    """
    why = _why(known(observed(lambda: read_json(path)), None), known_schema)
    if why:
        raise NewerFileError(path, why)
    write_json(path, value)


def _why(value: Any, known_schema: int) -> str:
    schema = None
    if isinstance(value, dict):
        schema = value.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema <= known_schema:
        return ""
    return f"was written by a newer tr11 (schema {schema}, this one knows {known_schema}): it is only read"
