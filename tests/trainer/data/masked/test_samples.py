"""Sample maps, and samples of BERT and T5: those of megatron-core field by field, their statistics, and
short, empty and over-long sentences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.trainer.data.masked.cases import SIZE, WORDS, made_sentences, vocabulary, walk
from tests.trainer.data.masked.peer import sample_classes, their_map, their_samples
from trainer.contract.errors import DataError
from trainer.data.masked import sample_map
from trainer.data.masked.rules import (
    T5_LONGEST,
    BertRules,
    Sample,
    Span,
    T5Rules,
    bert_sample,
    budget,
    fitting_spans,
    geometric_runs,
    t5_sample,
)
from trainer.data.masked.sample_map import MapRules, Mersenne64, build_sample_map, shuffled_order

RULES = st.builds(
    MapRules,
    longest=st.integers(2, 150),
    short_probability=st.sampled_from([0.0, 0.03, 0.1, 0.4, 1.0]),
    least_sentences=st.integers(1, 2),
    seed=st.integers(1, 2**31 - 2),
)
# Documents as the lengths of their sentences; none, one and very long ones among them.
CORPORA = st.lists(
    st.lists(st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513, 900])), max_size=25),
    min_size=1,
    max_size=20,
)
# the first of std::mt19937_64(5489), its default seed
TWO_NUMBERS = [14514284786278117030, 4620546740167642908]


def laid_out(corpus: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array([size for document in corpus for size in document], dtype=np.int32)
    return sizes, np.cumsum([0, *map(len, corpus)], dtype=np.int64)


def test_numbers_are_those_of_the_standard() -> None:
    numbers = Mersenne64(5489)
    assert numbers.take(2).tolist() == TWO_NUMBERS
    # the 10,000th, which the C++ standard states
    assert int(numbers.take(9998)[-1]) == 9981545732273789042


def test_numbers_do_not_depend_on_how_they_are_taken() -> None:
    whole, parts = Mersenne64(7).take(70_000), Mersenne64(7)
    taken = [parts.take(count) for count in (0, 1, 311, 312, 19_904, 0, 40_000, 9_472)]
    assert np.array_equal(np.concatenate(taken), whole)


@given(count=st.integers(0, 400), seed=st.integers(0, 2**32), at_once=st.integers(1, 90))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_shuffle_is_the_exchanges_one_by_one(
    *, monkeypatch: pytest.MonkeyPatch, count: int, seed: int, at_once: int
) -> None:
    monkeypatch.setattr(sample_map, "AT_ONCE", at_once)
    things = list(range(count))
    numbers = iter(Mersenne64(seed).take(max(count - 1, 0)).tolist())
    for last in range(count - 1, 0, -1):
        other = next(numbers) % (last + 1)
        things[last], things[other] = things[other], things[last]
    assert shuffled_order(count, seed).tolist() == things


@given(
    corpus=CORPORA,
    rules=RULES,
    samples=st.integers(1, 120),
    at_once=st.sampled_from([3, 64, 1 << 14]),
)
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_rows_are_those_of_the_walk_and_of_megatron(
    *,
    monkeypatch: pytest.MonkeyPatch,
    corpus: list[list[int]],
    rules: MapRules,
    samples: int,
    at_once: int,
) -> None:
    monkeypatch.setattr(sample_map, "DRAWS_AT_ONCE", at_once)
    monkeypatch.setattr(sample_map, "DOCUMENTS_AT_ONCE", at_once)
    sizes, documents = laid_out(corpus)
    try:
        rows = build_sample_map(sizes, documents, samples=samples, rules=rules)
    except DataError:
        usable = [
            held
            for held in corpus
            if len(held) >= rules.least_sentences and (len(held) == 1 or max(held) <= 512)
        ]
        assert not usable
        return
    walked = walk(sizes.tolist(), documents.tolist(), samples, rules)
    assert sorted(map(tuple, rows.tolist())) == sorted(walked)
    assert [
        walked[place] for place in shuffled_order(len(walked), rules.seed + 1).tolist()
    ] == list(map(tuple, rows.tolist()))
    theirs = their_map(sizes, documents, samples, rules)
    assert rows.dtype == theirs.dtype and np.array_equal(rows, theirs)


@pytest.mark.parametrize("least", [1, 2])
def test_a_part_of_a_larger_corpus_equals_megatron(least: int) -> None:
    """Documents from the middle of a data set, several epochs, hundreds of thousands of draws."""
    random = np.random.RandomState(3)
    counts = np.where(
        random.rand(20_000) < 0.2, random.randint(0, 3, 20_000), random.randint(3, 60, 20_000)
    )
    documents = np.cumsum([0, *counts])
    sizes = random.randint(1, 60, documents[-1]).astype(np.int32)
    sizes[random.randint(0, len(sizes), 300)] = 700
    rules = MapRules(125, 0.1, least, 1234)
    rows = build_sample_map(sizes, documents[500:18_001], samples=400_000, rules=rules)
    assert len(rows) > 400_000
    assert np.array_equal(rows, their_map(sizes, documents[500:18_001], 400_000, rules))


def test_data_without_any_usable_document_is_refused() -> None:
    rules = MapRules(125, 0.1, 2, 1)
    for corpus in ([[5], [7]], [[], []], [[600, 3]]):
        sizes, documents = laid_out(corpus)
        with pytest.raises(
            DataError,
            match=r"none of the \d documents has 2 or more sentences .* --split-sentences",
        ):
            build_sample_map(sizes, documents, samples=1, rules=rules)
    sizes, documents = laid_out([[600]])
    assert build_sample_map(
        sizes, documents, samples=1, rules=MapRules(126, 0.0, 1, 1)
    ).tolist() == [[0, 1, 126]]
    with pytest.raises(DataError, match="ask for at least 1"):
        build_sample_map(sizes, documents, samples=0, rules=rules)


BERT_LENGTH = 64
BERT_SEED = 2**32 - 50  # the sum with a sample's number goes beyond 32 bits
SENTENCES = st.lists(st.lists(st.integers(5, 259), max_size=90), min_size=1, max_size=8)


def bert(sentences: list[Any], target: int, number: int, ordered: bool = True) -> Sample:
    random = np.random.RandomState((BERT_SEED + number) % 2**32)
    rules = BertRules(BERT_LENGTH, 0.15, ordered)
    return bert_sample(
        [np.asarray(part, dtype=np.uint16) for part in sentences],
        target,
        rules,
        vocabulary(),
        random,
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_fields_of_bert_equal_megatron(ordered: bool) -> None:
    sentences, random = made_sentences(800, 40, 1), np.random.RandomState(2)
    firsts = random.randint(0, 780, 300)
    counts, targets = (
        random.randint(2 if ordered else 1, 8, 300),
        random.randint(2, BERT_LENGTH - 2, 300),
    )
    rows = np.stack([firsts, firsts + counts, targets], axis=1)
    theirs = their_samples(
        sample_classes()[0], sentences, rows, vocabulary(), BERT_SEED, sequence_length=BERT_LENGTH, masking_probability=0.15,
        masking_max_ngram=3, masking_use_geometric_distribution=False, classification_head=ordered,
    )  # fmt: skip
    for number, (first, end, target) in enumerate(rows.tolist()):
        found, expected = bert(sentences[first:end], target, number, ordered), theirs[number]
        for name in ("text", "types", "labels", "is_random", "loss_mask"):
            assert np.array_equal(found[name], expected[name]), (number, name)
        # A word that a draw made [PAD] is hidden from their model; bert counts to the last token.
        hidden = found["padding_mask"] != expected["padding_mask"]
        assert np.all(found["text"][hidden] == 0) and np.all(found["labels"][hidden] != -1)


def test_shares_of_the_masked_tokens() -> None:
    """Of tokens that are no specials 15 % are masked; 80 % of them [MASK], 10 % the same, 10 % any;
    orders even.

    Bounds: four standard deviations of a binomial distribution of so many draws; the masked share
    is less than the budget's by at most one whole word a sample.
    """
    sentences = made_sentences(4000, 30, 3)
    masks = kept = others = exchanged = labelled = tokens = 0
    samples = 400
    for number in range(samples):
        sample = bert(sentences[number * 8 : number * 8 + 8], BERT_LENGTH - 3, number)
        chosen = sample["loss_mask"] == 1
        text, labels = sample["text"][chosen], sample["labels"][chosen]
        assert np.array_equal(chosen, sample["labels"] != -1) and len(labels) <= budget(
            0.15, BERT_LENGTH - 3, BERT_LENGTH
        )
        labelled += len(labels)
        tokens += int(sample["padding_mask"].sum())
        masks += int(np.sum(text == 4))
        kept += int(np.sum(text == labels))
        others += int(np.sum((text != 4) & (text != labels)))
        exchanged += int(sample["is_random"])

    def is_near(count: int, of: int, share: float) -> bool:
        return abs(count / of - share) < 4 * (share * (1 - share) / of) ** 0.5

    # A draw of any token gives [MASK] or the same one now and then.
    assert is_near(masks, labelled, 0.8 + 0.1 / SIZE) and is_near(kept, labelled, 0.1 + 0.1 / SIZE)
    assert is_near(others, labelled, 0.1 * (1 - 2 / SIZE)) and is_near(exchanged, samples, 0.5)
    assert 0.11 < labelled / tokens <= 0.15


@given(
    sentences=SENTENCES,
    target=st.integers(2, BERT_LENGTH - 3),
    number=st.integers(0, 1000),
    ordered=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_sentences_make_a_sound_sample_of_bert(
    *, sentences: list[list[int]], target: int, number: int, ordered: bool
) -> None:
    ordered = ordered and len(sentences) > 1
    sample = bert(sentences, target, number, ordered)
    again = bert(sentences, target, number, ordered)
    assert all(
        np.array_equal(sample[name], again[name]) and sample[name].dtype == np.int64
        for name in sample
    )
    length = int(sample["padding_mask"].sum())
    original = np.where(sample["labels"] >= 0, sample["labels"], sample["text"])
    assert np.all(original[length:] == 0) and np.all(sample["types"][length:] == 0)
    assert original[0] == 2 and original[length - 1] == 3
    seps = np.flatnonzero(original == 3)
    words = sum(map(len, sentences))
    assert length == min(words, target) + 1 + len(seps)
    # Both segments are runs of the document, the second one's types are 1.
    assert np.array_equal(np.flatnonzero(sample["types"]), np.arange(seps[0] + 1, length))
    cut = original[1 : seps[0]].tolist(), original[seps[0] + 1 : length - 1].tolist()
    text = [token for sentence in sentences for token in sentence]
    for part in cut:
        assert any(text[at : at + len(part)] == part for at in range(len(text) + 1))
    assert int(sample["is_random"]) in ((0, 1) if ordered else (0,))
    # Words are masked whole: a piece that continues a word goes with the piece before it.
    chosen = sample["loss_mask"]
    inner = [
        at
        for at in range(2, length)
        if 200 <= original[at] < 260 and WORDS.start <= original[at - 1] < 260
    ]
    assert all(chosen[at] == chosen[at - 1] for at in inner)
    assert chosen.sum() <= budget(0.15, target, length)


def test_a_budget_below_one_token_masks_none() -> None:
    assert budget(0.15, 6, 9) < 1 and bert([[5, 6], [7]], 6, 1)["loss_mask"].sum() == 0
    assert bert([[], []], 20, 1)["padding_mask"].sum() == 2  # [CLS] [SEP]


T5_LENGTH = 128
DECODER = 48
T5_SEED = 77


def t5(
    sentences: list[Any],
    target: int,
    number: int,
    rules: T5Rules | None = None,
    sentinels: int = 38,
) -> Sample:
    random = np.random.RandomState((T5_SEED + number) % 2**32)
    parts = [np.asarray(part, dtype=np.uint16) for part in sentences]
    return t5_sample(
        parts, target, rules or T5Rules(T5_LENGTH, DECODER, 0.15), vocabulary(sentinels), random
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


def test_fields_of_t5_equal_megatron() -> None:
    sentences, random = made_sentences(800, 40, 1), np.random.RandomState(2)
    firsts = random.randint(0, 780, 300)
    rows = np.stack(
        [firsts, firsts + random.randint(1, 12, 300), random.randint(2, T5_LENGTH - 1, 300)], axis=1
    )
    theirs = their_samples(
        sample_classes()[1], sentences, rows, vocabulary(), T5_SEED, sequence_length=T5_LENGTH, masking_probability=0.15,
        sequence_length_encoder=T5_LENGTH, sequence_length_decoder=DECODER, masking_max_ngram=T5_LONGEST,
        masking_use_geometric_distribution=True,
    )  # fmt: skip
    for number, (first, end, target) in enumerate(rows.tolist()):
        found, expected = t5(sentences[first:end], target, number), theirs[number]
        for name, values in found.items():
            assert np.array_equal(values, expected[name]), (number, name)


@given(
    sentences=st.lists(st.lists(st.integers(5, 259), max_size=700), max_size=6),
    target=st.integers(2, T5_LENGTH - 2),
    number=st.integers(0, 1000),
    decoder=st.integers(3, 40),
    sentinels=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_any_sentences_make_a_sound_sample_of_t5(
    *, sentences: list[list[int]], target: int, number: int, decoder: int, sentinels: int
) -> None:
    sample = t5(sentences, target, number, T5Rules(T5_LENGTH, decoder, 0.5), sentinels)
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
        sample_classes()[1], sentences, np.array([[0, 1, 1022]]), vocabulary(100), T5_SEED, sequence_length=1024,
        masking_probability=share, sequence_length_encoder=1024, sequence_length_decoder=decoder,
        masking_max_ngram=T5_LONGEST, masking_use_geometric_distribution=True,
    )  # fmt: skip
    with pytest.raises(error):
        theirs[0]
    sample = t5(sentences, 1022, 0, T5Rules(1024, decoder, share), sentinels=100)
    assert rebuilt(sample) == [5] * 1022
    used = {token for token in sample["text_dec"].tolist() if token >= 262}
    assert (
        len(used) == 100
        if error is IndexError
        else int(sample["dec_mask"].sum()) in (decoder - 1, decoder)
    )


@pytest.mark.parametrize("sentences", [[], [[]], [[], []]])
def test_no_tokens_are_an_empty_sample(sentences: list[list[int]]) -> None:
    sample = t5(sentences, 20, 1)
    assert sample["enc_mask"].sum() == 0
    assert sample["dec_mask"].sum() == 1 and sample["labels"][0] == 261


def test_runs_are_geometric_and_at_most_ten() -> None:
    random = np.random.RandomState(0)
    drawn = [geometric_runs(random) for _ in range(20_000)]
    # its mean, to five standard deviations
    assert max(drawn) == T5_LONGEST and abs(np.mean(drawn) - 4.463) < 0.1
