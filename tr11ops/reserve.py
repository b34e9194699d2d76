"""Room that is set aside for the day when the disk is full: what frees it must be able to record what it does.

state/reserve        4 MiB of nothing, given up by the first prune that finds no room for its own records
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from tr11ops.rundir import RunDirectory, make_shared

RESERVE_FILE = "reserve"
RESERVE_BYTES = 4 << 20
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def keep_reserve(directory: RunDirectory) -> None:
    """Set the room aside unless it is. A failure is left to the next who comes by: it is not worth an error."""
    place = directory.paths.state / RESERVE_FILE
    with suppress(OSError):
        if place.exists():
            return
        make_shared(place.parent)
        descriptor, name = tempfile.mkstemp(prefix=f".{RESERVE_FILE}.", dir=place.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(os.urandom(RESERVE_BYTES))  # a file system that compresses must not save it
                stream.flush()
                os.fsync(stream.fileno())
            draft.chmod(0o664)
            draft.replace(place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def spend_reserve(directory: RunDirectory, error: OSError) -> bool:
    """Give the room up if it was lacking; True when it is worth trying again."""
    if error.errno not in NO_ROOM:
        return False
    try:
        (directory.paths.state / RESERVE_FILE).unlink()
    except OSError:
        return False
    return True
