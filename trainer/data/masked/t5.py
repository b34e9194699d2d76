"""Samples of T5 training: runs of words are cut out, each leaving a sentinel, and the decoder is to
say them.

The draws of randomness follow Megatron's, so the same sentences and seed give the same sample.
Where Megatron stops with an error, because the decoder is too short for all runs or there are fewer
sentinels than runs, a run is shortened to what fits, and the words of the runs behind it stay in
the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.contract.record import Record
from trainer.data.masked.bert import IGNORED, Sample
from trainer.data.masked.spans import Span, Tokens, budget, choose_spans, find_words, geometric_runs
from trainer.data.masked.vocabulary import MaskingVocabulary

SPECIAL_TOKENS = 2  # kept free in the encoder


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
