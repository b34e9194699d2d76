"""Log files as blocks of whole lines: plain, compressed, rotated, of any size. The edge of this
room.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

# The error files of torch elastic (a worker's `error.json`) as the lines of a log: the traceback,
# and its time. Pure.
#
# The file is one line of JSON; the lines that are told of it are those of the traceback inside.

MARK = b'{"message"'  # begins every such file
LARGEST_BYTES = 4 << 20


def error_file_lines(content: bytes) -> bytes | None:
    """What the worker said, a line each with the time of the failure before it; None where it is no
    such file.
    """
    try:
        told = json.loads(content)["message"]
        if isinstance(told, str):
            return told.encode() + b"\n"
        more = told.get("extraInfo") or {}
        text = str(more.get("py_callstack") or "")
        last = str(told["message"])
        moment = None
        if "timestamp" in more:
            moment = datetime.fromtimestamp(float(more["timestamp"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return None
    lines = text.splitlines()
    if not lines or not lines[-1].endswith(last.splitlines()[-1] if last.strip() else ""):
        lines.append(last)
    before = ""
    if moment is not None:
        before = f"[{moment:%Y-%m-%d %H:%M:%S}] "
    return "".join(f"{before}{line}\n" for line in lines).encode()


BLOCK_BYTES = 2 << 20
LONGEST_LINE_BYTES = 8 << 20  # a line that is longer goes on in a block of its own
GZIP = b"\x1f\x8b"
BZIP2 = b"BZh"
XZ = b"\xfd7zXZ\x00"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
LONGEST_MAGIC = len(XZ)
_MARKS = {
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_ROTATED = re.compile(
    r"^(?P<stem>.+?)(?:[.-](?P<number>\d{1,4}|\d{8}(?:-\d+)?))?(?:\.(?:gz|bz2|xz|zst))?$"
)


def blocks(path: Path, progress: Callable[[int], None] = lambda amount: None) -> Iterator[bytes]:
    """The file in blocks that end with a line, but for the last one. `progress` is told the bytes
    of each read.

    Raises OSError; ValueError where a compressed file is damaged.
    """
    rest = b""
    try:
        with opened(path) as file:
            if path.suffix == ".json" and (told := _error_file(path)) is not None:
                progress(path.stat().st_size)
                yield told
                return
            while block := file.read(BLOCK_BYTES):
                progress(len(block))
                cut = block.rfind(b"\n") + 1
                if not cut and len(rest) + len(block) <= LONGEST_LINE_BYTES:
                    rest += block
                elif not cut:
                    yield rest + block
                    rest = b""
                else:
                    yield rest + block[:cut]
                    rest = block[cut:]
    except ValueError:
        if rest:
            yield rest
        raise
    if rest:
        yield rest


def _error_file(path: Path) -> bytes | None:
    """The lines of an error file of torch elastic; None where it is another file."""
    if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
        return None
    content = path.read_bytes()
    if content.lstrip().startswith(MARK):
        return error_file_lines(content)
    return None


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file for reading, unpacked where its first bytes say that it is packed, whatever its
    name.

    Raises OSError; ValueError, also while it is read, where a packed file is damaged.
    """
    file, damage = _unpacked(path)
    with file:
        try:
            yield file
        except damage as error:
            raise ValueError(f"{path}: the compressed file is damaged: {error}") from None


def _unpacked(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """The file, and what reading it raises where it is damaged."""
    head = b""
    if path.is_file():  # what is read of a pipe is gone
        with path.open("rb") as file:
            head = file.read(LONGEST_MAGIC)
    if head.startswith(GZIP):
        return gzip.open(path, "rb"), (EOFError, gzip.BadGzipFile, zlib.error)
    if head.startswith(BZIP2):
        return bz2.open(path, "rb"), (EOFError, OSError)
    if head.startswith(XZ):
        return lzma.open(path, "rb"), (EOFError, lzma.LZMAError)
    if head.startswith(ZSTANDARD):
        from backports import zstd

        return zstd.open(path, "rb"), (EOFError, zstd.ZstdError)
    return _in_utf8(path, head), ()


def _in_utf8(path: Path, head: bytes) -> Any:
    """A file that is not packed; one that a shell of Windows wrote, as its first bytes say, in
    UTF-8.
    """
    file = path.open("rb")
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return codecs.EncodedFile(file, "utf-8", encoding, "replace")
    return file


def in_order(paths: Sequence[Path]) -> list[list[Path]]:
    """The files as logs, each a list of its rotated parts, the oldest first: `x.log.2.gz`,
    `x.log.1`, `x.log`.
    """
    logs: dict[tuple[Path, str], list[tuple[tuple[int, int], Path]]] = {}
    for path in paths:
        match = _ROTATED.match(path.name)
        if match:
            stem = match["stem"]
            number = match["number"]
        else:
            stem = path.name
            number = None
        if number is None:
            rank = (2, 0)
        elif len(number) >= 8:  # a date: the newest is the largest
            rank = (1, int(number.replace("-", "")))
        else:  # a count: the newest is 1
            rank = (1, -int(number))
        logs.setdefault((path.parent, stem), []).append((rank, path))
    return [[path for _, path in sorted(parts)] for parts in logs.values()]
