"""Samples of BERT: megatron-core's field by field, their statistics, and short, empty and over-long
sentences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.masked.cases import SIZE, WORDS, made_sentences, vocabulary
from tests.trainer.data.masked.peer import sample_classes, their_samples
from trainer.data.masked.rules import BertRules, Sample, bert_sample, budget

LENGTH = 64
SEED = 2**32 - 50  # the sum with a sample's number goes beyond 32 bits
SENTENCES = st.lists(st.lists(st.integers(5, 259), max_size=90), min_size=1, max_size=8)


def ours(sentences: list[Any], target: int, number: int, ordered: bool = True) -> Sample:
    random = np.random.RandomState((SEED + number) % 2**32)
    rules = BertRules(LENGTH, 0.15, ordered)
    return bert_sample(
        [np.asarray(part, dtype=np.uint16) for part in sentences],
        target,
        rules,
        vocabulary(),
        random,
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_fields_equal_megatron(ordered: bool) -> None:
    sentences, random = made_sentences(800, 40, 1), np.random.RandomState(2)
    firsts = random.randint(0, 780, 300)
    counts, targets = (
        random.randint(2 if ordered else 1, 8, 300),
        random.randint(2, LENGTH - 2, 300),
    )
    rows = np.stack([firsts, firsts + counts, targets], axis=1)
    theirs = their_samples(
        sample_classes()[0], sentences, rows, vocabulary(), SEED, sequence_length=LENGTH, masking_probability=0.15,
        masking_max_ngram=3, masking_use_geometric_distribution=False, classification_head=ordered,
    )  # fmt: skip
    for number, (first, end, target) in enumerate(rows.tolist()):
        found, expected = ours(sentences[first:end], target, number, ordered), theirs[number]
        for name in ("text", "types", "labels", "is_random", "loss_mask"):
            assert np.array_equal(found[name], expected[name]), (number, name)
        # A word that a draw made [PAD] is hidden from their model; ours counts to the last token.
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
        sample = ours(sentences[number * 8 : number * 8 + 8], LENGTH - 3, number)
        chosen = sample["loss_mask"] == 1
        text, labels = sample["text"][chosen], sample["labels"][chosen]
        assert np.array_equal(chosen, sample["labels"] != -1) and len(labels) <= budget(
            0.15, LENGTH - 3, LENGTH
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
    target=st.integers(2, LENGTH - 3),
    number=st.integers(0, 1000),
    ordered=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_sentences_make_a_sound_sample(
    *, sentences: list[list[int]], target: int, number: int, ordered: bool
) -> None:
    ordered = ordered and len(sentences) > 1
    sample = ours(sentences, target, number, ordered)
    again = ours(sentences, target, number, ordered)
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
    assert budget(0.15, 6, 9) < 1 and ours([[5, 6], [7]], 6, 1)["loss_mask"].sum() == 0
    assert ours([[], []], 20, 1)["padding_mask"].sum() == 2  # [CLS] [SEP]
