"""The pages of runbooks/ by detector, for tests."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[3] / "runbooks"


PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
