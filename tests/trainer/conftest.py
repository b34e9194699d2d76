"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.trainer.control.trainers import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Trainers of one process each; what a test leaves of them is killed."""
    from tests.trainer.control.trainers import (
        Processes,  # with torch and DeepSpeed, which most tests do not need
    )

    under_test = Processes(tmp_path)
    try:
        yield under_test
    finally:
        under_test.clear()
