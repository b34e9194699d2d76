"""Packed logs are known by their first bytes, and a damaged one is one clear line."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from tr11ops.diagnose.reading import blocks

LINES = b"".join(b"line %d of a log that goes on\n" % number for number in range(5000))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd.compress])
def test_packed_logs_are_known_by_their_first_bytes(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "main_log.txt"
    path.write_bytes(pack(LINES))
    assert b"".join(blocks(path)) == LINES


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd.compress])
def test_a_damaged_one_is_one_line(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "main_log.txt.1"
    packed = pack(LINES)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"main_log.txt.1: the compressed file is damaged: "):
        list(blocks(path))
