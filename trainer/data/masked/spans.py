"""Which tokens of a sample are masked: whole words, in runs of one or more, until the budget is
used up.

The draws of randomness follow Megatron's, so the same generator gives the same spans.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.data.masked.vocabulary import MaskingVocabulary

Tokens = npt.NDArray[np.int64]
WordCount = Callable[[np.random.RandomState], int]  # draws how many words a span begins with

BERT_LONGEST = 3
T5_LONGEST = 10
T5_STOP = 0.2  # of the geometric distribution


class Span(Record):
    """Positions of one run of masked words, ascending."""

    positions: tuple[int, ...]


def short_runs(random: np.random.RandomState) -> int:
    """1 to 3 words, n with a probability proportional to 1/n."""
    return 1 + int(_SHORT_SHARES.searchsorted(random.random_sample(), side="right"))


def geometric_runs(random: np.random.RandomState) -> int:
    """Geometric(0.2) words, at most 10: 4.46 on average."""
    return min(int(random.geometric(T5_STOP)), T5_LONGEST)


def _shares(longest: int) -> npt.NDArray[np.float64]:
    """The distribution function of n proportional to 1/n, rounded as numpy's `choice` does."""
    weights = 1.0 / np.arange(1, longest + 1)
    shares = np.cumsum(weights / weights.sum() / (weights / weights.sum()).sum())
    result: npt.NDArray[np.float64] = shares / shares[-1]
    return result


_SHORT_SHARES = _shares(BERT_LONGEST)


def budget(probability: float, target: int, length: int) -> float:
    """Tokens to mask at most in `length` tokens of a sample whose target is `target`; not always
    whole.
    """
    return min(probability * target, max(1, round(length * probability)))


def find_words(tokens: Tokens, vocabulary: MaskingVocabulary) -> list[list[int]]:
    """Positions of each word's pieces. A piece that continues a word belongs to the last one before
    it, if any does.

    [CLS] and [SEP] are no words.
    """
    continued = vocabulary.continues[tokens].tolist()
    special = ((tokens == vocabulary.cls) | (tokens == vocabulary.sep)).tolist()
    words: list[list[int]] = []
    for position, (joins, left_out) in enumerate(zip(continued, special, strict=True)):
        if left_out:
            continue
        if joins and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def choose_spans(
    words: list[list[int]],
    most: float,
    random: np.random.RandomState,
    word_count: WordCount,
    on_masked: Callable[[int], None] = lambda position: None,
) -> list[Span]:
    """Spans of together at most `most` tokens, none overlapping, in the order in which they were
    drawn.

    Every word, in shuffled order, begins a span of as many words as `word_count` draws, or of fewer
    if they do not fit. One that overlaps another is left out. `on_masked` is called for each
    position as it is chosen.
    """
    order = np.arange(len(words))
    random.shuffle(order)
    spans: list[Span] = []
    masked: set[int] = set()
    for first in order.tolist():
        if len(masked) >= most:
            break
        count = word_count(random)
        while count and len(masked) + sum(map(len, words[first : first + count])) > most:
            count -= 1
        positions = [position for word in words[first : first + count] for position in word]
        if not positions or not masked.isdisjoint(positions):
            continue
        masked.update(positions)
        for position in positions:
            on_masked(position)
        spans.append(Span(tuple(positions)))
    return spans
