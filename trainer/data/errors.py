"""The one exception of the data rooms, and the wording of what an operating system refuses."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.contract.errors import DataError


@contextmanager
def explain_os_errors(doing: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that says what was being done, where, and
    the fix.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{doing} {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk or the quota is full; free space or choose another folder, then run the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            "no permission to do that there; choose another folder or ask its owner for the right"
        )
    if error.errno == errno.ENOENT:
        return "there is no such file or folder; check the path"
    return f"{error.strerror or error}"
