"""A folder in memory where there is one: a killed process loses nothing of it, and flushing costs
nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty folder, removed at the end."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tr11-test-", dir=shared) as name:
        yield Path(name)


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder
