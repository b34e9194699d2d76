"""Samples of BERT training: [CLS] A [SEP] B [SEP], some words masked, the segments perhaps in the
wrong order.

The draws of randomness follow Megatron's, so the same sentences and seed give the same sample.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.data.masked.spans import Tokens, budget, choose_spans, find_words, short_runs
from trainer.data.masked.vocabulary import MaskingVocabulary

SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
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
    tokens = np.concatenate(
        ([vocabulary.cls], first, sep, *((second, sep) if len(second) else ()))
    ).astype(np.int64)
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
    first, second = _joined(sentences[:pivot]), _joined(sentences[pivot:])
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
