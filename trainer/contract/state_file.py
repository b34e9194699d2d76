"""How every small file of a run directory is read: without waiting, within a bound, and with its
path in each error.

Whatever someone left at the name of a state file (an empty file, a torn one, a folder, a pipe, a
link that leads back to itself, a gigabyte) is named with its path: for a small file that is a
`DamagedFile`. What the file system refuses (no rights, no answer) is its OSError: the content may
be fine.

Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

from trainer.contract.errors import DamagedFile

LARGEST_BYTES = 64 << 20  # of any state file; the largest are manifests of thousands of files
_FOR_GOOD = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EFBIG, errno.EINVAL})


def is_damage(error: OSError) -> bool:
    """Whether an error of reading is of what lies at the path, so that no later look would find
    something else.
    """
    return error.errno in _FOR_GOOD


def descriptor_of(path: Path) -> int:
    """A regular file, open for reading; the caller closes it.

    Raises OSError as the file system does, and for whatever else has the file's name.
    A pipe that someone left in a shared folder would hold up anyone who opens it for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
        kind = "pipe" if stat.S_ISFIFO(mode) else "device"
        raise OSError(errno.EINVAL, f"is a {kind}, not a file", str(path))
    return descriptor


def open_for_reading(path: Path) -> BinaryIO:
    """As `descriptor_of`, as a stream of bytes."""
    return os.fdopen(descriptor_of(path), "rb")


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """What a file of at most `largest` bytes holds. Raises OSError as `descriptor_of` does, and for
    a larger one.
    """
    with open_for_reading(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise OSError(
                errno.EFBIG, f"has {size:,} bytes, more than any such file has", str(path)
            )
        return stream.read(largest + 1)


def content_of(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """As `read_bytes`; nothing where something else than such a file has its name, which then
    counts for its name.
    """
    try:
        return read_bytes(path, largest)
    except OSError as error:
        if is_damage(error):
            return b""
        raise


def set_aside(path: Path) -> Path:
    """Move what lies at a state file's path out of the way; returns where it is now. Nothing is
    removed.

    The new name ends as no state file's does, so that nothing reads it. Raises OSError as the file
    system does.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for number in range(100):
        target = path.with_name(f"{path.name}.damaged-{stamp}{f'-{number}' if number else ''}")
        if not os.path.lexists(target):
            path.rename(target)
            return target
    raise FileExistsError(errno.EEXIST, "as many damaged files as that lie here already", str(path))


def put_in_place(draft: Path, path: Path) -> None:
    """Rename a finished file to `path`; a folder that has its name is set aside. Raises OSError."""
    try:
        draft.replace(path)
    except IsADirectoryError:
        set_aside(path)
        draft.replace(path)


def read_text(path: Path, largest: int = LARGEST_BYTES) -> str:
    """What a state file says. Raises DamagedFile where that is no text, and OSError where it cannot
    be seen.
    """
    try:
        return read_bytes(path, largest).decode("utf-8")
    except OSError as error:
        if not is_damage(error):
            raise
        what = (
            "is a link that leads back to itself" if error.errno == errno.ELOOP else error.strerror
        )
        raise DamagedFile(path, str(what)) from None
    except UnicodeDecodeError as error:
        raise DamagedFile(path, f"is not UTF-8 text (byte {error.start + 1})") from None


def read_json(path: Path, largest: int = LARGEST_BYTES) -> dict[str, Any] | None:
    """The JSON object in `path`; None when it does not exist. Raises DamagedFile when it is no such
    object, OSError.
    """
    try:
        text = read_text(path, largest)
    except FileNotFoundError:
        return None
    if not text.strip("\0 \t\r\n"):
        raise DamagedFile(path, "is empty")
    try:
        value = json.loads(text)
    except ValueError as error:  # torn or foreign, or a number of thousands of digits
        raise DamagedFile(path, f"is not JSON: {error}") from None
    except RecursionError:
        raise DamagedFile(path, "does not hold a JSON object: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise DamagedFile(path, "does not hold a JSON object")
    return value


def tail_lines(
    path: Path, size: int, holding: tuple[bytes, ...] = (b"",)
) -> tuple[list[str], bool]:
    """The whole lines in the last `size` bytes of a file, and whether these are all of the file's
    lines.

    A line cut by the window, and a last line without its newline (being written), are left out, and
    so are those with none of the texts of `holding`. Invalid UTF-8 is replaced. Raises OSError as the file system does.
    """
    with open_for_reading(path) as stream:
        end = stream.seek(0, os.SEEK_END)
        start = max(0, end - size)
        stream.seek(start)
        data = stream.read(end - start)
    whole = data[: data.rfind(b"\n") + 1]
    if start:
        cut = whole.find(b"\n") + 1
        whole = whole[cut:]
    lines = [line for line in whole.split(b"\n")[:-1] if any(text in line for text in holding)]
    return [line.decode("utf-8", errors="replace") for line in lines], start == 0
