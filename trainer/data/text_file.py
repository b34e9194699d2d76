"""A file of text as it is read by every command: plain or compressed, never silently shorter than it is.

Bytes come in steps of bounded size, whatever a compressed file unfolds to. An archive may have several members, one
after another, and zeros behind the last one. One that is cut off, damaged, or followed by something else is an error
that names the place in the file and the last whole line before it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from trainer.contract.errors import InputFault
from trainer.data.decoders import (
    MAGIC_BYTES,
    Compression,
    Decoder,
    compression_of,
    decoding_errors,
    foreign_encoding,
    named_compression,
    other_kind,
)
from trainer.data.errors import explain_os_errors

FILE_BYTES = 128 << 10  # read from the file at a time
TEXT_BYTES = 1 << 20  # decompressed at a time where text is passed over


class TextFile:
    """An open file of text; a context manager. `position`: bytes of the file that have been used."""

    def __init__(self, path: Path) -> None:
        """Open a file and look at how it begins.

        Raises DataError when it cannot be opened, is of a kind or an encoding that is not read, or is not what its
        name says.
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
        """At most `size` bytes of text, at least one before the end. Raises DataError when the file is damaged."""
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
                raise InputFault(f"{self.path} ends {count:,} bytes of text before the place to go on from")
            count -= len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            what = f"does not begin as {named.name} does" if head else "is empty"
            raise InputFault(
                f"{self.path} {what}, though its name says {named.name}; copy it again, or rename it if it is plain"
            )
        other = other_kind(head)
        if other is not None:
            raise InputFault(f"{self.path} is {other}; give JSON lines: plain text, gzip, xz or zstd")
        return found

    def _check_encoding(self) -> None:
        encoding = foreign_encoding(self._ahead)
        if encoding is None:
            return
        kind = self.compression
        name = self.path.name
        for suffix in kind.suffixes if kind else ():
            name = name.removesuffix(suffix)
        source, target = shlex.quote(str(self.path)), shlex.quote(str(self.path.with_name(f"utf8-{name}")))
        convert = f"iconv -f {encoding.iconv} -t UTF-8"
        command = f"{kind.to_stdout} {source} | {convert} > {target}" if kind else f"{convert} {source} > {target}"
        raise InputFault(f"{self.path} is {encoding.name}, and UTF-8 is read; convert it: {command}")

    # ------------------------------------------------------------------------- the text
    def _text(self, size: int) -> bytes:
        return self._take_some(size) if self.compression is None else self._decompressed(self.compression, size)

    def _take_some(self, size: int) -> bytes:
        self._fill(1)
        return self._take(min(size, len(self._pending)))

    def _decompressed(self, kind: Compression, size: int) -> bytes:
        while True:
            if self._decoder is None and not self._begin_member(kind):
                return b""
            assert self._decoder is not None
            fed = self._take_some(FILE_BYTES) if self._decoder.needs_input else b""
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
        while (head := self._fill(MAGIC_BYTES)) and not head[0]:  # zeros behind a member, as tapes have them
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
