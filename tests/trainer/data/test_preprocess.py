"""Tokenizing files: order, completeness, and every way in which it can go wrong."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings, strategies as st

from tests.trainer.child_requests import request_of
from tests.trainer.data.data_helpers import ROOT, run_data, texts, write_lines
from trainer.contract.errors import DataError
from trainer.data.commands_make import merge
from trainer.data.encode import PreprocessRequest, split_sentences
from trainer.data.indexed import IndexedDataset, bin_path, idx_path
from trainer.data.lines import read_pieces
from trainer.data.tokenize import preprocess
from trainer.data.tokenizer import load_tokenizer


class Source:
    """Bytes to read in steps."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    @property
    def position(self) -> int:
        return self._stream.tell()

    def read(self, size: int) -> bytes:
        return self._stream.read(size)


def request(folder: Path, tokenizer: Path, **changes: object) -> PreprocessRequest:
    values = {
        "input": folder / "in.jsonl",
        "tokenizer": tokenizer,
        "output_prefix": str(folder / "out" / "demo"),
    }
    return PreprocessRequest(**(values | changes))  # type: ignore[arg-type]


def decoded(prefix: str, tokenizer: Path) -> list[str]:
    data, loaded = IndexedDataset(prefix), load_tokenizer(tokenizer)
    return [loaded.decode(data.get(number).tolist()) for number in range(len(data))]


def copied(prefix: str, to: Path) -> Path:
    for path in (bin_path, idx_path):
        shutil.copy(path(prefix), path(to))
    return to


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_keep_the_order_of_the_lines(
    tmp_path: Path, tokenizer_folder: Path, workers: int
) -> None:
    items = texts(500)
    write_lines(tmp_path / "in.jsonl", items)
    asked = request(tmp_path, tokenizer_folder, workers=workers)
    heard: list[tuple[int, int, int]] = []
    report = preprocess(asked, on_progress=lambda *counts: heard.append(counts), piece_bytes=2000)
    assert len(heard) > 20
    assert decoded(asked.prefix, tokenizer_folder) == [text + "<|endoftext|>" for text in items]
    assert asked.prefix.endswith("out/demo_text_document")
    assert (report.documents, report.dtype, report.workers) == (500, "uint16", workers)
    size = (tmp_path / "in.jsonl").stat().st_size
    assert [sum(column) for column in zip(*heard, strict=True)] == [size, 500, report.tokens]
    assert report.tokens == IndexedDataset(asked.prefix).token_count and report.input_bytes == size
    assert visible(tmp_path / "out") == [
        f"demo_text_document.{end}" for end in ("bin", "idx", "report.json")
    ]


def test_workers_and_pieces_change_no_byte(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(300))
    results = set()
    for workers, piece in ((1, 1 << 20), (1, 1), (2, 3000)):
        asked = request(tmp_path, tokenizer_folder, workers=workers)
        preprocess(asked, force=True, piece_bytes=piece)
        results.add((bin_path(asked.prefix).read_bytes(), idx_path(asked.prefix).read_bytes()))
    assert len(results) == 1


@given(data=st.binary(max_size=300), size=st.integers(1, 50))
@settings(deadline=None)
def test_pieces_are_the_file_in_whole_lines(data: bytes, size: int) -> None:
    pieces = list(read_pieces(Source(data), size))
    assert b"".join(piece.data for piece in pieces) == data
    for piece, following in itertools.pairwise(pieces):
        assert piece.data.endswith(b"\n")
        assert following.first_line == piece.first_line + piece.data.count(b"\n")
        assert (
            piece.end.lines == data[: piece.end.text_bytes].count(b"\n") == following.first_line - 1
        )


