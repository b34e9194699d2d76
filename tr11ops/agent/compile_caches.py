"""The folder of this node in which compilers keep what they made, for the user's next launch: safe
and bounded.

Its keys are the compilers' own: version, GPU and flags are in them, so that ranks, runs and
versions share it.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 4 << 30
UNUSED_SECONDS = 86400.0  # what was used since then may be in use


def caches_folder(temporary: Path) -> Path:
    """Where it is, below a folder of temporary files."""
    return temporary / f"tr11-caches-{os.geteuid()}"


def prepare_caches(temporary: Path) -> bool:
    """Make the folder, for its owner alone, and take the oldest files away where it has grown
    beyond its bound.

    False where it cannot be had, or is another user's: code is loaded from it.
    """
    folder = caches_folder(temporary)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_mode & 0o022:
            folder.chmod(0o700)
        _bound(folder)
    except OSError:
        return False
    return True


def _bound(folder: Path) -> None:
    files, total = [], 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another launch's, on its way
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                total += found.st_size
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    for used, size, path in sorted(files):
        if total <= MOST_BYTES or used > time.time() - UNUSED_SECONDS:
            return
        with suppress(OSError):
            path.unlink()
            total -= size
