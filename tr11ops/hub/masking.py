"""What of a file is published: whole records alone, and secrets replaced by asterisks, byte for
byte, in what is sent and nowhere else.

What is masked in the first N bytes of a file depends on these bytes alone. So offsets, sizes and
the end of the last whole line are those of the local file, and the hub's digest is found again from
it at any time. Pure but for `Read`.
"""

from __future__ import annotations

import copy
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.base.word_search import WordSearch, line_end
from trainer.contract.record import Record
from trainer.contract.secret_shapes import NAME_STEMS, SecretShape, all_shapes

# How much of a growing file is whole: text up to its last newline, TensorBoard events up to the
# last whole record.
#
# A record of an event file (TFRecord) is an 8-byte little-endian length, the masked CRC-32C of these
# 8 bytes, the data, and the masked CRC-32C of the data. Both functions go on from where an earlier
# look ended, and read in pieces.

PIECE_BYTES = 1 << 20
HEADER = struct.Struct("<QI")  # of a record: its length and checksum
FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8  # of TFRecord's masked CRC: rotated by 15 bits, plus this

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives up to so many bytes from an offset on; fewer only at the end of the file."""


class Whole(Record):
    """`end` is the offset after the last whole line or record; `is_sound` is false where what
    follows is none.
    """

    end: int
    is_sound: bool = True


def whole_lines(read: Read, start: int, size: int) -> Whole:
    """The end of the last line of text between `start` and `size`; `start` where there is none.

    It stops before a NUL byte: a shared file system shows a hole where another host's write has not
    arrived yet.
    """
    position = end = start
    while position < size:
        piece = read(position, min(PIECE_BYTES, size - position))
        if not piece:
            break
        hole = piece.find(b"\0")
        newline = piece.rfind(b"\n", 0, len(piece) if hole < 0 else hole)
        if newline >= 0:
            end = position + newline + 1
        if hole >= 0:
            return Whole(end, is_sound=False)
        position += len(piece)
    return Whole(end)


def whole_events(read: Read, start: int, size: int) -> Whole:
    """The end of the last whole record between `start`, itself the end of one, and `size`.

    A record whose data do not fit their checksum counts once a good one follows it: the length was
    right, and what is wrong is old. At the end it may be a write that has not arrived yet.
    """
    source = RecordWindow(read, size)
    position = end = start
    while position + HEADER.size <= size:
        header = source.bytes(position, HEADER.size)
        if len(header) < HEADER.size:
            break
        length, checksum = HEADER.unpack(header)
        if masked_crc(header[:8]) != checksum:
            return Whole(end, is_sound=False)
        data = position + HEADER.size
        following = data + length + FOOTER.size
        if following > size:
            break
        crc = 0
        for offset in range(data, data + length, PIECE_BYTES):
            crc = _extend(crc, source.bytes(offset, min(PIECE_BYTES, data + length - offset)))
        footer = source.bytes(data + length, FOOTER.size)
        if len(footer) < FOOTER.size:
            break
        if _masked(crc) == FOOTER.unpack(footer)[0]:
            end = following
        position = following
    return Whole(end)


def masked_crc(data: bytes) -> int:
    """TFRecord's masked CRC-32C."""
    return _masked(_extend(0, data))


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _extend(crc: int, data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.extend(crc, data))


