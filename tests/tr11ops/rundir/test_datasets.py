"""The light look at datasets: whole ones pass, cut or foreign ones are named."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.tr11ops.launch.run_inputs import write_dataset
from tr11ops.rundir.datasets import look_at


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.sampled_from([(8, 2), (4, 4), (1, 1), (5, 8)]),
    st.data(),
)
def test_whole_ones_pass_and_any_cut_is_seen(
    lengths: list[int], kind: tuple[int, int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "d"
        write_dataset(prefix, tuple(lengths), *kind)
        facts = look_at(str(prefix))
        assert (facts.fault, facts.unreadable) == ("", "")
        assert (facts.documents, facts.tokens) == (len(lengths), sum(lengths))
        suffix = data.draw(st.sampled_from([".idx", ".bin"] if sum(lengths) else [".idx"]))
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert suffix in look_at(str(prefix)).fault
        path.write_bytes(whole + b"x")
        assert suffix in look_at(str(prefix)).fault


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_judged_without_an_exception(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name, "d.idx").write_bytes(content)
        Path(name, "d.bin").write_bytes(b"12")
        assert look_at(f"{name}/d").fault
        Path(name, "d.idx").write_bytes(b"MMIDIDX\x00\x00" + content)
        assert look_at(f"{name}/d").fault


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"TNTIDX\x00\x00" + bytes(60), "older, lazy kind"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 1, 2), "version 2"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 9, 1, 2), "dtype code 9"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 1), "holds no document"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2**62, 2**62), "its header needs"),
        (
            b"MMIDIDX\x00\x00"
            + struct.pack("<QBQQ2i2q3q2b", 1, 8, 2, 3, 1, 1, 0, 2, 0, 1, 2, 0, 1),
            "multimodal data",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, head: bytes, words: str) -> None:
    (tmp_path / "d.idx").write_bytes(head)
    (tmp_path / "d.bin").write_bytes(b"")
    assert words in look_at(str(tmp_path / "d")).fault


def test_absent_files_folders_and_impossible_paths(tmp_path: Path) -> None:
    assert "does not exist" in look_at(str(tmp_path / "none")).fault
    (tmp_path / "d.idx").mkdir()
    assert "is not a file" in look_at(str(tmp_path / "d")).fault
    assert look_at("a\0b").fault
