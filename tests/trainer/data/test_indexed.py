"""The indexed pair: its bytes, its reader's distrust, its writer's all-or-nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.trainer.data.data_helpers import ROOT, write_pair
from trainer.contract.errors import DataError, explain_os_errors
from trainer.data.commands_make import merge
from trainer.data.indexed import IndexedDataset, bin_path, dtype_for_vocabulary, idx_path
from trainer.data.indexed_write import IndexedWriter
from trainer.data.sources import check_token_numbers

RELAXED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WRITABLE = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


def mapped_index(code: int, lengths: list[int], item: int) -> bytes:
    """An index file spelled out from the format's definition."""
    offsets = [sum(lengths[:n]) * item for n in range(len(lengths))]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *offsets)
        + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    )


def put(prefix: Path, index: bytes, tokens: bytes) -> Path:
    idx_path(prefix).write_bytes(index)
    bin_path(prefix).write_bytes(tokens)
    return prefix


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=3),
        min_size=1,
        max_size=9,
    ),
    dtype=st.sampled_from(WRITABLE),
)
@RELAXED
def test_what_is_written_is_read(
    tmp_path: Path, documents: list[list[list[int]]], dtype: str
) -> None:
    prefix = tmp_path / "pair"
    sequences = [sequence for document in documents for sequence in document]
    if not any(sequences):
        return
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_sequences(
                np.array([token for sequence in document for token in sequence], dtype=dtype),
                np.array([len(sequence) for sequence in document], dtype=np.int32),
                np.array([len(document)]),
            )
    data = IndexedDataset(prefix)
    assert data.dtype == np.dtype(dtype)
    assert [data.get(n).tolist() for n in range(len(data))] == sequences
    starts = np.cumsum([0] + [len(document) for document in documents])
    assert data.documents.tolist() == starts.tolist()
    assert data.token_count == sum(map(len, sequences)) and data.document_count == len(documents)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", "pair.idx"]


def test_the_bytes_are_the_format(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2, 3], [4], [5, 65499]])
    assert idx_path(prefix).read_bytes() == mapped_index(8, [3, 1, 2], 2)
    assert bin_path(prefix).read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 65499)


def test_index_size_of_a_thousand_documents(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[7]] * 1000)
    assert idx_path(prefix).stat().st_size == 20042


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (1, "u1"),
        (2, "i1"),
        (3, "<i2"),
        (4, "<i4"),
        (5, "<i8"),
        (6, "<f8"),
        (7, "<f8"),
        (7, "<f4"),
        (8, "<u2"),
    ],
)
def test_every_type_code_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([3, 1, 4, 1, 5, 9], dtype=dtype)
    data = IndexedDataset(
        put(tmp_path / "p", mapped_index(code, [4, 2], tokens.itemsize), tokens.tobytes())
    )
    assert (
        data.dtype == np.dtype(dtype)
        and data.get(1).tolist() == [5, 9]
        and data.get(0, 1, 2).tolist() == [1, 4]
    )


def test_the_older_kind_is_read(tmp_path: Path) -> None:
    lengths = [3, 0, 2]
    index = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, 4, 4, 3, 3, 4)
    index += struct.pack("<4q", 0, 1, 2, 3) + struct.pack("<4q", 0, 3, 3, 5)
    index += struct.pack("<3q", *lengths) + struct.pack("<4q", 0, 1, 2, 3)
    data = IndexedDataset(put(tmp_path / "p", index, struct.pack("<5i", 10, 11, 12, 70000, 13)))
    assert [data.get(n).tolist() for n in range(3)] == [[10, 11, 12], [], [70000, 13]]
    with pytest.raises(DataError, match="truncated"):
        IndexedDataset(put(tmp_path / "p", index[:-1], struct.pack("<5i", 10, 11, 12, 70000, 13)))


def older_index(code: int, lengths: list[int], item: int) -> bytes:
    """An index file of the older kind, spelled out from the format's definition."""
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    count = len(lengths)
    return (
        b"TNTIDX\x00\x00"
        + struct.pack("<6Q", 1, code, item, count, count, count + 1)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
        + struct.pack(f"<{count + 1}q", *offsets)
        + struct.pack(f"<{count}q", *lengths)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (1, "u1"),
        (2, "i1"),
        (3, "<i2"),
        (4, "<i4"),
        (5, "<i8"),
        (6, "<f8"),
        (7, "<f8"),
        (7, "<f4"),
        (8, "<u2"),
    ],
)
def test_every_type_code_of_the_older_kind_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([3, 1, 4, 1, 5, 9], dtype=dtype)
    prefix = put(tmp_path / "p", older_index(code, [4, 2], tokens.itemsize), tokens.tobytes())
    for implementation in ("infer", "lazy", "cached"):
        data = IndexedDataset(prefix, implementation)  # type: ignore[arg-type]
        assert (data.kind, data.dtype, data.code) == ("older", np.dtype(dtype), code)
        assert data.get(1).tolist() == [5, 9] and data.get(0, 1, 2).tolist() == [1, 4]
        assert isinstance(data.tokens, np.memmap) == (implementation != "cached")


