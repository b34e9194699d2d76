"""Folders on file systems of their own: a real one of a few megabytes that a test can fill, and mount
read-only, as only root can; and one in memory.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEGABYTES = 12


class Disk:
    """Mounted at `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self) -> None:
        """Until not a byte is left."""
        with (
            pytest.raises(OSError, match="No space left"),
            (self.place / "filler").open("ab", buffering=0) as stream,
        ):
            while stream.write(bytes(512)):
                pass

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.place / "filler").unlink()

    def remount(self, how: str) -> None:
        """`ro` or `rw`."""
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.place)], check=True)

    def break_as(self, fault: str) -> None:
        """`full` or `read-only`."""
        self.fill() if fault == "full" else self.remount("ro")

    def heal(self, fault: str) -> None:
        """End what `break_as` has begun."""
        self.free() if fault == "full" else self.remount("rw")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={MEGABYTES}m,mode=0755"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tr11-test", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


# ---------------------------------------------------------------------------
# A folder in memory where there is one: a killed process loses nothing of it, and flushing
# costs nothing.


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
