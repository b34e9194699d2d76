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

WORDS = 312
MIDDLE = 156
STEP = WORDS - 1  # word k + 312 needs word k + 1, the oldest but one
STEPS_AT_ONCE = 64
_TWIST = np.uint64(0xB5026F5AA96619E9)
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)

Words = npt.NDArray[np.uint64]


class Mersenne64:
    """A stream of uint64: `take(n)` gives the next n of them."""

    def __init__(self, seed: int) -> None:
        state = [seed & 0xFFFFFFFFFFFFFFFF]
        for place in range(1, WORDS):
            last = state[-1]
            state.append((6364136223846793005 * (last ^ (last >> 62)) + place) & 0xFFFFFFFFFFFFFFFF)
        # the last 312, then what follows them
        self._words = np.empty(WORDS + STEP * STEPS_AT_ONCE, dtype=np.uint64)
        # f of the word 156 before, onwards
        self._twisted = np.empty(MIDDLE + STEP * STEPS_AT_ONCE, dtype=np.uint64)
        first = np.array(state, dtype=np.uint64)
        self._words[-WORDS:] = first
        # f(k - 156) of the first words, of which nothing is known but what they make: word(k + 156)
        # ^ word(k).
        self._twisted[-MIDDLE:] = first[MIDDLE:] ^ first[:MIDDLE]
        self._ready: Words = np.empty(0, dtype=np.uint64)

    def take(self, count: int) -> Words:
        """The next `count` numbers."""
        parts = [self._ready]
        have = len(self._ready)
        while have < count:
            parts.append(_tempered(self._more()))
            have += len(parts[-1])
        whole = np.concatenate(parts)
        self._ready = whole[count:]
        return whole[:count]

    def _more(self) -> Words:
        """The next words of the state, before tempering: a view that the next call overwrites."""
        words = self._words
        twisted = self._twisted
        words[:WORDS] = words[-WORDS:]
        twisted[:MIDDLE] = twisted[-MIDDLE:]
        for step in range(STEPS_AT_ONCE):
            at = step * STEP
            old = words[at : at + STEP]
            mixed = old & _UPPER
            mixed |= words[at + 1 : at + WORDS] & _LOWER
            odd = mixed & _ONE
            odd *= _TWIST
            mixed >>= _ONE
            mixed ^= odd
            twisted[at + MIDDLE : at + MIDDLE + STEP] = mixed
            mixed ^= old
            mixed ^= twisted[at : at + STEP]
            words[at + WORDS : at + WORDS + STEP] = mixed
        return words[WORDS:]


def _tempered(words: Words) -> Words:
    out = words ^ ((words >> np.uint64(29)) & np.uint64(0x5555555555555555))
    out ^= (out << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    out ^= (out << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    out ^= out >> np.uint64(43)
    return out


AT_ONCE = 1 << 16

IntArray = npt.NDArray[Any]


def shuffled_order(count: int, seed: int) -> IntArray:
    """Which of `count` things stands at each place after the shuffle of Megatron's sample maps
    [count].

    For i from count - 1 down to 1 the things at i and at j = (64-bit Mersenne number) mod (i + 1)
    change places.
    """
    partners = _partners(count, seed)
    return _exchange(partners)


def _partners(count: int, seed: int) -> IntArray:
    """The j of every place i [count]; place 0 keeps to itself."""
    numbers = Mersenne64(seed)
    dtype = np.uint32 if count < 1 << 32 else np.int64
    partners = np.zeros(count, dtype=dtype)
    for last in range(count - 1, 0, -AT_ONCE):
        first = max(last - AT_ONCE + 1, 1)
        places = np.arange(last, first - 1, -1, dtype=np.uint64)
        partners[first : last + 1] = (numbers.take(len(places)) % (places + np.uint64(1)))[::-1]
    return partners


def _exchange(partners: IntArray) -> IntArray:
    """The result of exchanging i with partners[i] <= i for i from the last place down to 1.

    What stands at a place p when the turn comes to i is what the turn before, the least i' > i with
    partners[i'] = p, has put there: what then stood at i'. If there was none, p's own thing stands
    there still. So every place takes what stood at another one, and chains of such places, a few
    long, are followed for all of them together.
    """
    count = len(partners)
    # of each place: the last turn that put something there
    came_from = np.arange(count, dtype=partners.dtype)
    # of each turn: the turn before it with the same partner, or the partner itself
    source = np.empty_like(partners)
    for end in range(count, 0, -AT_ONCE):
        begin = max(end - AT_ONCE, 0)
        turns = np.arange(end - 1, begin - 1, -1, dtype=partners.dtype)
        there = partners[begin:end][::-1]
        before = came_from[there]
        # of several equal ones the last assignment, which is the last turn, stays
        came_from[there] = turns
        overtaken = came_from[there] != turns
        if np.any(overtaken):
            _put_in_order(before, there, turns, overtaken)
        source[begin:end] = before[::-1]
    # A turn with itself as partner puts nothing anywhere: it took what stood there, which is what
    # the turn before put.
    places = np.arange(count, dtype=partners.dtype)
    itself = partners == places
    came_from[itself] = source[itself]
    stood = came_from
    while True:
        further = stood[stood]
        if np.array_equal(further, stood):
            break
        stood = further
    # a turn before this one, or the partner's own thing
    return np.where(source > places, stood[source], source)


def _put_in_order(
    before: IntArray, there: IntArray, turns: IntArray, overtaken: npt.NDArray[np.bool_]
) -> None:
    """Correct `before` where turns of one piece have the same partner: each follows the one that is
    next to it.
    """
    shared = np.flatnonzero(np.isin(there, there[overtaken]))
    order = shared[np.argsort(there[shared], kind="stable")]
    same = there[order[1:]] == there[order[:-1]]
    before[order[1:][same]] = turns[order[:-1][same]]


LONG_SENTENCE = 512  # tokens; a document of several sentences with a longer one is passed over
DRAWS_AT_ONCE = 1 << 18
DOCUMENTS_AT_ONCE = 1 << 12
SEARCH_AT_ONCE = 1 << 13


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
    begin = int(documents[0])
    end = int(documents[-1])
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
    following = ways.following
    tokens = ways.tokens
    ends = ways.ends
    least = rules.least_sentences
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
