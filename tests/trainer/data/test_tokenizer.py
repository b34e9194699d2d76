"""Tokenizers: any text comes back, sizes are honest, foreign and damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.tokenizer import is_trained, load_tokenizer, train_tokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back(tokenizer_folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocabulary_size for token in ids)


def test_size_and_special_tokens(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder / "tokenizer.json")
    assert tokenizer.vocab_size == tokenizer.vocabulary_size == 320
    assert tokenizer.eod_id == 0 and tokenizer.end_token == "<|endoftext|>"
    assert tokenizer.encode_batch(["a<|endoftext|>b"])[0].count(0) == 1
    assert len(tokenizer.encode_batch(["alpha beta"])[0]) < len("alpha beta")


def test_training_is_repeatable(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    digests = {train_tokenizer(iter(texts(200)), 300, folder).digest() for folder in folders}
    assert len(digests) == 1


def test_extra_special_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(texts(200)), 300, tmp_path, extra_special_tokens=["<|mask|>"])
    assert tokenizer.vocabulary_size == 300
    assert tokenizer.encode_batch(["<|mask|>"]) == [[2]]


def test_transformers_reads_it(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    ours = load_tokenizer(tokenizer_folder)
    assert theirs.eos_token_id == ours.eod_id and len(theirs) == ours.vocabulary_size
    assert theirs("alpha beta\n  x")["input_ids"] == ours.encode_batch(["alpha beta\n  x"])[0]


def test_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 258"):
        train_tokenizer(iter(texts(10)), 257, tmp_path)
    with pytest.raises(DataError, match=r"teaches only [0-9]+ tokens, 5000 were asked"):
        train_tokenizer(iter(["abc"] * 3), 5000, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "\x00\x01", "[]"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="is not a tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_absent_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)


def test_end_of_document_of_foreign_tokenizers(tokenizer_folder: Path, tmp_path: Path) -> None:
    foreign = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    text = json.dumps(foreign).replace("<|endoftext|>", "<stop>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="no token that ends a document"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert load_tokenizer(tmp_path).end_token == "<stop>"
    (tmp_path / "tokenizer.json").write_text(text.replace("<stop>", "</s>"), encoding="utf-8")
    assert load_tokenizer(tmp_path).end_token == "</s>"


def test_a_trained_tokenizer_is_known_by_its_request(tmp_path: Path) -> None:
    train_tokenizer(iter(texts(200)), 300, tmp_path, request={"corpus": "x"})
    assert is_trained(tmp_path, {"corpus": "x"})
    assert not is_trained(tmp_path, {"corpus": "y"})
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not is_trained(tmp_path, {"corpus": "x"})
    assert not is_trained(tmp_path / "nowhere", {"corpus": "x"})
