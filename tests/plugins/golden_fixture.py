"""Golden files: what a person agreed to see. `pytest --accept` writes what is seen now; `git diff`
shows the change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
