"""Tokenizers: any text comes back, sizes are honest, foreign and damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.trainer.data.data_helpers import texts
from trainer.contract.errors import DataError
from trainer.data.learn_tokenizer import LearntType, is_trained, train_tokenizer
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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


@pytest.mark.parametrize("named", ["</stop>", {"content": "</stop>"}])
def test_an_end_token_that_the_tokenizer_lacks_is_not_replaced_by_another(
    tokenizer_folder: Path, tmp_path: Path, named: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    with pytest.raises(
        DataError, match=r"names '</stop>' as eos_token, .* does not have, it has <\|endoftext\|>"
    ):
        load_tokenizer(tmp_path)


def test_a_config_that_cannot_be_read_is_not_passed_over(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endofte')
    with pytest.raises(
        DataError, match=r"tokenizer_config\.json cannot be read: .*; copy it again"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_end_of_document_of_foreign_tokenizers(tokenizer_folder: Path, tmp_path: Path) -> None:
    foreign = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    text = json.dumps(foreign).replace("<|endoftext|>", "<stop>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="no token that ends a document"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}})
    )
    assert load_tokenizer(tmp_path).end_token == "<stop>"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(text.replace("<stop>", "</s>"), encoding="utf-8")
    assert load_tokenizer(tmp_path).end_token == "</s>"


def test_a_trained_tokenizer_is_known_by_its_request(tmp_path: Path) -> None:
    train_tokenizer(iter(texts(200)), 300, tmp_path, request={"corpus": "x"})
    assert is_trained(tmp_path, {"corpus": "x"})
    assert not is_trained(tmp_path, {"corpus": "y"})
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not is_trained(tmp_path, {"corpus": "x"})
    assert not is_trained(tmp_path / "nowhere", {"corpus": "x"})


def gpt2_files(folder: Path, tokenizer_folder: Path) -> TokenizerSpec:
    """The trained byte-level BPE in OpenAI's two files."""
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    return TokenizerSpec("gpt2_bpe", None, str(folder / "vocab.json"), str(folder / "merges.txt"))


PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "Alpha",
    "alpha",
    "be",
    "##ta",
    "gam",
    "##ma",
    "caf",
    "##e",
    "##é",
    ",",
    ".",
]


def bert_file(folder: Path) -> str:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return str(folder / "vocab.txt")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gpt2_files_are_the_same_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "gpt2"
    folder.mkdir(exist_ok=True)
    ours = load_tokenizer(gpt2_files(folder, tokenizer_folder))
    theirs = load_tokenizer(tokenizer_folder)
    assert (ours.vocabulary_size, ours.eod_id, ours.end_token) == (320, 0, "<|endoftext|>")
    assert (
        ours.encode_batch([text]) == theirs.encode_batch([text])
        and ours.decode(ours.encode_batch([text])[0]) == text
    )


