"""A checkpoint to copy, and what is found at its destination."""

from __future__ import annotations

from pathlib import Path

from tr11ops.backup.folder import FolderArchive

FORMATS = ("files", "tar")


LOCATION = "checkpoints/main/global_step100"


def far(archive: FolderArchive) -> Path:
    return Path(archive.address)


def nothing_published(archive: FolderArchive) -> bool:
    """No copy, no part of one, under a name that anyone looks at."""
    return [file.path for file in archive.list("")] in ([], ["tr11-archive.json"])
