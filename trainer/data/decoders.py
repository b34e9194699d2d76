"""The kinds of compression that are read, behind the one interface that lzma's decompressor has. No files here."""

from __future__ import annotations

import codecs
import lzma
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from trainer.contract.record import Record

XZ_MEMORY_LIMIT = 256 << 20  # bytes that a decoder may take; the strongest usual setting, -9, takes 65 MiB
ZSTD_SKIPPABLE = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))
MAGIC_BYTES = 6  # the longest beginning below


class Decoder(Protocol):
    """Decompresses one member, in steps of bounded size."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipDecoder:
    """zlib's decompressor for one gzip member, checksum included."""

    def __init__(self) -> None:
        self._engine = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._engine.eof

    @property
    def needs_input(self) -> bool:
        return not self._engine.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._engine.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._engine.decompress(self._engine.unconsumed_tail + data, max_length)


def _xz_decoder() -> Decoder:
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)


def _zstd() -> Any:
    """The standard library's module, which Pythons before 3.14 have as a package. Raises ImportError."""
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def _zstd_decoder() -> Decoder:
    return cast(Decoder, _zstd().ZstdDecompressor())


class Compression(Record):
    """A kind of compression: its name, the ends of names of its files, how its members begin, and its tools."""

    name: str
    suffixes: tuple[str, ...]
    magics: tuple[bytes, ...]
    decoder: Callable[[], Decoder]
    to_stdout: str  # the command that prints the text of a file
    smaller: str  # the command that compresses so that any decoder has the memory


GZIP = Compression("gzip", (".gz", ".gzip"), (b"\x1f\x8b",), decoder=_GzipDecoder, to_stdout="gzip -dc", smaller="gzip")
XZ = Compression("xz", (".xz",), (b"\xfd7zXZ\x00",), decoder=_xz_decoder, to_stdout="xz -dc", smaller="xz -6")
ZSTD = Compression(
    "zstd",
    (".zst", ".zstd"),
    (b"\x28\xb5\x2f\xfd", *ZSTD_SKIPPABLE),
    decoder=_zstd_decoder,
    to_stdout="zstd -dc",
    smaller="zstd -19",
)
KINDS = (GZIP, XZ, ZSTD)

# What people name by mistake: told by name, for each would otherwise be a faulty first line.
_OTHER_KINDS = (
    (b"BZh", "a bzip2 file"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"\x04\x22\x4d\x18", "an lz4 file"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
)


def compression_of(head: bytes) -> Compression | None:
    """The kind of compression of what begins with `head` (MAGIC_BYTES of it)."""
    return next((kind for kind in KINDS if head.startswith(kind.magics)), None)


def named_compression(name: str) -> Compression | None:
    """The kind of compression that the name of a file promises."""
    return next((kind for kind in KINDS if name.lower().endswith(kind.suffixes)), None)


def other_kind(head: bytes) -> str | None:
    """What a file is that begins with `head`, where it is of a known kind that is not read."""
    return next((what for magic, what in _OTHER_KINDS if head.startswith(magic)), None)


def decoding_errors() -> tuple[type[Exception], ...]:
    """What decoders raise over damaged data."""
    try:
        return (zlib.error, lzma.LZMAError, _zstd().ZstdError)
    except ImportError:
        return (zlib.error, lzma.LZMAError)


HEAD_BYTES = 8  # enough to tell


class ForeignEncoding(Record):
    """An encoding that is not UTF-8: its name for people, and the name that iconv knows it by."""

    name: str
    iconv: str


# The marks of UTF-32 come first: that of UTF-16 is the beginning of one of them.
_MARKS: Sequence[tuple[bytes, ForeignEncoding]] = (
    (codecs.BOM_UTF32_LE, ForeignEncoding("UTF-32, little-endian, with a byte-order mark", "UTF-32")),
    (codecs.BOM_UTF32_BE, ForeignEncoding("UTF-32, big-endian, with a byte-order mark", "UTF-32")),
    (codecs.BOM_UTF16_LE, ForeignEncoding("UTF-16, little-endian, with a byte-order mark", "UTF-16")),
    (codecs.BOM_UTF16_BE, ForeignEncoding("UTF-16, big-endian, with a byte-order mark", "UTF-16")),
)
_UNMARKED: Sequence[tuple[str, ForeignEncoding]] = (
    ("utf-32-le", ForeignEncoding("UTF-32, little-endian, without a byte-order mark", "UTF-32LE")),
    ("utf-32-be", ForeignEncoding("UTF-32, big-endian, without a byte-order mark", "UTF-32BE")),
    ("utf-16-le", ForeignEncoding("UTF-16, little-endian, without a byte-order mark", "UTF-16LE")),
    ("utf-16-be", ForeignEncoding("UTF-16, big-endian, without a byte-order mark", "UTF-16BE")),
)


def foreign_encoding(head: bytes) -> ForeignEncoding | None:
    """The encoding of a text that begins with `head` and is not UTF-8; None when nothing says that it is not.

    Without a mark, a text is told by its first character, which in JSON lines is a space or of ASCII.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    for codec, encoding in _UNMARKED:
        width = 4 if codec.startswith("utf-32") else 2
        if len(head) >= width and _is_ascii(head[:width].decode(codec, "replace")):
            return encoding
    return None


def _is_ascii(character: str) -> bool:
    return character in "\t\n\r" or " " <= character <= "~"
