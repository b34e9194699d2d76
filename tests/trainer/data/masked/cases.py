"""A made vocabulary, sentences of its words, and maps of them by loops alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trainer.data.masked.sample_map import LONG_SENTENCE, MapRules
from trainer.data.masked.vocabulary import MaskingVocabulary

SIZE = 400
WORDS = range(5, 200)
PIECES = range(200, 260)  # continue a word


def vocabulary(sentinels: int = 38) -> MaskingVocabulary:
    continues = np.isin(np.arange(SIZE), PIECES)
    return MaskingVocabulary(
        size=SIZE, cls=2, sep=3, mask=4, pad=0, begin=260, end=261, sentinels=tuple(range(262, 262 + sentinels)),
        continuations=np.packbits(continues).tobytes(),
    )  # fmt: skip


def made_sentences(count: int, longest: int, seed: int) -> list[np.ndarray]:
    random = np.random.RandomState(seed)
    lengths = random.randint(1, longest + 1, count)
    return [
        random.randint(WORDS.start, PIECES.stop, length).astype(np.uint16) for length in lengths
    ]


def walk(
    sizes: Sequence[int], documents: Sequence[int], samples: int, rules: MapRules
) -> list[tuple[int, int, int]]:
    """The rows in order, before they are shuffled: document by document, sentence by sentence."""
    random = np.random.RandomState(rules.seed)

    def target() -> int:
        if rules.ratio == 0:
            return rules.longest
        number = int(random.randint(0, 2**32, dtype=np.uint32))
        return 2 + number % (rules.longest - 1) if number % rules.ratio == 0 else rules.longest

    rows: list[tuple[int, int, int]] = []
    while len(rows) < samples:
        for first, end in pairwise(documents):
            held = sizes[first:end]
            if end - first < rules.least_sentences or end == first:
                continue
            if end - first > 1 and max(held) > LONG_SENTENCE:
                continue
            begin, tokens, wanted = first, 0, target()
            for sentence in range(first, end):
                tokens += sizes[sentence]
                left = end - sentence - 1
                whole = (
                    tokens >= wanted and left > 1 and sentence + 1 - begin >= rules.least_sentences
                )
                if whole or left == 0:
                    rows.append((begin, sentence + 1, wanted))
                    begin, tokens, wanted = sentence + 1, 0, target()
    return rows