@pytest.mark.parametrize(
    ("older", "implementation", "words"),
    [
        (
            True,
            "mmap",
            r"p\.idx is an older index \(TNTIDX\), which the implementation 'mmap' does not read",
        ),
        (
            False,
            "lazy",
            r"p\.idx is a memory-mapped index \(MMIDIDX\), which the implementation 'lazy' does not read",
        ),
        (False, "cached", "set data.implementation to infer"),
    ],
)
def test_a_kind_that_was_not_asked_for_is_refused(
    tmp_path: Path, older: bool, implementation: str, words: str
) -> None:
    index = older_index(8, [2], 2) if older else mapped_index(8, [2], 2)
    prefix = put(tmp_path / "p", index, struct.pack("<2H", 1, 2))
    with pytest.raises(DataError, match=words):
        IndexedDataset(prefix, implementation)  # type: ignore[arg-type]
    assert IndexedDataset(prefix).kind == ("older" if older else "mapped")


@pytest.mark.parametrize("token", [64, -1])
@pytest.mark.parametrize("older", [False, True])
def test_the_look_at_the_start_names_document_token_and_place(
    tmp_path: Path, older: bool, token: int
) -> None:
    """The same words as where a token is read; documents of no tokens stand before and behind the
    one at fault.
    """
    lengths = [9, 0, 7, 0, 4]
    tokens = np.array([3] * 14 + [token] + [3] * 5, dtype="<i4")
    index = older_index(4, lengths, 4) if older else mapped_index(4, lengths, 4)
    data = IndexedDataset(put(tmp_path / "p", index, tokens.tobytes()), vocabulary_size=64)
    words = f"{data.path}: document 2 holds token {token} at its place 5, the vocabulary has 64"
    with pytest.raises(DataError) as at_start:
        check_token_numbers(data, 64)
    with pytest.raises(DataError) as when_read:
        data.get(2)
    assert words in str(at_start.value) and str(at_start.value) == str(when_read.value)


def test_both_kinds_merge_into_one(tmp_path: Path) -> None:
    put(tmp_path / "old", older_index(8, [1, 3], 2), struct.pack("<4H", 1, 2, 3, 4))
    write_pair(tmp_path / "new", [[5], [6, 7]])
    merge([tmp_path / "old", tmp_path / "new"], tmp_path / "all")
    assert idx_path(tmp_path / "all").read_bytes() == mapped_index(8, [1, 3, 1, 2], 2)
    assert bin_path(tmp_path / "all").read_bytes() == struct.pack("<7H", *range(1, 8))


# Digests of both files of a pair that megatron-core 0.16.1 writes of the same documents, for each
# type it has.
MEGATRON_PAIRS = {
    "uint8": "cc51c71786a56f81",
    "int8": "2cb0a6a14bfaabd8",
    "int16": "7de9442138e83a06",
    "int32": "f024f01985e46283",
    "int64": "d41da217d7136689",
    "float64": "7c0dc92e39da18b9",
    "float32": "6eea96c971e902fc",
    "uint16": "e1568fa7f7a8927a",
}


@pytest.mark.parametrize("dtype", MEGATRON_PAIRS)
def test_pairs_equal_megatron(tmp_path: Path, dtype: str) -> None:
    prefix = write_pair(
        tmp_path / "p", [list(range(n % 9, n % 9 + n)) for n in range(1, 60)], dtype
    )
    files = bin_path(prefix).read_bytes() + idx_path(prefix).read_bytes()
    assert hashlib.blake2b(files, digest_size=8).hexdigest() == MEGATRON_PAIRS[dtype]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(320, "<u2"), (65499, "<u2"), (65500, "<i4"), (250880, "<i4")]
)
def test_type_follows_the_vocabulary(vocabulary: int, dtype: str) -> None:
    assert dtype_for_vocabulary(vocabulary) == np.dtype(dtype)


def test_an_index_cut_anywhere_is_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [3]])
    whole = idx_path(prefix).read_bytes()
    for length in range(len(whole)):
        idx_path(prefix).write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"p\.idx"):
            IndexedDataset(prefix)
    idx_path(prefix).write_bytes(whole + b"\x00")
    with pytest.raises(DataError, match="longer than its header says"):
        IndexedDataset(prefix)


def test_an_index_of_multimodal_data_is_called_what_it_is(tmp_path: Path) -> None:
    """Megatron's `multimodal` data sets have a mode of each sequence, one byte, behind the document
    starts.
    """
    prefix = put(tmp_path / "p", mapped_index(8, [2, 1, 3], 2) + bytes([0, 1, 0]), bytes(12))
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert "p.idx is of multimodal data" in str(caught.value) and "text alone" in str(caught.value)
    assert "longer" not in str(caught.value) and "damaged" not in str(caught.value)


