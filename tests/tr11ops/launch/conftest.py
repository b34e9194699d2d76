"""What the tests of a launch share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.launch.preflight_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
