"""A file of text as it is read by every command: plain or compressed, never silently shorter than
it is.

Bytes come in steps of bounded size, whatever a compressed file unfolds to. An archive may have
several members, one after another, and zeros behind the last one. One that is cut off, damaged, or
followed by something else is an error that names the place in the file and the last whole line
before it.
"""

from __future__ import annotations

import lzma
import shlex
import sys
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

from trainer.contract.errors import InputFault, explain_os_errors
from trainer.contract.record import Record

# The kinds of compression that are read, behind the one interface that lzma's decompressor has. No
# files here.

# bytes that a decoder may take; the strongest usual setting, -9, takes 65 MiB
XZ_MEMORY_LIMIT = 256 << 20
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
    """The standard library's module, which Pythons before 3.14 have as a package. Raises
    ImportError.
    """
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def _zstd_decoder() -> Decoder:
    return cast(Decoder, _zstd().ZstdDecompressor())


class Compression(Record):
    """A kind of compression: its name, the ends of names of its files, how its members begin, and
    its tools.
    """

    name: str
    suffixes: tuple[str, ...]
    magics: tuple[bytes, ...]
    decoder: Callable[[], Decoder]
    to_stdout: str  # the command that prints the text of a file
    smaller: str  # the command that compresses so that any decoder has the memory


GZIP = Compression(
    "gzip",
    (".gz", ".gzip"),
    (b"\x1f\x8b",),
    decoder=_GzipDecoder,
    to_stdout="gzip -dc",
    smaller="gzip",
)
XZ = Compression(
    "xz", (".xz",), (b"\xfd7zXZ\x00",), decoder=_xz_decoder, to_stdout="xz -dc", smaller="xz -6"
)
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


# UTF-32 comes first: the mark of UTF-16 is the beginning of one of its marks.
_FOREIGN = [(bits, order) for bits in (32, 16) for order in ("little", "big")]


def foreign_encoding(head: bytes) -> tuple[str, str] | None:
    """The encoding of a text that begins with `head` and is not UTF-8, its name for people and the
    one that iconv knows it by; None when nothing says that it is not.

    Without a mark, a text is told by its first character, which in JSON lines is a space or of
    ASCII.
    """
    for bits, order in _FOREIGN:
        if head.startswith("\ufeff".encode(f"utf-{bits}-{order[0]}e")):
            return f"UTF-{bits}, {order}-endian, with a byte-order mark", f"UTF-{bits}"
    for bits, order in _FOREIGN:
        codec, width = f"UTF-{bits}{order[0].upper()}E", bits // 8
        if len(head) >= width and _is_ascii(head[:width].decode(codec, "replace")):
            return f"UTF-{bits}, {order}-endian, without a byte-order mark", codec
    return None


def _is_ascii(character: str) -> bool:
    return character in "\t\n\r" or " " <= character <= "~"


FILE_BYTES = 128 << 10  # read from the file at a time
TEXT_BYTES = 1 << 20  # decompressed at a time where text is passed over


