"""The order in which a Fisher-Yates shuffle leaves things, without going through it one exchange
after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
        words, twisted = self._words, self._twisted
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
