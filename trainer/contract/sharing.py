"""How folders and files of a run directory are made: for the run's whole group, whatever the umask
is.

Anyone of the group must be able to stop the run, go on with it, and clean up. Standard library
only.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_FOLDER_BITS = stat.S_IRWXG | stat.S_ISGID
_FILE_BITS = stat.S_IRGRP | stat.S_IWGRP


def make_shared(folder: Path) -> None:
    """Make a folder, and its missing parents, that the whole group may write to, whatever the umask
    is.

    Its setgid bit gives all that is made in it the folder's group, no matter who makes it. A folder
    that is there already keeps its rights. Raises OSError as the file system does.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        with suppress(PermissionError):  # another user was faster: it is theirs, and they share it
            share_folder(path)


def share_folder(folder: Path) -> None:
    """Open the caller's own folder to its group. Raises OSError."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | _FOLDER_BITS)


def open_shared(path: Path, flags: int) -> int:
    """`os.open` with a file that it makes readable and writable for the group. Raises OSError as
    `os.open` does.
    """
    descriptor = os.open(path, flags | os.O_CREAT, 0o664)
    try:
        share_file(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def share_file(descriptor: int) -> None:
    """Open a file to its group where it is the caller's own. Raises OSError."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _FILE_BITS != _FILE_BITS:
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | _FILE_BITS)
