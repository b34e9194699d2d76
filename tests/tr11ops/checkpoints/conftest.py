"""A shelf of checkpoints for each test, in memory where that is possible: every small file here is flushed to disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.checkpoints.shelf import Shelf


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """An empty folder on /dev/shm where there is one, removed at the end."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tr11-test-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)
