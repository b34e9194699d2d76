"""Files written in blocks, past the page cache or through it: the same bytes, the same digests,
honest errors.
"""

from __future__ import annotations

import hashlib
import io
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trainer.checkpoint import files
from trainer.checkpoint.files import (
    ALIGNMENT,
    BLOCK_BYTES,
    BlockFile,
    DigestingWriter,
    copy_all,
    digesting,
    write_files,
)
from trainer.checkpoint.save_plan import Envelopes

EDGES = [
    0,
    1,
    ALIGNMENT - 1,
    ALIGNMENT,
    ALIGNMENT + 1,
    16 * ALIGNMENT,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 5,
]


def content(sizes: list[int]) -> list[bytes]:
    generator = np.random.default_rng(sum(sizes) + len(sizes))
    return [generator.bytes(size) for size in sizes]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.sampled_from(EDGES) | st.integers(0, 3 * BLOCK_BYTES), max_size=6))
def test_pieces_of_any_size_make_the_file(sizes: list[int]) -> None:
    pieces = content(sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with digesting(path) as stream:
            for number, piece in enumerate(pieces):
                if number % 2:
                    stream.append(torch.from_numpy(np.frombuffer(bytearray(piece), dtype=np.uint8)))
                else:
                    assert stream.write(piece) == len(piece)
            assert stream.tell() == sum(sizes)
        assert path.read_bytes() == b"".join(pieces)
        entry = stream.entry("file")
        printed = subprocess.run(
            ["sha256sum", str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert (entry.bytes, entry.digest) == (sum(sizes), printed.split()[0])


@pytest.mark.parametrize("refusal", ["at-open", "at-write"])
def test_a_file_system_that_has_no_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    direct: set[int] = set()

    def refusing_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refusal == "at-open":
            raise OSError(22, "Invalid argument", str(path))
        descriptor = real_open(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refusing_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(files.os, "open", refusing_open)
    monkeypatch.setattr(files.os, "pwrite", refusing_pwrite)
    [piece] = content([5 * BLOCK_BYTES + 77])
    with digesting(tmp_path / "file") as stream:
        stream.write(piece)
    monkeypatch.undo()
    assert bool(direct) == (refusal == "at-write")
    assert (tmp_path / "file").read_bytes() == piece
    assert stream.entry("file").digest == hashlib.sha256(piece).hexdigest()


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(EDGES) | st.integers(0, 2 * BLOCK_BYTES), min_size=1, max_size=5)
)
def test_copies_of_any_size_arrive_where_they_belong(sizes: list[int]) -> None:
    pieces = content(sizes)
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    ends = np.cumsum(sizes).tolist()
    copy_all(
        (memory[end - len(piece) : end], files.as_bytes(piece))
        for piece, end in zip(pieces, ends, strict=True)
    )
    assert memory.numpy().tobytes() == b"".join(pieces)


def test_a_copy_that_fails_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        copy_all(
            [
                (
                    torch.zeros(2 * ALIGNMENT, dtype=torch.uint8),
                    np.zeros(3 * ALIGNMENT, dtype=np.uint8),
                )
            ]
        )


def test_a_write_that_fails_names_the_file_and_closes_it(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_files(
                (tmp_path / name, [files.as_bytes(piece) for piece in content([size])])
                for name, size in (("good", 10), ("long", 3 * BLOCK_BYTES))
            )
        assert caught.value.filename == str(tmp_path / "long")
        with (
            pytest.raises(OSError, match="File too large"),
            digesting(tmp_path / "serialized") as stream,
        ):
            torch.save(torch.zeros(8 * BLOCK_BYTES), stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        BlockFile(tmp_path / "file")
    with pytest.raises(FileExistsError):
        DigestingWriter(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 40), max_size=3)
    | st.sampled_from([[32768], [32769], [200, 300], [65536]]),
)
def test_envelope_and_bytes_are_what_torch_loads(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    envelope = Envelopes().of(dtype, tuple(shape))
    archive = envelope.head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + envelope.tail
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
