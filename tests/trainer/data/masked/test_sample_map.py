"""Sample maps: the walk by loops, megatron-core's compiled builder, its shuffle, and what is
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.data.masked.cases import walk
from tests.trainer.data.masked.peer import their_map
from trainer.contract.errors import DataError
from trainer.data.masked import sample_map
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