def test_a_text_cannot_spell_the_end_of_a_gpt2_document(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    ours = load_tokenizer(gpt2_files(tmp_path, tokenizer_folder))
    ids = ours.encode_batch(["alpha<|endoftext|>beta"])[0]
    assert ours.eod_id not in ids and ours.decode(ids) == "alpha<|endoftext|>beta"


@pytest.mark.parametrize("lower", [False, True])
def test_wordpiece_equals_transformers(tmp_path: Path, lower: bool) -> None:
    from transformers import BertTokenizerFast

    file = bert_file(tmp_path)
    ours = load_tokenizer(
        TokenizerSpec("bert_wordpiece_lower" if lower else "bert_wordpiece", None, file)
    )
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    theirs = BertTokenizerFast(vocab=vocabulary, do_lower_case=lower)
    for text in ("Alpha beta, gamma.", "ALPHA café", "beta\u4e2dbeta", "  unknownword alpha"):
        assert (
            ours.encode_batch([text])[0] == theirs(text, add_special_tokens=False)["input_ids"]
        ), text
    assert (ours.vocabulary_size, ours.end_token, ours.eod_id) == (16, "[SEP]", 3)
    assert ours.encode_batch(["Alpha"]) == [[6 if lower else 5]]


def test_settings_are_part_of_the_digest(tmp_path: Path, tokenizer_folder: Path) -> None:
    file = bert_file(tmp_path)
    specs = [
        TokenizerSpec("bert_wordpiece", None, file),
        TokenizerSpec("bert_wordpiece_lower", None, file),
        gpt2_files(tmp_path, tokenizer_folder),
        TokenizerSpec(path=str(tokenizer_folder)),
    ]
    assert len({load_tokenizer(spec).digest() for spec in specs}) == 4


def test_refusals_of_the_other_types(tmp_path: Path, tokenizer_folder: Path) -> None:
    gpt2 = gpt2_files(tmp_path, tokenizer_folder)
    file = bert_file(tmp_path)
    for spec, words in (
        (TokenizerSpec("gpt2_bpe"), "type gpt2_bpe needs a vocabulary file"),
        (TokenizerSpec("gpt2_bpe", None, gpt2.vocabulary_file), "needs a merges file"),
        (TokenizerSpec("gpt2_bpe", None, file, gpt2.merges_file), "cannot be read as a tokenizer"),
        (
            TokenizerSpec("gpt2_bpe", None, "/nowhere/vocab.json", gpt2.merges_file),
            "/nowhere/vocab.json does not exist",
        ),
        (TokenizerSpec("bert_wordpiece", None, gpt2.merges_file), r"has no \[UNK\]"),
        (TokenizerSpec(), "needs a path"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            load_tokenizer(spec)
        assert "\n" not in str(caught.value)


def test_anothers_tokenizer_is_replaced_with_force_alone(tmp_path: Path) -> None:
    folder, request = tmp_path / "theirs", {"corpus": "c"}
    folder.mkdir()
    (folder / "tokenizer.json").write_text("theirs")
    words = ["a few words of text"] * 10
    with pytest.raises(
        DataError, match=r"theirs/tokenizer.json is there already, .* replace it with --force"
    ):
        train_tokenizer(iter(words), 260, folder, request=request)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert (
        train_tokenizer(iter(words), 260, folder, request=request, force=True).vocabulary_size
        == 260
    )
    assert (
        train_tokenizer(iter(words), 261, folder, request={"corpus": "d"}).vocabulary_size == 261
    ), "its own"
    (folder / "tokenizer.json").write_text("edited")
    with pytest.raises(DataError, match="replace it with --force"):
        train_tokenizer(iter(words), 260, folder, request=request)
    (folder / "training.json").write_text('{"request": {}, "report": null}')  # one that was killed
    train_tokenizer(iter(words), 260, folder, request=request)


@pytest.mark.parametrize("kind", ["bert_wordpiece", "bert_wordpiece_lower"])
def test_wordpiece_is_learnt_and_read_by_transformers(kind: LearntType, tmp_path: Path) -> None:
    """The same pieces as BertTokenizerFast finds with our vocabulary; the special tokens come
    first.
    """
    from transformers import BertTokenizerFast

    request = {"corpus": "x", "type": kind}
    lines = [f"Alpha beta, Gamma delta {number} unbelievable" for number in range(200)]
    ours = train_tokenizer(iter(lines), 90, tmp_path, kind=kind, request=request)
    pieces = (tmp_path / "vocab.txt").read_text().split("\n")[:-1]
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and len(pieces) == 90
    theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=kind.endswith("lower"))
    for text in lines[::50]:
        assert ours.encode_batch([text])[0] == theirs(text, add_special_tokens=False)["input_ids"]
    assert is_trained(tmp_path, request, kind) and not is_trained(
        tmp_path, {**request, "corpus": "y"}, kind
    )


def test_wordpiece_has_room_for_every_character(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be at least 6"):
        train_tokenizer(iter(["abc"]), 5, tmp_path, kind="bert_wordpiece")
    with pytest.raises(DataError, match="characters and special tokens"):
        train_tokenizer(iter(["abcdefghij klmnop"] * 9), 9, tmp_path, kind="bert_wordpiece")
