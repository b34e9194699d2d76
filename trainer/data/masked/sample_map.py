"""Which sentences make up each sample of BERT and T5 training: rows of (first sentence, last + 1,
target length).

A document is walked from its first sentence; a sample ends where its sentences hold the target
length, if it has enough sentences and more than one is left, or at the end of the document.
Documents with too few sentences or a very long one are passed over. The target is mostly the
longest, and now and then a shorter one: each document takes a 32-bit Mersenne number as it begins
and another after each of its samples, and r mod ratio == 0 makes it short. As many epochs as the
asked samples need follow each other; all rows are then shuffled. The draws follow Megatron's, so
the same data and seed give the same rows.

How long a sample of full length gets is known for every sentence that may begin one, in numpy. Only
the way from sample to sample is a loop: what a draw decides depends on how many draws all documents
before it have used up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.masked.shuffle import shuffled_order

LONG_SENTENCE = 512  # tokens; a document of several sentences with a longer one is passed over
DRAWS_AT_ONCE = 1 << 18
DOCUMENTS_AT_ONCE = 1 << 12
SEARCH_AT_ONCE = 1 << 13

IntArray = npt.NDArray[Any]


class MapRules(Record):
    """What rows depend on beside the data. `longest`: tokens of sentences in a full sample.

    `least_sentences`: of a sample; 2 where the order of two segments is learned.
    """

    longest: int
    short_probability: float
    least_sentences: int
    seed: int

    @property
    def ratio(self) -> int:
        """One sample in so many is short; 0 for none."""
        # Half away from zero, as C rounds; Python would round to even.
        if self.short_probability > 0:
            return int(1.0 / self.short_probability + 0.5)
        return 0


class _Ways(Record):
    """Where samples of full length lead, over the places of all usable documents: sentences, and an
    end for each.

    following [places + 1]: the place where a sample from this place ends, or from an end the place
    behind it. tokens [places + 1]: before each place. ends: 1 at each document's end [places + 2].
    origin: sentence numbers [places + 1]; of an end the number behind the document's last.
    """

    following: array[int]
    tokens: array[int]
    ends: bytearray
    origin: IntArray


def build_sample_map(
    sizes: IntArray, documents: IntArray, *, samples: int, rules: MapRules
) -> IntArray:
    """Rows [n, 3], n >= samples, shuffled; uint32 (int64 where sentence numbers need it).

    sizes: tokens of every sentence of the data set; documents: the sentences at which the documents
    of the split begin, and the end of the last. Raises DataError when no document can be used.
    """
    if samples < 1:
        raise DataError(f"{samples} samples asked of the data; ask for at least 1")
    ways = _find_ways(sizes, documents, rules)
    draws = _Draws(rules)
    parts: list[IntArray] = []
    found = 0
    while found < samples:
        parts.append(_walk(ways, draws, rules))
        found += len(parts[-1])
    if len(parts) > 1:
        rows = np.concatenate(parts)
    else:
        rows = parts[0]
    return rows[shuffled_order(found, rules.seed + 1)]


def usable_documents(
    sizes: IntArray, documents: IntArray, least_sentences: int
) -> npt.NDArray[np.bool_]:
    """Which documents give samples: enough sentences, and none very long beside others [documents]."""
    counts = np.diff(documents)
    usable: npt.NDArray[np.bool_] = counts >= max(least_sentences, 1)
    begin, end = int(documents[0]), int(documents[-1])
    for first in range(begin, end, 1 << 20):
        block = sizes[first : min(first + (1 << 20), end)]
        if len(block) and int(block.max()) > LONG_SENTENCE:
            long = first + np.flatnonzero(block > LONG_SENTENCE)
            holders = np.unique(np.searchsorted(documents, long, side="right") - 1)
            usable[holders[counts[holders] > 1]] = False
    return usable


def _find_ways(sizes: IntArray, documents: IntArray, rules: MapRules) -> _Ways:
    usable = usable_documents(sizes, documents, rules.least_sentences)
    counts = np.diff(documents)[usable].astype(np.int64)
    if len(counts) == 0:
        raise DataError(
            f"none of the {len(usable)} documents has {rules.least_sentences} or more sentences and none longer than"
            f" {LONG_SENTENCE} tokens: make the data with `tr11 data preprocess --split-sentences`, or give more"
        )
    begins = np.asarray(documents)[:-1][usable].astype(np.int64)
    lasts = np.cumsum(counts + 1) - 1  # the place of each document's end
    places = int(lasts[-1]) + 1
    width = np.int32 if max(places, int(documents[-1])) < np.iinfo(np.int32).max else np.int64
    following = np.empty(places + 1, dtype=width)
    tokens = np.empty(places + 1, dtype=np.int64)
    origin = np.empty(places + 1, dtype=width)
    ends = np.zeros(places + 2, dtype=np.uint8)
    ends[lasts] = 1
    at = total = 0
    for first in range(0, len(counts), DOCUMENTS_AT_ONCE):
        group = slice(first, first + DOCUMENTS_AT_ONCE)
        total = _find_some(
            sizes,
            begins[group],
            lasts[group] - at,
            rules=rules,
            total=total,
            at=at,
            following=following,
            tokens=tokens,
            origin=origin,
        )
        at = int(lasts[group][-1]) + 1
    following[places], tokens[places], origin[places] = places, total, 0
    return _Ways(_as_array(following), _as_array(tokens), bytearray(ends), origin)


def _find_some(
    sizes: IntArray,
    begins: IntArray,
    lasts: IntArray,
    rules: MapRules,
    total: int,
    at: int,
    following: IntArray,
    tokens: IntArray,
    origin: IntArray,
) -> int:
    """Fill the ways of some documents, whose places begin at `at`; returns the tokens up to their
    end.

    begins: the first sentence of each document; lasts: the place of each one's end, counted from
    `at`.
    """
    count = int(lasts[-1]) + 1
    places = slice(at, at + count)
    spans = np.diff(lasts, prepend=-1)
    numbers = np.arange(count) + np.repeat(begins - (lasts + 1 - spans), spans)
    origin[places] = numbers
    held = np.zeros(count + 1, dtype=np.int64)
    inside = numbers.copy()
    inside[lasts] = 0  # of an end no sentence
    held[1:] = np.take(sizes, inside)
    held[1 + lasts] = 0
    before = np.cumsum(held)
    reached = np.empty(count, dtype=np.int64)
    for first in range(0, count, SEARCH_AT_ONCE):
        piece = slice(first, min(first + SEARCH_AT_ONCE, count))
        reached[piece] = np.searchsorted(before, before[piece] + rules.longest)
    np.maximum(
        reached, np.arange(rules.least_sentences, count + rules.least_sentences), out=reached
    )
    own_end = np.repeat(lasts, spans)
    result = np.where(reached > own_end - 2, own_end, reached)
    result[lasts] = lasts + 1
    following[places] = result + at
    tokens[places] = before[:-1] + total
    return total + int(before[-1])


def _as_array(values: IntArray) -> array[int]:
    """The same numbers, one of which is read in half the time."""
    result = array("i" if values.dtype == np.int32 else "q")
    result.frombytes(values.tobytes())
    return result


class _Draws:
    """The target lengths, one after the other: how many full ones come, and the short one behind
    them; 0 for none.
    """

    def __init__(self, rules: MapRules) -> None:
        self._random = np.random.RandomState(rules.seed)
        self._longest = rules.longest
        self._ratio = rules.ratio
        self._runs = self._all_runs()
        self._left: tuple[int, int] | None = None

    def next_run(self) -> tuple[int, int]:
        """Full samples, and the length of the short one that follows, or 0."""
        if self._left is not None:
            run, self._left = self._left, None
            return run
        return next(self._runs)

    def give_back(self, run: int, short: int) -> None:
        """So much of the last run was not used up."""
        self._left = (run, short)

    def _all_runs(self) -> Iterator[tuple[int, int]]:
        while True:
            if self._ratio == 0:
                yield DRAWS_AT_ONCE, 0
                continue
            numbers = self._random.randint(0, 1 << 32, DRAWS_AT_ONCE, dtype=np.uint32)
            short = np.flatnonzero(numbers % np.uint32(self._ratio) == 0)
            lengths = 2 + numbers[short] % np.uint32(self._longest - 1)
            runs = np.diff(short, prepend=-1) - 1
            yield from zip(runs.tolist(), lengths.tolist(), strict=True)
            yield DRAWS_AT_ONCE - 1 - (int(short[-1]) if len(short) else -1), 0


def _walk(ways: _Ways, draws: _Draws, rules: MapRules) -> IntArray:
    """The rows of one epoch, in order."""
    following, tokens, ends, least = ways.following, ways.tokens, ways.ends, rules.least_sentences
    # stepping from there leads there, so that a run may go on beyond the end
    places = len(following) - 1
    visited = array(following.typecode)
    short_turns: list[int] = []
    short_lengths: list[int] = []
    visit = visited.append
    place = 0
    while place < places:
        run, short = draws.next_run()
        tried = min(run, places - place)
        for _ in repeat(None, tried):
            visit(place)
            place = following[place]
        if place == places:
            beyond = 0
            while visited[-1] == places:
                visited.pop()
                beyond += 1
            draws.give_back(run - tried + beyond, short)
        elif short:
            visit(place)
            reached = following[place]
            if not ends[place]:
                short_turns.append(len(visited) - 1)
                short_lengths.append(short)
                if place + least < reached:
                    reached = bisect_left(tokens, tokens[place] + short, place + least, reached)
                    reached += ends[reached + 1]
            place = reached
    steps = np.frombuffer(visited, dtype=ways.origin.dtype)
    targets = np.full(len(steps), rules.longest, dtype=np.int64)
    targets[short_turns] = short_lengths
    begins = np.flatnonzero(np.frombuffer(ends, dtype=np.uint8)[steps] == 0)
    rows = np.empty(
        (len(begins), 3), dtype=np.uint32 if ways.origin.dtype == np.int32 else np.int64
    )
    rows[:, 0] = ways.origin[steps[begins]]
    # a sample is followed by another or by its document's end
    rows[:, 1] = ways.origin[steps[begins + 1]]
    rows[:, 2] = targets[begins]
    return rows