class RecordWindow:
    """Small reads one after another out of large ones."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._start = 0
        self._data = b""

    def bytes(self, offset: int, length: int) -> bytes:
        within = offset - self._start
        if within < 0 or within + length > len(self._data):
            wanted = min(max(length, PIECE_BYTES), self._size - offset)
            self._start, self._data, within = offset, self._read(offset, wanted), 0
        return self._data[within : within + length]


BLOCK_BYTES = 4 << 20  # looked at at once; a longer line is looked at in parts
PRIVATE_KEY = "private key"
# after its first line: the longest keys have a hundred, and other processes write between them
KEY_LINES = 200
MOST_KNOWN = 10_000  # combinations of words of a line whose shapes are kept
_KEY_WORD = b"PRIVATE KEY"
_BEGIN = re.compile(rb"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_END = re.compile(rb"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY")
# of its body, and its end
_KEY_RUN = re.compile(rb"[A-Za-z0-9+/=]{16,}|(?<![^\s\\])[A-Za-z0-9+/=]+(?=[\s\\\"']*$)")


class Mask(Record):
    """These bytes stand in what is sent from `start` on. `kind` is that of the secret; "" for a
    checksum.

    `line` counts from 1; 0 where the file has no lines.
    """

    start: int
    content: bytes
    kind: str
    line: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.content)


class Masks:
    """The masks of one file, ready to be laid over what is read of it."""

    def __init__(self, masks: Sequence[Mask] = ()) -> None:
        self._masks = masks
        self._starts = [mask.start for mask in masks]

    def over(self, data: bytes, offset: int) -> bytes:
        """The bytes that were read at `offset`, masked."""
        index = max(0, bisect_right(self._starts, offset) - 1)
        end, masked = offset + len(data), None
        for mask in self._masks[index:]:
            if mask.start >= end:
                break
            first, last = max(mask.start, offset), min(mask.end, end)
            if first < last:
                if masked is None:
                    masked = bytearray(data)
                masked[first - offset : last - offset] = mask.content[
                    first - mask.start : last - mask.start
                ]
        if masked is None:
            return data
        return bytes(masked)


def before(masks: Iterable[Mask], end: int) -> tuple[Mask, ...]:
    """What of the masks lies in the first `end` bytes."""
    return tuple(
        mask if mask.end <= end else replace(mask, content=mask.content[: end - mask.start])
        for mask in masks
        if mask.start < end
    )


@dataclass
class MaskSearch:
    """How far a file was looked at, in whole lines or records: `position` bytes, and the masks in
    them.

    `key_lines` is how many of the next lines may belong to a private key that began before.
    """

    is_events: bool
    position: int = 0
    line: int = 1
    key_lines: int = 0
    masks: tuple[Mask, ...] = ()

    def until(self, read: Read, end: int) -> tuple[Mask, ...]:
        """The masks of exactly the first `end` bytes; no less than was looked at before."""
        if self.is_events:
            self._records(read, end)
        else:
            self._lines(read, end)
        rest = copy.copy(self)
        rest.is_events = False  # what is no record, or not yet, is looked at as text
        rest._lines(read, end)
        if rest.position < end:
            rest.take(read(rest.position, end - rest.position))
        return rest.masks

    def take(self, block: bytes) -> None:
        """Look at the next whole lines."""
        spans, self.key_lines = _spans(block, self.key_lines)
        found, seen, line = [], 0, self.line
        for start, end, kind in spans:
            line += block.count(b"\n", seen, start)
            seen = start
            found.append(
                Mask(
                    self.position + start, b"*" * (end - start), kind, 0 if self.is_events else line
                )
            )
        self.line = line + block.count(b"\n", seen)
        self.masks += tuple(found)
        self.position += len(block)

    def _lines(self, read: Read, end: int) -> None:
        while self.position < end:
            block = read(self.position, min(BLOCK_BYTES, end - self.position))
            whole = block.rfind(b"\n") + 1
            if not whole:
                if len(block) < BLOCK_BYTES:
                    return
                whole = max(block.rfind(b" "), block.rfind(b"\t")) + 1 or len(block)
            self.take(block[:whole])

    def _records(self, read: Read, end: int) -> None:
        """Each record is a text of its own; one that has a secret gets the checksum of what is
        sent.
        """
        found: list[Mask] = []
        for start, data in _events(read, self.position, end):
            spans, _ = _spans(data, 0)
            if spans:
                masks = [
                    Mask(start + first, b"*" * (last - first), kind) for first, last, kind in spans
                ]
                checksum = masked_crc(Masks(masks).over(data, start))
                found += [*masks, Mask(start + len(data), FOOTER.pack(checksum), "")]
            self.position = start + len(data) + FOOTER.size
        self.masks += tuple(found)


def _events(read: Read, position: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Offset and data of each whole record from `position` on; it ends at what is none."""
    source = RecordWindow(read, end)
    while len(header := source.bytes(position, HEADER.size)) == HEADER.size:
        length, checksum = HEADER.unpack(header)
        start = position + HEADER.size
        position = start + length + FOOTER.size
        if masked_crc(header[:8]) != checksum or position > end:
            return
        yield start, source.bytes(start, length)


# ----------------------------------------------------------------------------- finding
Hits: TypeAlias = list[tuple[int, int]]  # a word's number, and where it ends


