"""The check of data: each kind of finding, against plain loops, in small and in many pieces."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.trainer.data.data_helpers import (
    numbered_documents,
    run_data,
    texts,
    write_lines,
    write_pair,
)
from trainer.contract.errors import DataError
from trainer.data import check, check as room
from trainer.data.check import DigestStore, check_pairs, check_raw
from trainer.data.check_rules import DocumentLimits, find_storms, outside
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer, spelled_end_tokens

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12)


def laid_out(documents: list[list[int]], dtype: str = "uint16") -> tuple[Any, Any]:
    lengths = [len(document) for document in documents]
    whole = np.array([token for document in documents for token in document], dtype=dtype)
    return whole, np.cumsum([0, *lengths[:-1]])


def slow_storms(
    documents: list[list[int]], limits: DocumentLimits
) -> dict[int, set[tuple[int, int, bool]]]:
    found: dict[int, set[tuple[int, int, bool]]] = {}
    for number, document in enumerate(documents):
        symbol, count = Counter(document).most_common(1)[0]
        if 2 * count > len(document) and len(document) >= limits.storm_length:
            found[number] = {(symbol, count, False)}
            continue
        runs = [(token, len(list(group))) for token, group in groupby(document)]
        longest = max(length for _, length in runs)
        if longest >= limits.storm_run:
            found[number] = {(token, length, True) for token, length in runs if length == longest}
    return found


@given(
    documents=DOCUMENTS,
    length=st.integers(1, 20),
    run=st.integers(1, 12),
    dtype=st.sampled_from(["uint16", "int32", "uint8"]),
)
@settings(max_examples=200, deadline=None)
def test_storms_equal_the_slow_search(
    documents: list[list[int]], length: int, run: int, dtype: str
) -> None:
    limits = DocumentLimits(length, run)
    expected = slow_storms(documents, limits)
    found = find_storms(*laid_out(documents, dtype), limits)
    assert [storm.document for storm in found] == sorted(expected)
    for storm in found:
        assert (storm.symbol, storm.count, storm.is_run) in expected[storm.document]


@given(documents=DOCUMENTS, size=st.integers(1, 4))
def test_outside_equals_the_slow_search(documents: list[list[int]], size: int) -> None:
    expected = [
        (
            number,
            next(token for token in document if token >= size),
            sum(token >= size for token in document),
        )
        for number, document in enumerate(documents)
        if max(document) >= size
    ]
    assert outside(*laid_out(documents), size) == expected
    negative = [[-token for token in document] for document in documents]
    assert {number for number, _, _ in outside(*laid_out(negative, "int32"), size)} == {
        number for number, document in enumerate(documents) if any(document)
    }


@given(
    values=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=60),
    kept=st.sampled_from([1, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_duplicates_equal_the_slow_search(values: list[tuple[int, int]], kept: int) -> None:
    """(source, content) in order; contents that are equal are copies of the first."""
    places: dict[int, list[tuple[int, int]]] = {}
    old, check.KEPT_RECORDS = check.KEPT_RECORDS, kept
    try:
        with DigestStore() as store:
            for number, (source, content) in enumerate(values):
                digest = (content * 7919).to_bytes(16, "little")
                store.add(source, np.array([number]), digest)
                places.setdefault(content, []).append((source, number))
            found = {first: others for first, *others in store.copies()}
    finally:
        check.KEPT_RECORDS = old
    expected = {}
    for group in places.values():
        if len(group) > 1:
            ordered = sorted(group)
            expected[ordered[0]] = ordered[1:]
    assert found == expected


BACKSLASH = 92


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    documents: list[list[int]] = [[*document, 0] for document in numbered_documents(60)]
    documents[7] = [5, *[BACKSLASH] * 80, 6, 0]
    documents[9] = [0]
    documents[11] = []
    documents[20] = documents[3]
    documents[30] = [9, 4000, 5000, 0]
    documents[40] = [*range(1, 700), *[BACKSLASH] * 600, *range(1, 700), 0]
    return write_pair(tmp_path / "spoilt", documents)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_kind_of_finding(
    spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(room, "PIECE_TOKENS", 50)
    other = write_pair(tmp_path / "other", [[*numbered_documents(60)[3], 0], [1, 2, 3, 0]], "int32")
    heard: list[int] = []
    report = check_pairs(
        [str(spoilt), str(other)],
        vocabulary_size=4000,
        end_token=0,
        limits=DocumentLimits(longest=1500),
        workers=workers,
        temporary=tmp_path,
        on_bytes=heard.append,
    )
    counts = {"storm": 2, "empty": 2, "overlong": 1, "outside_vocabulary": 1, "duplicate": 2}
    assert report.counts == {**counts, "end_token_in_text": 1}
    found = {(example.kind, example.place): example.detail for example in report.examples}
    assert found["storm", 7] == "80 of its 82 are token 92"
    assert found["storm", 40] == "token 92 stands 600 times in a row"
    assert found["outside_vocabulary", 30] == "2 tokens such as 4000, of 4,000"
    assert found["end_token_in_text", 0] == "token 0, which ends a document, 1 times"
    assert found["duplicate", 3] == f"the same as 20, 0 of {other}"
    assert {place for kind, place in found if kind == "empty"} == {9, 11}
    assert found["overlong", 40] == "1,998 long"
    assert report.documents == 62 and len(heard) > 5
    assert sum(heard) == sum(Path(f"{prefix}.bin").stat().st_size for prefix in (spoilt, other))
    assert not report.clean and [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_good_data_is_clean(tmp_path: Path) -> None:
    report = check_pairs(
        [str(write_pair(tmp_path / "good", numbered_documents(200)))], vocabulary_size=10_000
    )
    assert report.clean and report.examples == () and report.documents == 200


def test_damaged_pairs_are_findings_and_the_rest_is_checked(tmp_path: Path) -> None:
    good, cut = (write_pair(tmp_path / name, numbered_documents(20)) for name in ("good", "cut"))
    os.truncate(f"{cut}.bin", 10)
    floats = write_pair(tmp_path / "floats", [[1, 2]], "float32")
    report = check_pairs([str(cut), str(good), "/nowhere/x", str(floats)])
    assert report.counts == {"unreadable": 3} and report.documents == 20
    details = [example.detail for example in report.examples]
    assert (
        "truncated" in details[0]
        and "missing" in details[1]
        and "float32 numbers, not tokens" in details[2]
    )


def test_examples_are_few_and_counts_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PIECE_TOKENS", 100)
    report = check_pairs([str(write_pair(tmp_path / "p", [[], *[[1, 2]] * 300, *[[]] * 49]))])
    assert report.counts == {"empty": 50, "duplicate": 299}
    assert Counter(example.kind for example in report.examples) == {"empty": 5, "duplicate": 1}
    assert report.examples[-1].detail == "the same as 2, 3, 4, 5, 6 and 294 more"


@pytest.mark.parametrize("workers", [1, 2])
def test_raw_text(tmp_path: Path, workers: int) -> None:
    lines = [json.dumps({"text": text}) for text in texts(30)]
    lines[3] = json.dumps({"text": "a " + "\\" * 90})
    lines[5] = "{broken"
    lines[6] = json.dumps({"text": " \n "})
    lines[8] = lines[2]
    lines[9] = json.dumps({"text": "x" * 10 + "0123456789" * 100 + "é" * 600 + "0123456789" * 100})
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:4], "", *lines[4:]]) + "\n")
    report = check_raw(tmp_path / "in.jsonl", limits=DocumentLimits(longest=2500), workers=workers)
    assert report.counts == {"storm": 2, "bad_line": 1, "empty": 1, "duplicate": 1, "overlong": 1}
    found = {(example.kind, example.place): example.detail for example in report.examples}
    assert found["storm", 4] == "90 of its 92 are the character '\\\\'"
    assert found["storm", 11] == "the character 'é' stands 600 times in a row"
    assert found["duplicate", 3] == "the same as 10" and found["bad_line", 7].startswith("not JSON")
    assert ("empty", 8) in found and ("overlong", 11) in found
    with pytest.raises(DataError, match="there is no such file"):
        check_raw(tmp_path / "nothing")


def test_the_command(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(50))
    run_data(
        "preprocess",
        "--input",
        tmp_path / "in.jsonl",
        "--tokenizer",
        tokenizer_folder,
        "--output-prefix",
        tmp_path / "p",
    )
    pair = tmp_path / "p_text_document"
    done = run_data("check", pair, "--tokenizer", tokenizer_folder, "--workers", "2")
    assert done.returncode == 0 and "nothing found" in done.stdout and done.stderr == ""
    done = run_data("check", pair, pair, "--json", "--vocab-size", "100")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["clean"] is False
    assert result["counts"]["duplicate"] == 50 and result["counts"]["outside_vocabulary"] == 100
    done = run_data("check", "--raw", tmp_path / "in.jsonl", "--workers", "1")
    assert done.returncode == 0 and "50 documents" in done.stdout
    done = run_data("check", "/nowhere/x")
    assert done.returncode == 1 and "unreadable: /nowhere/x" in done.stdout
    assert run_data("check", "--raw", "a", "b").returncode == 2


def test_the_token_that_ends_a_document_inside_a_text(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """In raw text, in a pair, and told at once when the pair is made."""
    end = "<|endoftext|>"
    lines = [
        "alpha",
        f"beta {end} gamma {end}",
        "an old strike </s> tag",
        f"delta{end}",
        *[end] * 9,
    ]
    path = write_lines(tmp_path / "in.jsonl", lines)
    report = check_raw(path, end_tokens=("</s>", end))
    assert report.counts["end_token_in_text"] == 12
    found = [
        (example.place, example.detail)
        for example in report.examples
        if example.kind == "end_token_in_text"
    ]
    assert found[:3] == [
        (2, f"{end!r} 2 times in the text"),
        (3, "'</s>' 1 times in the text"),
        (4, f"{end!r} 1 times in the text"),
    ]
    done = run_data(
        "check", "--raw", path, "--tokenizer", tokenizer_folder, "--workers", "1", "--json"
    )
    assert done.returncode == 1 and json.loads(done.stdout)["counts"]["end_token_in_text"] == 11, (
        "</s> is no token of it"
    )
    words = ["--tokenizer", tokenizer_folder, "--output-prefix", tmp_path / "p", "--workers", "1"]
    made = run_data("preprocess", "--input", path, *words, "--json")
    result = json.loads(made.stdout)
    assert made.returncode == 0 and result["documents_with_end_token"] == 11
    assert (result["end_token"], result["end_token_lines"]) == (end, [2, 4, 5, 6, 7])
    assert (
        f"WARNING: {path}: 11 document(s) hold '{end}' in their text (line 2, 4, 5, 6, 7 ...)"
        in made.stderr
    )
    assert "data.reset_attention_mask" in made.stderr
    looked = run_data(
        "check", tmp_path / "p_text_document", "--tokenizer", tokenizer_folder, "--workers", "1"
    )
    assert looked.returncode == 1 and "end token in text: 11" in looked.stdout
    assert "p_text_document, 1: token 0, which ends a document, 2 times" in looked.stdout
    assert "data.mask_end_of_document_loss" in looked.stdout


def test_a_tokenizer_without_a_token_for_it_is_not_concerned(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\na\n[\n]\nSEP\n")
    tokenizer = load_tokenizer(TokenizerSpec("bert_wordpiece", None, str(tmp_path / "vocab.txt")))
    assert spelled_end_tokens(tokenizer) == ()
    assert "</s>" in spelled_end_tokens(None)
