"""Samples of T5: megatron-core's field by field, and what makes it stop: a short decoder, more
spans than sentinels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.masked.cases import made_sentences, vocabulary
from tests.trainer.data.masked.peer import sample_classes, their_samples
from trainer.data.masked.rules import (
    T5_LONGEST,
    Sample,
    Span,
    T5Rules,
    fitting_spans,
    geometric_runs,
    t5_sample,
)

LENGTH = 128
DECODER = 48
SEED = 77


def ours(
    sentences: list[Any],
    target: int,
    number: int,
    rules: T5Rules | None = None,
    sentinels: int = 38,
) -> Sample:
    random = np.random.RandomState((SEED + number) % 2**32)
    parts = [np.asarray(part, dtype=np.uint16) for part in sentences]
    return t5_sample(
        parts, target, rules or T5Rules(LENGTH, DECODER, 0.15), vocabulary(sentinels), random
    )


def rebuilt(sample: Sample) -> list[int]:
    """The text: of each sentinel in the encoder, what follows it in the decoder."""
    spans: dict[int, list[int]] = {}
    for token in sample["text_dec"][1 : int(sample["dec_mask"].sum())].tolist():
        if token >= 262:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    encoder = sample["text_enc"][: int(sample["enc_mask"].sum())].tolist()
    return [piece for token in encoder for piece in spans.get(token, [token])]


def test_fields_equal_megatron() -> None:
    sentences, random = made_sentences(800, 40, 1), np.random.RandomState(2)
    firsts = random.randint(0, 780, 300)
    rows = np.stack(
        [firsts, firsts + random.randint(1, 12, 300), random.randint(2, LENGTH - 1, 300)], axis=1
    )
    theirs = their_samples(
        sample_classes()[1], sentences, rows, vocabulary(), SEED, sequence_length=LENGTH, masking_probability=0.15,
        sequence_length_encoder=LENGTH, sequence_length_decoder=DECODER, masking_max_ngram=T5_LONGEST,
        masking_use_geometric_distribution=True,
    )  # fmt: skip
    for number, (first, end, target) in enumerate(rows.tolist()):
        found, expected = ours(sentences[first:end], target, number), theirs[number]
        for name, values in found.items():
            assert np.array_equal(values, expected[name]), (number, name)


@given(
    sentences=st.lists(st.lists(st.integers(5, 259), max_size=700), max_size=6),
    target=st.integers(2, LENGTH - 2),
    number=st.integers(0, 1000),
    decoder=st.integers(3, 40),
    sentinels=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_any_sentences_make_a_sound_sample(
    *, sentences: list[list[int]], target: int, number: int, decoder: int, sentinels: int
) -> None:
    sample = ours(sentences, target, number, T5Rules(LENGTH, decoder, 0.5), sentinels)
    text = [token for sentence in sentences for token in sentence][:target]
    assert rebuilt(sample) == text
    inside = int(sample["dec_mask"].sum())
    assert sample["text_dec"][0] == 260 and sample["labels"][inside - 1] == 261
    assert np.array_equal(sample["labels"][: inside - 1], sample["text_dec"][1:inside])
    assert np.all(sample["labels"][inside:] == -1) and np.all(sample["text_dec"][inside:] == 0)
    assert np.array_equal(sample["loss_mask"], sample["dec_mask"])
    used = [token for token in sample["text_dec"].tolist() if token >= 262]
    assert used == list(range(262, 262 + len(used))) and len(used) <= sentinels


def test_a_full_decoder_shortens_the_last_span() -> None:
    spans = [Span((0, 1, 2)), Span((5, 6, 7, 8)), Span((10,))]
    assert fitting_spans(spans, 100, 12) == spans
    assert fitting_spans(spans, 100, 8) == [spans[0], Span((5, 6))]
    assert fitting_spans(spans, 100, 6) == fitting_spans(spans, 100, 5) == [spans[0]]
    assert fitting_spans(spans, 1, 100) == [spans[0]]


@pytest.mark.parametrize(
    ("share", "decoder", "error"), [(0.6, 1024, IndexError), (0.3, 256, AssertionError)]
)
def test_what_stops_megatron_is_shortened(
    share: float, decoder: int, error: type[Exception]
) -> None:
    """More than 100 spans for 100 sentinels, and more tokens of spans than a decoder holds."""
    sentences = [np.full(1022, 5, dtype=np.uint16)]
    theirs = their_samples(
        sample_classes()[1], sentences, np.array([[0, 1, 1022]]), vocabulary(100), SEED, sequence_length=1024,
        masking_probability=share, sequence_length_encoder=1024, sequence_length_decoder=decoder,
        masking_max_ngram=T5_LONGEST, masking_use_geometric_distribution=True,
    )  # fmt: skip
    with pytest.raises(error):
        theirs[0]
    sample = ours(sentences, 1022, 0, T5Rules(1024, decoder, share), sentinels=100)
    assert rebuilt(sample) == [5] * 1022
    used = {token for token in sample["text_dec"].tolist() if token >= 262}
    assert (
        len(used) == 100
        if error is IndexError
        else int(sample["dec_mask"].sum()) in (decoder - 1, decoder)
    )


@pytest.mark.parametrize("sentences", [[], [[]], [[], []]])
def test_no_tokens_are_an_empty_sample(sentences: list[list[int]]) -> None:
    sample = ours(sentences, 20, 1)
    assert sample["enc_mask"].sum() == 0
    assert sample["dec_mask"].sum() == 1 and sample["labels"][0] == 261


def test_runs_are_geometric_and_at_most_ten() -> None:
    random = np.random.RandomState(0)
    drawn = [geometric_runs(random) for _ in range(20_000)]
    # its mean, to five standard deviations
    assert max(drawn) == T5_LONGEST and abs(np.mean(drawn) - 4.463) < 0.1
