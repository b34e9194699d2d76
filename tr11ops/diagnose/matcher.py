"""The one engine that finds known texts in logs: plain words over large blocks first, expressions
on few lines then.

`Matcher` takes blocks of whole lines and gives the lines that hold a required word of some rule,
with the rules that may match them. It keeps no more of a block than that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from tr11ops.base.word_search import WordSearch
from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.lines import plain
from tr11ops.diagnose.literals import required_words
from tr11ops.diagnose.signature import FaultSignature, Rule
from tr11ops.diagnose.topics import error_lines
from trainer.contract.record import Record

SHOWN_BYTES = 4096  # of a line, on either side of the word that was found in it
WORD_HITS = 2000  # of one word in one block; what is beyond repeats itself


class CandidateLine(Record):
    """A line (or the part of it between carriage returns) that holds required words.

    `start` and `end` are offsets in the block; `rules` are those whose words are there.
    """

    start: int
    end: int
    rules: tuple[int, ...]


class Matcher:
    """Finds the lines that rules may match, and which rule does."""

    def __init__(self, wanted: Sequence[Rule]) -> None:
        self.rules = tuple(wanted)
        users: dict[tuple[str, bool], list[int]] = {}
        for number, rule in enumerate(self.rules):
            ignores_case = bool(rule.pattern.flags & re.IGNORECASE)
            for word in required_words(rule.pattern):
                users.setdefault((word, ignores_case), []).append(number)
        self._users = list(users.values())
        self._search = WordSearch(list(users))

    def candidates(self, block: bytes) -> list[CandidateLine]:
        """The lines of a block of whole lines that some rule may match, in order."""
        found: list[CandidateLine] = []
        start = 0
        end = -1
        numbers = set[int]()
        for word, at in _few_of_each(self._search.hits(block)):
            if at <= end:
                numbers.update(self._users[word])
                continue
            if numbers:
                found.append(CandidateLine(start, end, tuple(sorted(numbers))))
            start, end = _piece(block, at)
            numbers = set(self._users[word])
        if numbers:
            found.append(CandidateLine(start, end, tuple(sorted(numbers))))
        return found

    def match(
        self, body: str, numbers: Sequence[int]
    ) -> Iterator[tuple[FaultSignature, re.Match[str]]]:
        """The signatures that a line without its prefixes matches, among the rules with these
        numbers.
        """
        for number in numbers:
            rule = self.rules[number]
            match = rule.pattern.search(body)
            if match is not None and (signature := rule.of(match)) is not None:
                yield signature, match

    def match_text(self, text: str) -> list[tuple[FaultSignature, re.Match[str]]]:
        """The signatures of one line of text, which need not be in a log."""
        found = self.candidates(text.encode())
        return [hit for candidate in found for hit in self.match(text, candidate.rules)]


def _few_of_each(hits: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without what one word has beyond a limit in one block: a log that repeats one line for ever
    is read soon.
    """
    if len(hits) <= WORD_HITS:
        return hits
    left: dict[int, int] = {}
    kept = []
    for word, at in hits:
        count = left.get(word, 0) + 1
        left[word] = count
        if count <= WORD_HITS:
            kept.append((word, at))
    return kept


def _piece(block: bytes, at: int) -> tuple[int, int]:
    """The line around an offset, or what a progress bar's carriage returns leave of it; a long one
    in part.
    """
    low = max(0, at - SHOWN_BYTES)
    high = min(len(block), at + SHOWN_BYTES)
    start = max(block.rfind(b"\n", low, at), block.rfind(b"\r", low, at), low - 1) + 1
    ends = [end for sign in (b"\n", b"\r") if (end := block.find(sign, at, high)) >= 0]
    return start, min(ends, default=high)


def text_of(block: bytes, candidate: CandidateLine) -> str:
    return plain(block[candidate.start : candidate.end].decode("utf-8", "replace"))


@cache
def matcher() -> Matcher:
    """The matcher of the whole catalogue; built once."""
    return Matcher((*rules(), *error_lines()))
