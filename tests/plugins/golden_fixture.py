"""Golden files: what a person agreed to see. `pytest --accept` writes what is seen now; `git diff`
shows the change. And the trainer's reader, loaded once for all tests.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tr11ops.backup import drill
from tr11ops.cli import checkpoints

Golden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept", action="store_true", help="write the golden files of the tests that run"
    )


@pytest.fixture
def accepts(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--accept"))


@pytest.fixture
def golden(accepts: bool) -> Golden:
    """Compares a text with a file, or makes it the file's."""

    def check(path: Path, text: str) -> None:
        if accepts:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            assert path.exists(), f"{path} is missing: pytest --accept writes it"
            assert text == path.read_text(encoding="utf-8"), (
                f"{path} differs: pytest --accept, if that is meant"
            )

    return check


# ---------------------------------------------------------------------------
# The trainer's reader in the process of the tests: each question to one of its own loads torch
# again, which takes longer than the whole rest of a test.


@pytest.fixture
def reader_here() -> Iterator[None]:
    """What asks `python -m trainer.checkpoint` is answered by the same code, here.

    The process itself is of tests/tr11ops/cli/test_checkpoint_values.py and test_trainer_child.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "ask_checkpoint_module", _answer)
        patch.setattr(drill, "_read_by_trainer", _read)
        yield


def _read(request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    reader = importlib.import_module("trainer.checkpoint.__main__")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = reader.main([json.dumps(request, default=str)])
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def _answer(command: str, **values: object) -> dict[str, Any] | None:
    value = json.loads(_read({"command": command, "as_json": True, **values}).stdout)
    assert isinstance(value, dict)
    return value
