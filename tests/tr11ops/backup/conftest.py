"""What every test of copies can have: a run with an archive of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.backup.copy_cases import VARIANT, make_archive, make_checkpoint
from tests.tr11ops.backup.lose_it import KINDS, Case
from tests.tr11ops.backup.round_cases import Rounds
from tr11ops.backup.folder import FolderArchive


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, memory: Path, reader_here: None) -> Case:
    bucket = request.getfixturevalue("object_store") if request.param == "bucket" else None
    return Case(memory, request.param, bucket)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "run" / "checkpoints" / VARIANT)


@pytest.fixture
def archive(tmp_path: Path) -> FolderArchive:
    return make_archive(tmp_path / "store")


@pytest.fixture
def rounds(memory: Path) -> Rounds:
    return Rounds(memory)
