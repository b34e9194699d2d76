"""JSON lines: cut into pieces of whole lines in bounded memory, and the texts of their lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

from trainer.contract.record import Record
from trainer.contract.units import size

# Pieces of this size keep several processes busy and the hand-over cheap.
PIECE_BYTES = 512 << 10
# A tokenizer takes about 180 bytes of memory for each byte of a text: 3 GB for a line of this size.
MAX_LINE_MIB = 16
MIB = 1 << 20


class TextSource(Protocol):
    """What lines are read from. `position`: how far into the file that is."""

    @property
    def position(self) -> int: ...

    def read(self, size: int) -> bytes: ...


class TextPosition(Record):
    """A place between two lines of an input: the bytes of text and the lines before it."""

    text_bytes: int = 0
    lines: int = 0


class LineBlock(Record):
    """Whole lines of the input: the number of the first, their bytes, and the place behind them.

    `file_bytes`: of the file, used since the piece before. `too_long`: instead of lines, one that
    is above the limit, of which only the size in bytes was kept.
    """

    first_line: int
    data: bytes
    end: TextPosition
    file_bytes: int
    too_long: int = 0


class BadLine(Record):
    """Why a line has no text."""

    reason: str


def read_pieces(
    source: TextSource,
    piece_bytes: int = PIECE_BYTES,
    max_line_bytes: int = MAX_LINE_MIB * MIB,
    begin: TextPosition | None = None,
) -> Iterator[LineBlock]:
    """Cut a file of lines into pieces of whole lines, of about `piece_bytes` where lines are
    shorter than that.

    A line of more than `max_line_bytes`, its end not counted, is passed over without being held,
    and is a piece of its own. `begin`: the place where `source` stands, unless that is its
    beginning.
    """
    if begin:
        text = begin.text_bytes
        line = begin.lines + 1
    else:
        text = 0
        line = 1
    position = source.position if text else 0
    held: list[bytes] = []  # the beginning of a line; empty when it is too long
    length = 0  # of that beginning

    def piece(data: bytes, lines: int, too_long: int = 0) -> LineBlock:
        nonlocal text, line, position
        used, position = source.position - position, source.position
        text += too_long or len(data)
        line += lines
        return LineBlock(
            line - lines, data, TextPosition(text, line - 1), file_bytes=used, too_long=too_long
        )

    while data := source.read(min(piece_bytes, max_line_bytes)):
        first_end = data.find(b"\n")
        if first_end < 0:
            length += len(data)
        else:
            length += first_end
        if length > max_line_bytes:
            held.clear()
            if first_end < 0:
                continue
            yield piece(b"", 1, too_long=length + 1)
            data = data[first_end + 1 :]
            length = len(data)
        cut = data.rfind(b"\n") + 1
        if cut:
            whole = b"".join([*held, data[:cut]])
            held.clear()
            yield piece(whole, whole.count(b"\n"))
            length = len(data) - cut
        if cut < len(data):
            held.append(data[cut:])
    if length > max_line_bytes:
        yield piece(b"", 1, too_long=length)
    elif held:
        yield piece(b"".join(held), 1)


def piece_size(piece: LineBlock) -> int:
    """Bytes of a piece in memory."""
    return len(piece.data)


def texts_of(piece: LineBlock, json_key: str) -> Iterator[tuple[int, str | BadLine]]:
    """The number and the text, or the fault, of each line of a piece; blank lines are passed over."""
    if piece.too_long:
        yield (
            piece.first_line,
            BadLine(
                f"{piece.too_long:,} bytes long, above the limit of --max-line-mib; a line of that length takes about"
                f" {size(piece.too_long * 180)} of memory: split the text, or raise --max-line-mib to"
                f" {-(-piece.too_long // MIB)}"
            ),
        )
        return
    for number, line in enumerate(piece.data.split(b"\n"), piece.first_line):
        if not line.strip():
            continue
        try:
            yield number, text_of(line, json_key)
        except ValueError as error:
            yield number, BadLine(str(error))


def text_of(line: bytes, json_key: str) -> str:
    """The text under a key of one JSON object. Raises ValueError that says what the line is
    instead.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text (0x{line[error.start]:02x} at byte {error.start + 1} of the line)"
        ) from None
    except (ValueError, RecursionError) as error:
        if b"\0" in line:
            raise ValueError(
                "not JSON: it holds zero bytes, as UTF-16 and damaged files do"
            ) from None
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    if json_key not in value:
        raise ValueError(
            f"no key {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'no keys'})"
        )
    text = value[json_key]
    if not isinstance(text, str):
        raise ValueError(f"{json_key!r} is a {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{json_key!r} holds half of a surrogate pair, which is no character"
        ) from None
    return text
