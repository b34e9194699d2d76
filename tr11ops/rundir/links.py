"""Files put in place by hard link, and folders flushed to disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems flush names by themselves and say so like this
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def link_unless_taken(draft: Path, goal: Path) -> None:
    """Give a finished file its name unless the name is taken; by a rename where there are no hard
    links.
    """
    try:
        goal.hardlink_to(draft)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        draft.replace(goal)
