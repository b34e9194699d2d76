"""Text that is read: compressed, cut off, damaged, too long, of another encoding, never silently short; and
the corpus that is made of it: real, repeatable, without duplicates, whole or absent.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backports import zstd
from msgspec.structs import replace

from tests.trainer.data.data_helpers import run_data, texts, write_lines
from trainer.contract.errors import DataError, InputFault
from trainer.data import corpus
from trainer.data.check import check_raw
from trainer.data.corpus import Document, build_corpus, cut_module, library_documents, library_files
from trainer.data.encode import PreprocessRequest
from trainer.data.indexed import bin_path, idx_path
from trainer.data.lines import MIB, read_pieces
from trainer.data.pool import map_in_order
from trainer.data.text_file import TextFile
from trainer.data.tokenize import preprocess

CHECKED = {zstd.CompressionParameter.checksum_flag: True}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "xz": lzma.compress,
    "zst": lambda data: zstd.compress(data, options=CHECKED),
}


def read_all(path: Path, step: int = 1000) -> bytes:
    with TextFile(path) as stream:
        return b"".join(iter(lambda: stream.read(step), b""))


def pair_bytes(tmp_path: Path, source: Path, tokenizer: Path, name: str) -> tuple[bytes, bytes]:
    asked = PreprocessRequest(source, tokenizer, str(tmp_path / name))
    preprocess(asked)
    return bin_path(asked.prefix).read_bytes(), idx_path(asked.prefix).read_bytes()


@pytest.mark.parametrize("kind", PACK)
def test_compressed_input_gives_the_same_everywhere(
    tmp_path: Path, tokenizer_folder: Path, kind: str
) -> None:
    plain = write_lines(tmp_path / "in.jsonl", texts(900))
    lines = plain.read_bytes().splitlines(keepends=True)
    packed = tmp_path / f"in.jsonl.{kind}"
    members = [b"".join(lines[begin : begin + 300]) for begin in (0, 300, 600)]
    packed.write_bytes(b"".join(map(PACK[kind], members)) + bytes(4096))
    nameless = tmp_path / "dump"
    nameless.write_bytes(PACK[kind](plain.read_bytes()))
    assert read_all(packed, 7) == read_all(nameless) == plain.read_bytes()
    wanted = pair_bytes(tmp_path, plain, tokenizer_folder, "plain")
    assert pair_bytes(tmp_path, packed, tokenizer_folder, "packed") == wanted
    heard: list[int] = []
    report = check_raw(packed, on_bytes=heard.append)
    assert (report.documents, report.symbols) == (900, check_raw(plain).symbols)
    assert 0 < sum(heard) <= packed.stat().st_size


def test_a_tokenizer_learns_the_same_from_compressed_text(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "in.jsonl", texts(900))
    packed = tmp_path / "in.jsonl.zst"
    packed.write_bytes(PACK["zst"](plain.read_bytes()))
    made = [
        json.loads(
            run_data(
                "tokenizer",
                "--vocab-size",
                "300",
                "--json",
                "--corpus",
                path,
                "--out",
                path.with_suffix(".t"),
            ).stdout
        )
        for path in (plain, packed)
    ]
    assert made[0]["digest"] == made[1]["digest"]


@pytest.mark.parametrize("kind", PACK)
def test_no_cut_and_no_flipped_bit_gives_other_text(tmp_path: Path, kind: str) -> None:
    text = b"".join(b'{"text": "%d"}\n' % number for number in range(9))
    sound = PACK[kind](text)
    path = tmp_path / f"in.jsonl.{kind}"
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        with pytest.raises(
            InputFault, match=r"in\.jsonl\.\w+ (is cut off|is empty|does not begin)"
        ) as caught:
            read_all(path)
        assert "\n" not in str(caught.value)
    faults = 0
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert read_all(path) == text, bit
        except InputFault:
            faults += 1
    assert faults > 7 * len(sound)


@pytest.mark.parametrize("kind", PACK)
def test_the_place_of_the_damage_is_named(tmp_path: Path, kind: str) -> None:
    first, second = (PACK[kind](b'{"text": "a"}\n' * 5) for _ in range(2))
    path = tmp_path / f"in.jsonl.{kind}"
    path.write_bytes(first + second[:-3])
    with pytest.raises(
        InputFault,
        match=rf"cut off: the file ends at byte {len(first + second) - 3}, in the .* data that begins at byte {len(first)}, after (5|10) whole lines",
    ):
        read_all(path)
    path.write_bytes(first + b"{}\n")
    with pytest.raises(
        InputFault,
        match=rf"what begins at byte {len(first)} is no .* 5 whole lines .*head -c {len(first)}",
    ):
        read_all(path)
    path.write_bytes(first + second[:-9] + bytes([second[-9] ^ 255]) + second[-8:])
    with pytest.raises(
        InputFault, match=rf"damaged before byte .* begins at byte {len(first)}, after"
    ):
        read_all(path)


def test_damage_is_no_line_to_be_skipped(tmp_path: Path, tokenizer_folder: Path) -> None:
    plain = write_lines(tmp_path / "in.jsonl", texts(2000))
    (tmp_path / "in.gz").write_bytes(gzip.compress(plain.read_bytes())[:-100])
    for command in (
        [
            "preprocess",
            "--skip-bad-lines",
            "--output-prefix",
            tmp_path / "out",
            "--workers",
            "1",
            "--input",
        ],
        ["check", "--raw", "--workers", "1"],
        ["tokenizer", "--out", tmp_path / "t", "--corpus"],
    ):
        words = ["--tokenizer", tokenizer_folder] if command[0] == "preprocess" else []
        done = run_data(*command, tmp_path / "in.gz", *words)
        assert done.returncode == 1 and "in.gz is cut off" in done.stderr.splitlines()[-1], (
            done.stderr
        )
        assert done.stdout == "" and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gz", "in.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "in.jsonl.gz",
            b'{"text": "a"}\n',
            "does not begin as gzip does, though its name says gzip",
        ),
        ("in.zst", b"", "is empty, though its name says zstd"),
        ("in.jsonl", b"BZh91AY&SY", "is a bzip2 file"),
        ("in.jsonl", b"PK\x03\x04....", "is a zip archive"),
        ("in.jsonl", b"PAR1....", "is a Parquet file"),
    ],
)
def test_what_is_not_read_is_told(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputFault, match=words):
        read_all(tmp_path / name)


def test_a_name_that_says_another_compression_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(lzma.compress(b"text\n"))
    assert read_all(tmp_path / "in.gz") == b"text\n"


@pytest.mark.parametrize(
    "codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("kind", ["", "gz"])
def test_another_encoding_is_named_and_its_fix_works(tmp_path: Path, codec: str, kind: str) -> None:
    text = '{"text": "Grüße, 世界"}\r\n' * 3
    data = text.encode(codec)
    path = tmp_path / f"my in.jsonl{kind and '.' + kind}"
    path.write_bytes(PACK[kind](data) if kind else data)
    with pytest.raises(
        InputFault, match=f"is {codec[:6].upper()}, .*-endian.* convert it: "
    ) as caught:
        read_all(path)
    command = str(caught.value).partition("convert it: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "utf8-my in.jsonl").read_text("utf-8-sig") == text.replace("\r\n", "\n")


def test_a_mark_of_utf_8_is_read_and_broken_utf_8_is_named(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    path = tmp_path / "in.jsonl"
    line = '{"text": "Grüße"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + line.encode())
    (tmp_path / "bare.jsonl").write_text(line, encoding="utf-8")
    assert pair_bytes(tmp_path, path, tokenizer_folder, "one") == pair_bytes(
        tmp_path, tmp_path / "bare.jsonl", tokenizer_folder, "two"
    )
    path.write_bytes(line.encode() + line.encode("latin-1"))
    with pytest.raises(InputFault, match=r"line 2: not UTF-8 text \(0xfc at byte 13 of the line\)"):
        preprocess(PreprocessRequest(path, tokenizer_folder, str(tmp_path / "three")))
    path.write_bytes(line.encode() + line.encode("utf-16-le"))
    with pytest.raises(InputFault, match=r"line 2: not UTF-8 text|line 2: .*zero bytes"):
        preprocess(PreprocessRequest(path, tokenizer_folder, str(tmp_path / "three")))


def test_a_line_above_the_limit_is_named_and_can_be_left_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    lines = [
        '{"text": "alpha"}\n',
        '{"text": "' + "beta " * 300_000 + '"}\n',
        '{"text": "gamma"}\n',
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    asked = PreprocessRequest(
        tmp_path / "in.jsonl", tokenizer_folder, str(tmp_path / "out"), max_line_mib=1
    )
    with pytest.raises(
        InputFault, match=r"in.jsonl, line 2: 1,500,013 bytes long, .* --max-line-mib to 2;"
    ) as caught:
        preprocess(asked)
    assert "\n" not in str(caught.value)
    report = preprocess(replace(asked, skip_bad_lines=True))
    assert (report.documents, report.bad_lines, report.input_bytes) == (2, 1, sum(map(len, lines)))
    found = check_raw(tmp_path / "in.jsonl", max_line_mib=1)
    assert found.counts == {"bad_line": 1} and found.examples[0].place == 2
    done = run_data(
        "tokenizer",
        "--corpus",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "t",
        "--max-line-mib",
        "1",
    )
    assert done.returncode == 1 and "line 2: 1,500,013 bytes long" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("kind", PACK)
def test_a_small_file_with_one_huge_line_takes_little_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(PACK[kind](bytes(40 * MIB)))
    tracemalloc.start()
    try:
        with TextFile(path) as stream:
            pieces = list(read_pieces(stream, max_line_bytes=MIB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(len(piece.data), piece.too_long) for piece in pieces] == [(0, 40 * MIB)]
    assert peak < 16 * MIB  # xz itself takes 8


def _upper(state: str, piece: bytes) -> bytes:
    return piece.upper()


def test_large_pieces_wait_until_there_is_room(tmp_path: Path) -> None:
    drawn: list[bytes] = []
    sizes = [1, 1, 1, 9, 9, 1, 20, 1, 1]

    def pieces() -> Iterator[bytes]:
        for size in sizes:
            drawn.append(b"a" * size)
            yield drawn[-1]

    results = map_in_order(
        _upper,
        pieces(),
        set_up=str,
        arguments=(),
        workers=2,
        doing="testing",
        size_of=len,
        most_bytes=10,
    )
    ahead = []
    for done, result in enumerate(results):
        assert result == b"A" * sizes[done]
        ahead.append(sum(map(len, drawn[done:])))
    # The piece that was drawn last waits for room; with those under way it is at most twice the
    # limit, or alone.
    assert max(ahead) <= 10 + max(sizes) and len(ahead) == len(sizes)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        TextFile(tmp_path / "none.gz")
    with pytest.raises(DataError, match=r"reading .*: Is a directory"):
        TextFile(tmp_path)


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