@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    size=st.integers(1, 40),
    limit=st.integers(1, 25),
)
@settings(deadline=None)
def test_a_line_above_the_limit_is_no_part_of_any_piece(
    lengths: list[int], size: int, limit: int
) -> None:
    lines = [b"x" * length for length in lengths]
    pieces = list(read_pieces(Source(b"\n".join(lines)), size, limit))
    found = {piece.first_line: piece.too_long for piece in pieces if piece.too_long}
    assert found == {
        n: len(line) + (n < len(lines)) for n, line in enumerate(lines, 1) if len(line) > limit
    }
    kept = dict(
        line
        for piece in pieces
        for line in enumerate(piece.data.split(b"\n"), piece.first_line)
        if line[1]
    )
    assert kept == {n: line for n, line in enumerate(lines, 1) if 0 < len(line) <= limit}
    assert max((len(piece.data) for piece in pieces), default=0) <= limit + size
    if pieces:
        assert pieces[-1].end.text_bytes == len(b"\n".join(lines))


def test_without_the_end_token_and_with_another_key(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"body": "alpha", "text": "no"}\n\n  \n{"body": ""}\r\n{"body": "beta"}'
    )
    asked = request(tmp_path, tokenizer_folder, append_eod=False, json_key="body")
    report = preprocess(asked)
    assert decoded(asked.prefix, tokenizer_folder) == ["alpha", "beta"]
    assert report.empty_texts == 1 and asked.prefix.endswith("demo_body_document")


BAD_LINES = [
    (b"{broken", "not JSON"),
    (b'{"other": "x"}', "no key 'text' \\(it has 'other'\\)"),
    (b'{"text": 5}', "'text' is a int, expected a string"),
    (b'["text"]', "a JSON list, expected an object"),
    (b"\xff\xfe{}", "not UTF-8|not JSON"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b"[" * 100000, "not JSON"),
    (b"null", "a JSON NoneType"),
]


@pytest.mark.parametrize(
    ("workers", "line", "words"),
    [*((1, *fault) for fault in BAD_LINES), (2, *BAD_LINES[0]), (2, *BAD_LINES[5])],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, tokenizer_folder: Path, workers: int, line: bytes, words: str
) -> None:
    good = b'{"text": "alpha"}\n'
    (tmp_path / "in.jsonl").write_bytes(good * 41 + line + b"\n" + good)
    asked = request(tmp_path, tokenizer_folder, workers=workers)
    with pytest.raises(DataError, match=f"in.jsonl, line 42: .*({words})") as caught:
        preprocess(asked, piece_bytes=100)
    assert "\n" not in str(caught.value)
    assert visible(tmp_path / "out") == []
    report = preprocess(request(tmp_path, tokenizer_folder, skip_bad_lines=True))
    assert (report.documents, report.bad_lines) == (42, 1)
    assert report.bad_line_reports[0].startswith("line 42: ")