class TextFile:
    """An open file of text; a context manager. `position`: bytes of the file that have been used."""

    def __init__(self, path: Path) -> None:
        """Open a file and look at how it begins.

        Raises DataError when it cannot be opened, is of a kind or an encoding that is not read, or
        is not what its name says.
        """
        self.path = path
        self._lines = 0
        self._pending = b""  # read from the file and not used
        self._read_bytes = 0
        self._file_ended = False
        self._decoder: Decoder | None = None
        self._member_begin = 0
        with explain_os_errors("reading", path):
            self._stream: BinaryIO = path.open("rb", buffering=0)
        try:
            self.compression = self._find_compression()
            self._ahead = self._text(FILE_BYTES)
            self._check_encoding()
        except BaseException:
            self._stream.close()
            raise

    @property
    def position(self) -> int:
        """Bytes of the file that have been used; of a plain file, also of text."""
        return self._read_bytes - len(self._pending)

    def read(self, size: int) -> bytes:
        """At most `size` bytes of text, at least one before the end. Raises DataError when the file
        is damaged.
        """
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._text(size)
        self._lines += data.count(b"\n")
        return data

    def pass_over(self, count: int) -> None:
        """Go on behind the next `count` bytes of text. Raises DataError when there are fewer."""
        while count:
            data = self.read(min(count, TEXT_BYTES))
            if not data:
                raise InputFault(
                    f"{self.path} ends {count:,} bytes of text before the place to go on from"
                )
            count -= len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    # ------------------------------------------------------------------------- the file
    def _fill(self, count: int) -> bytes:
        """The next `count` bytes of the file, which stay to be used; fewer at its end."""
        while len(self._pending) < count and not self._file_ended:
            with explain_os_errors("reading", self.path):
                data = self._stream.read(FILE_BYTES)
            self._file_ended = not data
            self._read_bytes += len(data)
            self._pending += data
        return self._pending[:count]

    def _take(self, count: int) -> bytes:
        data = self._fill(count)
        self._pending = self._pending[len(data) :]
        return data

    def _find_compression(self) -> Compression | None:
        head = self._fill(MAGIC_BYTES)
        found, named = compression_of(head), named_compression(self.path.name)
        if found is None and named is not None:
            if head:
                what = f"does not begin as {named.name} does"
            else:
                what = "is empty"
            raise InputFault(
                f"{self.path} {what}, though its name says {named.name}; copy it again, or rename it if it is plain"
            )
        other = other_kind(head)
        if other is not None:
            raise InputFault(
                f"{self.path} is {other}; give JSON lines: plain text, gzip, xz or zstd"
            )
        return found

    def _check_encoding(self) -> None:
        encoding = foreign_encoding(self._ahead)
        if encoding is None:
            return
        shown, known_as = encoding
        kind = self.compression
        name = self.path.name
        for suffix in kind.suffixes if kind else ():
            name = name.removesuffix(suffix)
        source, target = (
            shlex.quote(str(self.path)),
            shlex.quote(str(self.path.with_name(f"utf8-{name}"))),
        )
        convert = f"iconv -f {known_as} -t UTF-8"
        if kind:
            command = f"{kind.to_stdout} {source} | {convert} > {target}"
        else:
            command = f"{convert} {source} > {target}"
        raise InputFault(f"{self.path} is {shown}, and UTF-8 is read; convert it: {command}")

    # ------------------------------------------------------------------------- the text
    def _text(self, size: int) -> bytes:
        if self.compression is None:
            return self._take_some(size)
        return self._decompressed(self.compression, size)

    def _take_some(self, size: int) -> bytes:
        self._fill(1)
        return self._take(min(size, len(self._pending)))

    def _decompressed(self, kind: Compression, size: int) -> bytes:
        while True:
            if self._decoder is None and not self._begin_member(kind):
                return b""
            assert self._decoder is not None
            if self._decoder.needs_input:
                fed = self._take_some(FILE_BYTES)
            else:
                fed = b""
            starved = self._decoder.needs_input and not fed
            try:
                data = self._decoder.decompress(fed, size)
            except decoding_errors() as error:
                raise InputFault(self._damage(kind, error)) from None
            if self._decoder.eof:
                self._pending = self._decoder.unused_data + self._pending
                self._decoder = None
            elif starved and not data:
                raise InputFault(
                    f"{self.path} is cut off: the file ends at byte {self.position:,}, in the {kind.name} data that"
                    f" begins at byte {self._member_begin:,}, after {self._whole_lines()}; copy it again"
                )
            if data:
                return data

    def _begin_member(self, kind: Compression) -> bool:
        """Whether another member begins here. Raises InputFault when something else does."""
        # zeros behind a member, as tapes have them
        while (head := self._fill(MAGIC_BYTES)) and not head[0]:
            self._pending = self._pending.lstrip(b"\0")
        if not head:
            return False
        if compression_of(head) is not kind:
            raise InputFault(
                f"{self.path}: what begins at byte {self.position:,} is no {kind.name} data, though"
                f" {self._whole_lines()} before it are; copy it again, or cut it off with head -c {self.position}"
            )
        self._member_begin = self.position
        try:
            self._decoder = kind.decoder()
        except ImportError:
            raise InputFault(
                f"{self.path} is {kind.name}, and the package to read it is missing: pip install backports.zstd, or"
                f" unpack it: {kind.to_stdout} {shlex.quote(str(self.path))} > FILE"
            ) from None
        return True

    def _damage(self, kind: Compression, error: Exception) -> str:
        reason = " ".join(str(error).split()).rstrip(".")
        if "memory" in reason.lower():
            return (
                f"{self.path} needs too much memory to unpack ({reason}); compress it again:"
                f" {kind.to_stdout} {shlex.quote(str(self.path))} | {kind.smaller} > NEW"
            )
        return (
            f"{self.path} is damaged before byte {self.position:,}, in the {kind.name} data that begins at byte"
            f" {self._member_begin:,}, after {self._whole_lines()} ({reason}); copy it again"
        )

    def _whole_lines(self) -> str:
        return f"{self._lines:,} whole line" + ("s" if self._lines != 1 else "")
