"""A folder in memory: a killed process loses nothing of it, and flushing costs nothing on a busy test machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder on /dev/shm where there is one, removed at the end."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tr11-test-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)
