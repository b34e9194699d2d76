"""Files with secrets in them: read only where their owner has shut them to others, and never
repeated in a message.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.errors import PrivateFileError

LARGEST_BYTES = 64 << 10


def settings_folder(environment: Mapping[str, str]) -> Path:
    """Where a user keeps what is for tr11 alone: tokens and keys. It need not be there."""
    base = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
    return Path(base) / "tr11"


def private_text(path: Path, group: bool = False) -> str:
    """The text of a file that its owner alone can read, and who reads it here owns it.

    `group`: all members of a group share it, so its owner may be another, and only the rest of the
    machine is shut out. Never waits for a pipe. Raises PrivateFileError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PrivateFileError(f"{path}: {error.strerror}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise PrivateFileError(f"{path}: is not a file")
        _check_access(path, facts, group)
        content = os.read(descriptor, LARGEST_BYTES + 1)
    except OSError as error:
        raise PrivateFileError(f"{path}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_BYTES:
        raise PrivateFileError(f"{path}: is larger than {LARGEST_BYTES >> 10} KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise PrivateFileError(f"{path}: is not UTF-8 text") from None


def _check_access(path: Path, facts: os.stat_result, group: bool) -> None:
    if group:
        if facts.st_mode & stat.S_IRWXO:
            raise PrivateFileError(
                f"{path}: every user of the machine can read it; type: chmod o-rwx {path}"
            )
        return
    if facts.st_uid != os.geteuid():
        raise PrivateFileError(f"{path}: belongs to another user; the user who uses it must own it")
    if facts.st_mode & 0o077:
        raise PrivateFileError(f"{path}: others can read it; type: chmod 600 {path}")
