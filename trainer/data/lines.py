"""JSON lines: cut into pieces of whole lines, and the text of one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

# Pieces of this size keep several processes busy and the hand-over cheap.
PIECE_BYTES = 512 << 10


@dataclass(frozen=True)
class Piece:
    """Whole lines of the input: the number of the first, their bytes."""

    first_line: int
    data: bytes


def read_pieces(stream: IO[bytes], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a file of lines into pieces of whole lines of about `piece_bytes`; a longer line is a piece of its own."""
    line = 1
    while data := stream.read(piece_bytes):
        if not data.endswith(b"\n"):
            data += stream.readline()
        yield Piece(line, data)
        line += data.count(b"\n")


def text_of(line: bytes, json_key: str) -> str:
    """The text under a key of one JSON object. Raises ValueError that says what the line is instead."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    if json_key not in value:
        raise ValueError(f"no key {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'no keys'})")
    text = value[json_key]
    if not isinstance(text, str):
        raise ValueError(f"{json_key!r} is a {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{json_key!r} holds half of a surrogate pair, which is no character") from None
    return text