def test_only_the_first_bad_lines_are_told(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "in.jsonl").write_text("bad\n" * 100 + '{"text": "alpha"}\n')
    report = preprocess(request(tmp_path, tokenizer_folder, skip_bad_lines=True))
    assert report.bad_lines == 100 and len(report.bad_line_reports) == 20


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_nothing_to_write_is_refused(tmp_path: Path, tokenizer_folder: Path, content: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(DataError, match="not one token"):
        preprocess(request(tmp_path, tokenizer_folder))
    assert visible(tmp_path / "out") == []


def test_absent_input_and_tokenizer_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"reading .*in\.jsonl: there is no such file"):
        preprocess(request(tmp_path, tokenizer_folder))
    write_lines(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        preprocess(request(tmp_path, tmp_path))
    with pytest.raises(DataError, match="workers 0"):
        preprocess(request(tmp_path, tokenizer_folder, workers=0))


def test_what_is_up_to_date_is_kept(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(50))
    asked = request(tmp_path, tokenizer_folder)
    first = preprocess(asked)
    written = bin_path(asked.prefix).stat().st_mtime_ns
    again = preprocess(asked)
    assert again.already_complete and not first.already_complete and again.tokens == first.tokens
    assert bin_path(asked.prefix).stat().st_mtime_ns == written
    assert not preprocess(asked, force=True).already_complete
    write_lines(tmp_path / "in.jsonl", texts(51))
    assert preprocess(asked).documents == 51
    assert not preprocess(request(tmp_path, tokenizer_folder, append_eod=False)).already_complete
    assert not preprocess(asked).already_complete
    os.truncate(bin_path(asked.prefix), 10)
    with pytest.raises(DataError, match="replace it with --force"):
        preprocess(asked)
    assert not preprocess(asked, force=True).already_complete
    idx_path(asked.prefix).unlink()
    assert not preprocess(asked).already_complete
    assert IndexedDataset(asked.prefix).document_count == 51


def test_a_pair_that_another_made_is_replaced_with_force_alone(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_lines(tmp_path / "in.jsonl", texts(50))
    asked = request(tmp_path, tokenizer_folder)
    preprocess(asked)
    Path(f"{asked.prefix}.report.json").unlink()  # as Megatron leaves a pair
    written = bin_path(asked.prefix).read_bytes()
    write_lines(tmp_path / "in.jsonl", texts(51))
    with pytest.raises(
        DataError, match=r"demo_text_document.bin is there already, .* replace it with --force"
    ):
        preprocess(asked)
    with pytest.raises(DataError, match="replace it with --force"):
        merge([copied(asked.prefix, tmp_path / "copy")], asked.prefix)
    assert bin_path(asked.prefix).read_bytes() == written
    half = request(tmp_path, tokenizer_folder, output_prefix=str(tmp_path / "half"))
    bin_path(half.prefix).write_bytes(b"half")
    Path(f"{half.prefix}.report.json").write_text(json.dumps({"request": {}, "report": None}))
    assert preprocess(half).documents == 51, "what a killed command of ours left is gone on with"
    assert preprocess(asked, force=True).documents == 51


def test_a_killed_worker_is_an_error(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(4000))
    asked = request(tmp_path, tokenizer_folder, workers=2)
    killed: list[int] = []

    def kill_one(*_: int) -> None:
        if not killed:
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid or 0, signal.SIGKILL)
            killed.append(victim.pid or 0)

    with pytest.raises(DataError, match=r"a worker .* was killed"):
        preprocess(asked, on_progress=kill_one, piece_bytes=1000)
    assert killed and all(name.startswith(".") for name in visible(tmp_path / "out"))
    assert multiprocessing.active_children() == []
    told: list[str] = []
    assert preprocess(asked, tell=told.append).documents == 4000
    assert all(line.startswith("goes on behind line ") for line in told)
    whole = request(tmp_path, tokenizer_folder, output_prefix=str(tmp_path / "whole"))
    preprocess(whole)
    assert bin_path(asked.prefix).read_bytes() == bin_path(whole.prefix).read_bytes()


def test_workers_of_a_killed_parent_leave(tmp_path: Path, tokenizer_folder: Path) -> None:
    fifo = tmp_path / "in.jsonl"
    os.mkfifo(fifo)
    command = [
        "preprocess",
        "--input",
        fifo,
        "--tokenizer",
        tokenizer_folder,
        "--output-prefix",
        tmp_path / "demo",
    ]
    parent = subprocess.Popen(
        [sys.executable, "-m", "trainer.data", request_of("data", [*command, "--workers", "2"])],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    line = json.dumps({"text": "alpha " * 200}).encode() + b"\n"
    children: list[psutil.Process] = []
    with fifo.open("wb", buffering=0) as stream:
        for _ in range(1200):  # more than a piece for each worker, so both are at work
            stream.write(line)
        deadline = time.monotonic() + 300
        while len(children) < 2 and time.monotonic() < deadline:
            found = psutil.Process(parent.pid).children(recursive=True)
            children = [
                child for child in found if any("spawn_main" in word for word in child.cmdline())
            ]
            time.sleep(0.1)
        assert len(children) >= 2
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=300)
    for process in alive:
        process.kill()
    assert not alive and len(gone) == len(children)
    assert not idx_path(tmp_path / "demo_text_document").exists()
    assert not bin_path(tmp_path / "demo_text_document").exists()


def test_a_disk_that_takes_no_more_is_one_line(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(3000))
    command = [
        "preprocess",
        "--input",
        tmp_path / "in.jsonl",
        "--tokenizer",
        tokenizer_folder,
        "--workers",
        "1",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer.data",
            request_of("data", [*command, "--output-prefix", tmp_path / "out" / "demo"]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "tr11 data: " in done.stderr.splitlines()[-1] and "writing" in done.stderr.splitlines()[-1]
    )
    assert visible(tmp_path / "out") == []


def test_sentences_are_sequences_and_texts_are_documents(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    lines = ["Alpha beta. Gamma delta!\nEta?", "One sentence", " ", "Zeta.  Mu."]
    write_lines(tmp_path / "in.jsonl", lines)
    asked = request(tmp_path, tokenizer_folder, sentences=True)
    report = preprocess(asked)
    assert asked.prefix.endswith("demo_text_sentence")
    end = "<|endoftext|>"
    assert decoded(asked.prefix, tokenizer_folder) == [
        "Alpha beta.", "Gamma delta!", "Eta?" + end, "One sentence" + end, "Zeta.", "Mu." + end
    ]  # fmt: skip
    assert IndexedDataset(asked.prefix).documents.tolist() == [0, 3, 4, 6]
    assert (report.documents, report.sequences, report.empty_texts) == (3, 6, 1)
    kept = request(tmp_path, tokenizer_folder, sentences=True, keep_newlines=True)
    preprocess(kept)
    assert decoded(kept.prefix, tokenizer_folder)[1] == "Gamma delta!\n"


@given(text=st.text('aB. !?。”\n"', max_size=60))
@settings(max_examples=200)
def test_sentences_hold_all_of_a_text_in_order(text: str) -> None:
    parts = split_sentences(text)
    assert "".join("".join(parts).split()) == "".join(text.split()) and all(
        part.strip() for part in parts
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It is 3.5 m. Yes.", ["It is 3.5 m.", "Yes."]),
        ("so e.g. this stays. And “that.” Then", ["so e.g. this stays.", "And “that.”", "Then"]),
        ("你好。再见！」好", ["你好。", "再见！」", "好"]),
        ("No end", ["No end"]),
        ("", []),
    ],
)
def test_where_sentences_end(text: str, parts: list[str]) -> None:
    assert split_sentences(text) == parts


def test_other_types_of_tokenizers(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", ["alpha beta", "Beta"])
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\nalpha\nbeta\n")
    words = [
        "--tokenizer-type",
        "bert_wordpiece_lower",
        "--vocab-file",
        tmp_path / "vocab.txt",
        "--workers",
        "2",
    ]
    done = run_data(
        "preprocess", "--input", tmp_path / "in.jsonl", *words, "--output-prefix", tmp_path / "p"
    )
    assert done.returncode == 0, done.stderr
    data = IndexedDataset(tmp_path / "p_text_document")
    assert [data.get(number).tolist() for number in range(2)] == [[2, 3, 1], [3, 1]]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name
)
def test_a_signal_to_the_command_alone_ends_its_workers(
    tmp_path: Path, tokenizer_folder: Path, number: signal.Signals
) -> None:
    """As `timeout`, a closed terminal, `kill` and `kill -9` do it; the child is started as `tr11
    data` does it.
    """
    # an input that does not end: the workers are there when the signal comes
    os.mkfifo(tmp_path / "in.jsonl")
    words = ["preprocess", "--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer_folder, "--workers", "2",
             "--output-prefix", tmp_path / "out" / "demo"]  # fmt: skip
    code = "import sys; from tr11ops.cli.trainer_child import run_trainer_module as r; sys.exit(r(*sys.argv[1:]))"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, "trainer.data", request_of("data", words)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    me = psutil.Process(parent.pid)
    with (tmp_path / "in.jsonl").open("w") as stream:
        stream.write((json.dumps({"text": "word " * 50}) + "\n") * 6000)  # several pieces
        stream.flush()
        while (
            sum("spawn_main" in " ".join(one.cmdline()) for one in me.children(recursive=True)) < 2
        ):
            assert parent.poll() is None
            time.sleep(0.1)
        family = me.children(recursive=True)
        parent.send_signal(number)
        assert parent.wait(300) == (-signal.SIGKILL if number == signal.SIGKILL else 1)
    _, alive = psutil.wait_procs(family, 300)
    assert not alive
    assert "no output is half-written" in (parent.stderr.read() if parent.stderr else "")
    assert visible(tmp_path / "out") == []