@given(position=st.integers(0, 34 + 12 * 3 + 8 * 4 - 1), change=st.integers(1, 255))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_byte_is_refused_or_harmless(tmp_path: Path, position: int, change: int) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [3], [4, 5, 6]])
    damaged = bytearray(idx_path(prefix).read_bytes())
    damaged[position] ^= change
    idx_path(prefix).write_bytes(damaged)
    try:
        data = IndexedDataset(prefix)
    except DataError as error:
        assert "\n" not in str(error) and "p." in str(error)
        return
    # The type's sign and the inner document starts are all that a reader cannot know.
    assert [data.get(n).tolist() for n in range(3)] == [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda prefix: bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-2]),
            "truncated or they are not a pair",
        ),
        (lambda prefix: bin_path(prefix).write_bytes(b""), "not a pair|no tokens"),
        (lambda prefix: bin_path(prefix).unlink(), r"p\.bin is missing \(p\.idx is there"),
        (lambda prefix: idx_path(prefix).unlink(), r"p\.idx is missing \(p\.bin is there"),
        (
            lambda prefix: (bin_path(prefix).unlink(), idx_path(prefix).unlink()),
            "neither file exists",
        ),
        (lambda prefix: idx_path(prefix).write_bytes(b""), "is empty"),
        (lambda prefix: idx_path(prefix).write_bytes(b"PK\x03\x04" * 40), "is not an index file"),
        (lambda prefix: idx_path(prefix).write_bytes(mapped_index(9, [1], 2)), "type code 9"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, words: str) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [3]])
    damage(prefix)  # type: ignore[operator]
    with pytest.raises(DataError, match=words) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


def test_swapped_files_are_named(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [3]])
    index, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    put(prefix, tokens, index)
    with pytest.raises(DataError, match="swapped"):
        IndexedDataset(prefix)


def test_files_of_two_pairs_are_refused(tmp_path: Path) -> None:
    one = write_pair(tmp_path / "p", [[1, 2], [3]])
    other = write_pair(tmp_path / "q", [[1, 2], [3, 4]])
    idx_path(one).write_bytes(idx_path(other).read_bytes())
    with pytest.raises(DataError, match="not a pair"):
        IndexedDataset(one)


def test_a_failed_writer_leaves_the_old_pair(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [[1, 2], [3]])
    with pytest.raises(RuntimeError, match="half way"), IndexedWriter(prefix, "uint16") as writer:
        writer.add_sequences(np.array([9, 9], dtype=np.uint16), np.array([2], dtype=np.int32))
        raise RuntimeError("half way")
    assert IndexedDataset(prefix).tokens.tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not one token"), IndexedWriter(tmp_path / "p", "uint16"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "p", "uint16") as writer:
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(tmp_path / "p", "uint16")
        writer.add_sequences(np.array([5], dtype=np.uint16), np.array([1], dtype=np.int32))
    assert IndexedDataset(tmp_path / "p").tokens.tolist() == [5]


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    prefix = tmp_path / "p"
    script = (
        "import sys, numpy as np; from trainer.data.indexed_write import IndexedWriter\n"
        "writer = IndexedWriter(sys.argv[1], 'uint16'); writer.__enter__()\n"
        "writer.add_sequences(np.ones(1 << 21, 'uint16'), np.array([1 << 21], 'int32'))\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(prefix)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == [".p.bin.partial"]
    write_pair(prefix, [[1], [2]])
    assert IndexedDataset(prefix).tokens.tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_a_full_disk_is_one_clear_line() -> None:
    with (
        pytest.raises(
            DataError, match="writing /dev/full: the disk or the quota is full; free space"
        ),
        explain_os_errors("writing", "/dev/full"),
        Path("/dev/full").open("wb", buffering=0) as stream,
    ):
        stream.write(b"x")


def test_merge_joins_sequences_and_documents(tmp_path: Path) -> None:
    one = write_pair(tmp_path / "a", [[1, 2], [3]])
    with IndexedWriter(tmp_path / "b", "uint16") as writer:
        writer.add_sequences(
            np.array([4, 5, 6], "uint16"), np.array([1, 2], "int32"), np.array([2])
        )
    heard: list[int] = []
    assert merge([one, tmp_path / "b"], tmp_path / "sub" / "all", heard.append) == 6
    data = IndexedDataset(tmp_path / "sub" / "all")
    assert [data.get(n).tolist() for n in range(4)] == [[1, 2], [3], [4], [5, 6]]
    assert data.documents.tolist() == [0, 1, 2, 4] and sum(heard) == 12


def test_merge_refuses_two_types_and_itself(tmp_path: Path) -> None:
    one, two = write_pair(tmp_path / "a", [[1]]), write_pair(tmp_path / "b", [[1]], "int32")
    with pytest.raises(DataError, match="only pairs of one type"):
        merge([one, two], tmp_path / "all")
    with pytest.raises(DataError, match="both an input and the output"):
        merge([one], one)
    assert not idx_path(tmp_path / "all").exists()
