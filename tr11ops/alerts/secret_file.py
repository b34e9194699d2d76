"""Files that hold URLs with passwords or tokens in them: readable by their owner alone, and never shown."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

LARGEST_BYTES = 64 << 10


class SecretFileError(ValueError):
    """The file may not be used. The text names the file and the rule, never what the file holds."""


def secret_lines(path: Path) -> tuple[str, ...]:
    """The lines of a file with secrets, without blank ones and those that begin with #. Raises SecretFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretFileError(f"{path}: {error.strerror}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretFileError(f"{path}: is not a file")
        if facts.st_uid != os.geteuid():
            raise SecretFileError(f"{path}: belongs to another user; whoever runs the watchdog must own it")
        if facts.st_mode & 0o077:
            raise SecretFileError(f"{path}: others can read it; type: chmod 600 {path}")
        content = os.read(descriptor, LARGEST_BYTES + 1)
    except OSError as error:
        raise SecretFileError(f"{path}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_BYTES:
        raise SecretFileError(f"{path}: is larger than {LARGEST_BYTES >> 10} KiB; put one URL on a line")
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise SecretFileError(f"{path}: is not UTF-8 text") from None
    return tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))


def shown(url: str) -> str:
    """A URL as it may be shown: its scheme and a hash of the rest."""
    scheme = url.partition(":")[0]
    known = scheme if scheme.isalnum() and scheme.isascii() and len(scheme) <= 20 and "://" in url else "url"
    return f"{known}-{hashlib.sha256(url.encode('utf-8')).hexdigest()[:8]}"
