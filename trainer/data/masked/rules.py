"""How samples of masked training are made: the words and spans that are hidden, a BERT's pair of
sentences, a T5's two sides.

The draws of randomness follow Megatron's, so the same generator gives the same spans.

The draws of randomness follow Megatron's, so the same sentences and seed give the same sample.
Where Megatron stops with an error, because the decoder is too short for all runs or there are fewer
sentinels than runs, a run is shortened to what fits, and the words of the runs behind it stay in
the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


BERT_SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
# of the chosen tokens become [MASK]; half of the others any token, the rest stay
MASKED_SHARE = 0.8
IGNORED = -1  # the label where nothing is predicted

Sample = dict[str, npt.NDArray[np.int64]]


class BertRules(Record):
    """How samples are made. `orders_sentences`: two segments, of which the model says whether they
    were exchanged.
    """

    sequence_length: int
    mask_probability: float
    orders_sentences: bool


def bert_sample(
    sentences: list[Tokens],
    target: int,
    rules: BertRules,
    vocabulary: MaskingVocabulary,
    random: np.random.RandomState,
) -> Sample:
    """One sample of some sentences, of which at most `target` tokens are kept; int64 arrays
    [sequence_length].

    `text` masked tokens, padded; `types` 0 of the first segment, 1 of the second; `labels` the
    masked tokens, elsewhere -1; `loss_mask` 1 where a label is; `padding_mask` 1 up to the last
    token; `is_random` [] whether the segments are exchanged.
    """
    first, second, exchanged = _cut(sentences, rules.orders_sentences, random)
    first, second = _trim(first, second, target, random)
    sep = np.array([vocabulary.sep])
    pieces = [np.array([vocabulary.cls]), first, sep]
    if len(second):
        pieces += [second, sep]
    tokens = np.concatenate(pieces).astype(np.int64)
    length = len(tokens)
    text = np.full(rules.sequence_length, vocabulary.pad, dtype=np.int64)
    text[:length] = tokens
    labels = np.full(rules.sequence_length, IGNORED, dtype=np.int64)

    def mask(position: int) -> None:
        labels[position] = tokens[position]
        if random.random_sample() < MASKED_SHARE:
            text[position] = vocabulary.mask
        elif random.random_sample() >= 0.5:
            text[position] = random.randint(0, vocabulary.size)

    most = budget(rules.mask_probability, target, length)
    choose_spans(
        find_words(tokens, vocabulary), most, random, word_count=short_runs, on_masked=mask
    )
    places = np.arange(rules.sequence_length)
    return {
        "text": text,
        "types": ((places >= len(first) + 2) & (places < length)).astype(np.int64),
        "labels": labels,
        "is_random": np.array(exchanged, dtype=np.int64),
        "loss_mask": (labels != IGNORED).astype(np.int64),
        "padding_mask": (places < length).astype(np.int64),
    }


def _cut(
    sentences: list[Tokens], orders_sentences: bool, random: np.random.RandomState
) -> tuple[Tokens, Tokens, bool]:
    """Two segments, cut between two sentences, and whether they were exchanged; without order one
    segment.
    """
    if not orders_sentences:
        return _joined(sentences), _joined([]), False
    if len(sentences) > 2:
        pivot = int(random.randint(1, len(sentences)))
    else:
        pivot = 1
    exchanged = bool(random.random_sample() < 0.5)
    first = _joined(sentences[:pivot])
    second = _joined(sentences[pivot:])
    if exchanged:
        return (second, first, True)
    return (first, second, False)


def _joined(sentences: list[Tokens]) -> Tokens:
    if sentences:
        return np.concatenate(sentences)
    return np.empty(0, dtype=np.int64)


def _trim(
    first: Tokens, second: Tokens, target: int, random: np.random.RandomState
) -> tuple[Tokens, Tokens]:
    """The segments without what is too much: one token of the longer one at a time, from either of
    its ends.
    """
    excess = max(0, len(first) + len(second) - target)
    bounds = ([0, len(first)], [0, len(second)])
    for at_front in (random.random_sample(excess) < 0.5).tolist():
        if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0]:
            longer = bounds[0]
        else:
            longer = bounds[1]
        if at_front:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]


T5_SPECIAL_TOKENS = 2  # kept free in the encoder


class T5Rules(Record):
    """How samples are made. Lengths in tokens."""

    sequence_length: int
    decoder_sequence_length: int
    mask_probability: float


def t5_sample(
    sentences: list[Tokens],
    target: int,
    rules: T5Rules,
    vocabulary: MaskingVocabulary,
    random: np.random.RandomState,
) -> Sample:
    """One sample of some sentences, of which the first `target` tokens are kept; int64 arrays.

    `text_enc`, `enc_mask` [sequence_length]: the text with a sentinel for each run, padded; 1 up to
    its last token. `text_dec`, `labels`, `loss_mask`, `dec_mask` [decoder_sequence_length]: begin,
    sentinel, run, sentinel, run, ...; the same one further with the end behind it, -1 beyond; 1 up
    to the last token.
    """
    if sentences:
        tokens = np.concatenate(sentences).astype(np.int64)[:target]
    else:
        tokens = np.empty(0, dtype=np.int64)
    most = budget(rules.mask_probability, target, len(tokens))
    chosen = choose_spans(find_words(tokens, vocabulary), most, random, geometric_runs)
    ascending = sorted(chosen, key=lambda span: span.positions[0])
    spans = fitting_spans(ascending, len(vocabulary.sentinels), rules.decoder_sequence_length)
    encoder: list[int] = []
    decoder = [vocabulary.begin]
    done = 0
    for span, sentinel in zip(spans, vocabulary.sentinels, strict=False):
        encoder += [*tokens[done : span.positions[0]].tolist(), sentinel]
        decoder += [sentinel, *tokens[list(span.positions)].tolist()]
        done = span.positions[-1] + 1
    encoder += tokens[done:].tolist()
    labels = [*decoder[1:], vocabulary.end]
    longest = rules.decoder_sequence_length
    inside = (np.arange(longest) < len(decoder)).astype(np.int64)
    return {
        "text_enc": _padded(encoder, rules.sequence_length, vocabulary.pad),
        "text_dec": _padded(decoder, longest, vocabulary.pad),
        "labels": _padded(labels, longest, IGNORED),
        "loss_mask": inside,
        "enc_mask": (np.arange(rules.sequence_length) < len(encoder)).astype(np.int64),
        "dec_mask": inside.copy(),
    }


def fitting_spans(spans: Sequence[Span], sentinels: int, decoder_length: int) -> list[Span]:
    """The first of the spans for which there are sentinels and room in the decoder; the last one
    may be shortened.
    """
    fitting = []
    room = decoder_length - 1  # begin; and the end of the labels, which are as long
    for span in spans[:sentinels]:
        kept = span.positions[: max(0, room - 1)]
        if not kept:
            break
        fitting.append(Span(kept))
        room -= 1 + len(kept)
    return fitting


def _padded(tokens: list[int], length: int, value: int) -> Tokens:
    row = np.full(length, value, dtype=np.int64)
    row[: len(tokens)] = tokens
    return row
