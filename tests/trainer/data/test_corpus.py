"""The corpus: real, repeatable, without duplicates, whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.trainer.data.data_helpers import run_data
from trainer.contract.errors import DataError
from trainer.data import corpus
from trainer.data.corpus import Document, build_corpus, cut_module, library_documents, library_files

SMALL = 900_000


def test_a_module_is_cut_into_docstrings_and_code() -> None:
    source = (
        '"""What it is.\n\nMore of it."""\nimport os\n\x0c\n\nclass Thing:\n    r"""A thing."""\n\n'
        "    def act(self):\n        'Acts.'\n        return 1  # kept\n\ndef short(): 'stays'\n\n"
        "async def last():\n    return 2\n"
    )
    docstrings, code = cut_module(source)
    assert docstrings == "What it is.\n\nMore of it.\n\n\nThing\n\nA thing.\n\n\nThing.act\n\nActs."
    assert code == (
        "import os\n\x0c\n\nclass Thing:\n\n    def act(self):\n        return 1  # kept\n\ndef short(): 'stays'\n\n"
        "async def last():\n    return 2\n"
    )
    with pytest.raises(SyntaxError):
        cut_module("print 'old'")


def test_sources_are_found_in_order_and_tests_apart(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a.py",
        "sub/c.py",
        "test/t.py",
        "sub/tests/u.py",
        "site-packages/v.py",
        "x.txt",
        "pydoc_data/w.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert list(library_files(tmp_path, tests=False)) == ["a.py", "b.py", "sub/c.py"]
    assert list(library_files(tmp_path, tests=True)) == ["sub/tests/u.py", "test/t.py"]


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text('"""Words."""\nx = 1\n')
    (tmp_path / "old.py").write_text("print 'old'\n")
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff\xfe'\n")
    (tmp_path / "nul.py").write_bytes(b"x = 1\x00\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    missed: list[int] = []
    documents = list(
        library_documents(tmp_path, "lib", tests=False, on_unreadable=lambda: missed.append(1))
    )
    assert documents == [
        Document("Words.", "lib/good.py#docstrings"),
        Document("x = 1\n", "lib/good.py#code"),
    ]
    assert len(missed) == 4


def test_a_real_corpus(tmp_path: Path) -> None:
    heard: list[int] = []
    report = build_corpus(tmp_path / "a.jsonl", SMALL, on_bytes=heard.append)
    lines = [
        json.loads(line)
        for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]
    sizes = [len(line["text"].encode()) for line in lines]
    assert report.documents == len(lines) and report.text_bytes == sum(sizes) == sum(heard) >= SMALL
    assert sum(report.bytes_by_origin.values()) == report.text_bytes
    assert report.file_bytes == (tmp_path / "a.jsonl").stat().st_size
    assert len({line["text"] for line in lines}) == len(lines)
    assert {line["source"].split("/")[0] for line in lines} >= {"stdlib"}
    # Kinds are mixed over the whole file, so that any part of it is a fair sample.
    kinds = [line["source"].rpartition("#")[2] == "code" for line in lines]
    assert any(kinds[: len(kinds) // 4]) and not all(kinds[: len(kinds) // 4])
    build_corpus(tmp_path / "b.jsonl", SMALL)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_complete_corpus_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    build_corpus(output, 300_000)
    written = output.stat().st_mtime_ns
    assert build_corpus(output, 300_000).already_complete
    assert output.stat().st_mtime_ns == written
    assert not build_corpus(output, 300_000, force=True).already_complete
    assert not build_corpus(output, 310_000).already_complete
    os.truncate(output, 1000)
    with pytest.raises(DataError, match="does not say that this command made it as it is"):
        build_corpus(output, 310_000)
    assert output.stat().st_size == 1000
    assert not build_corpus(output, 310_000, force=True).already_complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "c.jsonl.report.json"]


def test_a_persons_file_is_not_replaced_and_a_half_made_one_is(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    output.write_text("mine")
    with pytest.raises(DataError, match="replace it with --force"):
        build_corpus(output, 300_000)
    assert output.read_text() == "mine"
    record = tmp_path / "c.jsonl.report.json"
    # a command that was killed after it began to write
    record.write_text(json.dumps({"request": {}, "report": None}))
    assert not build_corpus(output, 300_000).already_complete
    assert output.read_text() != "mine"


def test_more_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        corpus,
        "all_documents",
        lambda on_unreadable: iter([Document("word " * 100, "lib/a.py#code")]),
    )
    with pytest.raises(
        DataError, match="carries 500 bytes of text, 501 were asked; use --min-bytes 500"
    ):
        build_corpus(tmp_path / "c.jsonl", 501)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"writing .*c\.jsonl"):
        build_corpus(tmp_path / "file" / "c.jsonl", 1000)


def test_an_interrupted_corpus_says_that_it_starts_over(tmp_path: Path) -> None:
    record = tmp_path / "corpus.jsonl.report.json"
    record.write_text('{"request": {}, "report": null}')
    words = ["corpus", "--out", tmp_path / "corpus.jsonl", "--min-bytes", "1000"]
    done = run_data(*words)
    assert done.returncode == 0 and "starting from the beginning" in done.stderr
    assert "beginning" not in run_data(*words).stderr
