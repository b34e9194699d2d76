"""The 64-bit Mersenne Twister of C++ (`std::mt19937_64`), many numbers at a time; numpy has the 32-bit one alone.

Formula: Nishimura and Matsumoto's mt19937-64, seeded as the C++ standard says. With f(k) = twist of the top bits of
word k and the rest of word k + 1, word k + 312 is word(k + 156) ^ f(k). Put into itself once, word(k + 156) is
word(k) ^ f(k - 156), so that 311 words, not 156, follow from what is known: half the calls into numpy.
"""

from __future__ import annotations

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
        self._words = np.empty(WORDS + STEP * STEPS_AT_ONCE, dtype=np.uint64)  # the last 312, then what follows them
        self._twisted = np.empty(MIDDLE + STEP * STEPS_AT_ONCE, dtype=np.uint64)  # f of the word 156 before, onwards
        first = np.array(state, dtype=np.uint64)
        self._words[-WORDS:] = first
        # f(k - 156) of the first words, of which nothing is known but what they make: word(k + 156) ^ word(k).
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
