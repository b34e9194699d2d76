"""What every test of copies can have: a folder in memory, and a run with an archive of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.backup.lose_it import KINDS, Case
from tests.tr11ops.backup.round_cases import in_memory


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, memory: Path) -> Case:
    bucket = request.getfixturevalue("object_store") if request.param == "bucket" else None
    return Case(memory, request.param, bucket)