class _Finder:
    """The words of all shapes, searched for at once, and which shapes each is a word of. `lengths`
    are those of the words, in bytes. In a line that holds one, `stems` are searched for.
    """

    def __init__(self) -> None:
        users: dict[str, list[SecretShape]] = {}
        for shape in all_shapes():
            for word in shape.words:
                users.setdefault(word, []).append(shape)
        self._users = tuple(users.values())
        self._known: dict[tuple[int, ...], list[tuple[SecretShape, frozenset[int]]]] = {}
        self.lengths = tuple(len(word.encode()) for word in users)
        self.search = WordSearch([(word, not word.isupper()) for word in users])
        self._stems = WordSearch([(stem, True) for stem in NAME_STEMS])

    def stems_in(self, line: bytes) -> list[int]:
        """Where in a line the stems of secrets' names begin, in order."""
        return sorted(end - len(NAME_STEMS[number]) for number, end in self._stems.hits(line))

    def shapes_of(self, words: tuple[int, ...]) -> list[tuple[SecretShape, frozenset[int]]]:
        """What may fit a line that holds these words, each with those of them that are its own."""
        found = self._known.get(words)
        if found is None:
            own: dict[str, set[int]] = {}
            shapes: dict[str, SecretShape] = {}
            for word in sorted(set(words)):
                for shape in self._users[word]:
                    shapes[shape.pattern] = shape
                    own.setdefault(shape.pattern, set()).add(word)
            found = [(shape, frozenset(own[pattern])) for pattern, shape in shapes.items()]
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[words] = found
        return found


@cache
def _finder() -> _Finder:
    return _Finder()


def _suspects(block: bytes, hits: Hits) -> Iterator[tuple[int, int, Hits]]:
    """The lines that hold words: beginning, end and hits of each, of hits in order."""
    start = end = -1
    mine: Hits = []
    for hit in hits:
        if hit[1] > end:
            if mine:
                yield start, end, mine
            start, end, mine = block.rfind(b"\n", 0, hit[1]) + 1, line_end(block, hit[1]), []
        mine.append(hit)
    if mine:
        yield start, end, mine


def _spans(block: bytes, key_lines: int) -> tuple[list[tuple[int, int, str]], int]:
    """Where the secrets of these lines begin and end, in order and apart; and how long a private
    key may go on.
    """
    finder = _finder()
    found = []
    for start, end, hits in _suspects(block, finder.search.hits(block)):
        line = block[start:end]
        shapes = finder.shapes_of(tuple(number for number, _ in hits))
        stems: list[int] = []
        if any(shape.joint for shape, _ in shapes):
            stems = finder.stems_in(line)
        for shape, own in shapes:
            words = [at - start - finder.lengths[number] for number, at in hits if number in own]
            found += [
                (start + first, start + last, shape.kind)
                for first, last in shape.spans(line, words, stems)
                if first < last
            ]
    if key_lines or _KEY_WORD in block:
        keys, key_lines = _keys(block, key_lines)
        found += keys
    return _apart(found), key_lines


def _keys(block: bytes, left: int) -> tuple[list[tuple[int, int, str]], int]:
    """Where private keys lie. A line that may belong to one is masked where it looks so: others
    write between.
    """
    found, position = [], 0
    while position < len(block):
        if not left:
            begin = _BEGIN.search(block, position)
            if begin is None:
                break
            end_of_line = line_end(block, begin.end())
            end = _END.search(block, begin.end(), end_of_line)
            found.append((begin.end(), end.start() if end else end_of_line, PRIVATE_KEY))
            if end:
                left, position = (0, end.end())
            else:
                left, position = (KEY_LINES, end_of_line + 1)
            continue
        end_of_line = line_end(block, position)
        begin, end = (
            _BEGIN.search(block, position, end_of_line),
            _END.search(block, position, end_of_line),
        )
        if begin and not (end and end.start() < begin.start()):
            left, position = 0, begin.start()  # it begins once more
            continue
        if end:
            until = end.start()
        else:
            until = end_of_line
        found += [
            (position + run.start(), position + run.end(), PRIVATE_KEY)
            for run in _KEY_RUN.finditer(block[position:until])
        ]
        if end:
            left, position = (0, end.end())
        else:
            left, position = (left - 1, end_of_line + 1)
    return [span for span in found if span[0] < span[1]], left


def _apart(found: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """In order, and those that overlap as one."""
    apart: list[tuple[int, int, str]] = []
    for start, end, kind in sorted(found, key=lambda span: (span[0], -span[1])):
        if apart and start < apart[-1][1]:
            first, last, known = apart[-1]
            apart[-1] = (first, max(last, end), known)
        else:
            apart.append((start, end, kind))
    return apart
