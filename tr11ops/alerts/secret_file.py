"""Files that hold URLs with passwords or tokens in them, one on a line; they are never shown."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tr11ops.base.private_file import private_text


def secret_lines(path: Path) -> tuple[str, ...]:
    """The lines of a file with secrets, without blank ones and those that begin with #. Raises
    PrivateFileError.
    """
    lines = (line.strip() for line in private_text(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def shown(url: str) -> str:
    """A URL as it may be shown: its scheme and a hash of the rest."""
    scheme = url.partition(":")[0]
    if scheme.isalnum() and scheme.isascii() and len(scheme) <= 20 and "://" in url:
        known = scheme
    else:
        known = "url"
    return f"{known}-{hashlib.sha256(url.encode('utf-8')).hexdigest()[:8]}"
