"""Room that is set aside for the day when the disk is full: what frees it, or stops the run, must
be able to write.

state/reserve        4 MiB of nothing, given up by the first prune or stop that finds no room for its own records
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.sharing import make_shared

T = TypeVar("T")
RESERVE_FILE = "reserve"
RESERVE_BYTES = 4 << 20
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def keep_reserve(directory: RunDirectory) -> None:
    """Set the room aside unless it is. A failure is left to the next who comes by: it is not worth
    an error.
    """
    place = directory.paths.state / RESERVE_FILE
    with suppress(OSError):
        if place.exists():
            return
        make_shared(place.parent)
        descriptor, name = tempfile.mkstemp(prefix=f".{RESERVE_FILE}.", dir=place.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                # a file system that compresses must not save it
                stream.write(os.urandom(RESERVE_BYTES))
                stream.flush()
                os.fsync(stream.fileno())
            draft.chmod(0o664)
            draft.replace(place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def with_reserve(directory: RunDirectory, act: Callable[[], T], place: Path | None = None) -> T:
    """What `act` returns, tried once more with the reserve's room where it found none. Raises
    OSError as `act` does.

    `place` is where it writes, if that may be on another file system, for which the reserve is no
    help.
    """
    try:
        return act()
    except OSError as error:
        is_here = place is None or place.parent.stat().st_dev == directory.paths.state.stat().st_dev
        if not (is_here and spend_reserve(directory, error)):
            raise
    return act()


def spend_reserve(directory: RunDirectory, error: OSError) -> bool:
    """Give the room up if it was lacking; True when it is worth trying again."""
    if error.errno not in NO_ROOM:
        return False
    try:
        (directory.paths.state / RESERVE_FILE).unlink()
    except OSError:
        return False
    return True
