"""Text that is not UTF-8, told by its first bytes. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from trainer.contract.record import Record

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
