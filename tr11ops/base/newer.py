"""Files of the run directory that a newer tr11 has written: they are read as far as they are
understood, and kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tr11ops.base.errors import NewerFileError
from tr11ops.base.observed import known, observed
from trainer.contract.documents import newer_schema
from trainer.contract.files import write_json
from trainer.contract.state_file import read_json


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
    why = why_only_read(known(observed(lambda: read_json(path)), None), known_schema)
    if why:
        raise NewerFileError(path, why)
    write_json(path, value)
