"""Files of the run directory that a newer tr11 has written: they are read as far as they are understood, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def newer_schema(path: Path, value: Any, known: int) -> str:
    """Why a file with this content must not be written by this tr11, in a line; "" where its schema is known."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema <= known:
        return ""
    return f"{path} was written by a newer tr11 (schema {schema}, this one knows {known}): it is only read"
