"""The tar is one that others read, and every byte of it is known beforehand."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.tr11ops.backup.copy_cases import (
    VARIANT,
    contents,
    copy,
    make_archive,
    make_checkpoint,
    quick,
)
from tr11ops.backup.checking import offsets, tar_layout
from tr11ops.backup.copying import items_of
from tr11ops.backup.source import SourceFile, read_source

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\n"), min_size=1, max_size=40
).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=8).map("/".join)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PATHS, st.binary(max_size=1500), max_size=6), st.floats(0, 2e9))
def test_the_same_bytes_as_the_library_writes(files: dict[str, bytes], created: float) -> None:
    listed = tuple(SourceFile(path, len(content), "", content) for path, content in files.items())
    parts = tar_layout("global_step7", listed, created)
    ours = b"".join(part.content or b"" for part in parts)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"global_step7/{path}")
            entry.size, entry.mtime, entry.mode = len(content), int(created), 0o664
            tar.addfile(entry, io.BytesIO(content))
    assert ours == stream.getvalue()
    for path, begin in offsets(parts).items():
        assert ours[begin : begin + len(files[path])] == files[path]


def test_files_above_eight_gigabytes(tmp_path: Path) -> None:
    """A tar with a hole of 9 GiB where a file would be, read by GNU tar and by the library."""
    long_name = "weights/" + "x" * 200
    sizes = {long_name: 9 << 30, "next": 1}
    parts = tar_layout(
        "s", tuple(SourceFile(path, size, "") for path, size in sizes.items()), 1.65e9
    )
    path = tmp_path / "large.tar"
    with path.open("wb") as stream:
        for part in parts:
            if part.content is not None:
                stream.write(part.content)
            else:
                stream.truncate(stream.seek(part.bytes, io.SEEK_CUR))
    assert path.stat().st_size == sum(part.bytes for part in parts)
    with tarfile.open(path) as tar:
        found = {member.name: (member.size, member.offset_data) for member in tar}
    assert found == {f"s/{name}": (size, offsets(parts)[name]) for name, size in sizes.items()}
    listed = subprocess.run(
        ["tar", "-tvf", path], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[2] for line in listed.splitlines()] == [str(9 << 30), "1"]
    assert sum(part.bytes for part in parts) % 10_240 == 0


@pytest.mark.parametrize(
    "name", ["plain", "n" * 120, "d" * 90 + "/" + "é" * 60, "with space and ünïcödé"]
)
def test_gnu_tar_reads_it(tmp_path: Path, name: str) -> None:
    checkpoint = make_checkpoint(
        tmp_path / VARIANT, sizes={f"weights/{name}": 5000, "weights/0": 0, "cursor.json": 77}
    )
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, checkpoint, quick(piece_bytes=700), format="tar")
    tar = tmp_path / "store" / receipt.location
    into = tmp_path / "unpacked"
    into.mkdir()
    done = subprocess.run(
        ["tar", "--warning=all", "-xf", tar, "-C", into], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert contents(into / checkpoint.name) == contents(checkpoint)
    content = tar.read_bytes()
    for file in receipt.files:
        assert file.offset is not None
        assert (
            content[file.offset : file.offset + file.bytes] == (checkpoint / file.path).read_bytes()
        )
    assert receipt.files[-1].path == "manifest.json"


@pytest.mark.parametrize("kind", ["full", "weights"])
def test_two_copies_are_alike_to_the_byte(tmp_path: Path, kind: str) -> None:
    checkpoint = make_checkpoint(tmp_path / VARIANT)
    for place in ("one", "two"):
        copy(make_archive(tmp_path / place), checkpoint, format="tar", kind=kind)
    one, two = (next((tmp_path / place).rglob("*.tar")).read_bytes() for place in ("one", "two"))
    assert one == two
    (item,) = items_of(read_source(checkpoint, 100, kind), "tar")  # type: ignore[arg-type]
    assert item.bytes == len(one)
