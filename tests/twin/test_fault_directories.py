"""What is noted of a directory before a fault lies over it, while a run writes there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tr11ops.twin.fault_files import _listing


def test_a_folder_that_goes_away_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that ends renames its folder between the look at its parent and the look into it."""
    (tmp_path / "checkpoints" / ".partial").mkdir(parents=True)
    (tmp_path / "log").write_text("x")
    (tmp_path / "latest").symlink_to("checkpoints")
    scandir = os.scandir

    def renamed(path: str | Path) -> object:
        if Path(path).name == ".partial":
            Path(path).rename(tmp_path / "checkpoints" / "global_step5")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed)
    assert set(_listing(tmp_path)) == {"log", "latest"}
    monkeypatch.undo()
    (tmp_path / "checkpoints" / "global_step5" / "weights").write_text("w")
    assert set(_listing(tmp_path)) == {"log", "latest", "checkpoints/global_step5/weights"}
