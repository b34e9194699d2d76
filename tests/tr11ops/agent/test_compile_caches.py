"""The compilers' folder of a node: its owner's alone, and bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tr11ops.agent import worker_environment
from tr11ops.agent.worker_environment import caches_folder, prepare_caches


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert prepare_caches(tmp_path)
    assert caches_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    caches_folder(tmp_path).chmod(0o777)
    assert prepare_caches(tmp_path)
    assert caches_folder(tmp_path).stat().st_mode & 0o022 == 0


def test_another_users_folder_or_a_link_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anyone may have made it before, and code is loaded from it."""
    place = caches_folder(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    assert not prepare_caches(tmp_path)
    place.unlink()
    place.mkdir()
    monkeypatch.setattr(worker_environment.os, "geteuid", lambda: os.getuid() + 1)
    caches_folder(tmp_path).mkdir()  # made by who we no more are
    assert not prepare_caches(tmp_path)


def test_what_was_not_used_for_a_day_goes_where_it_has_grown_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_environment, "MOST_BYTES", 250)
    folder = caches_folder(tmp_path) / "inductor"
    folder.mkdir(parents=True)
    for name, days in (("oldest", 9), ("old", 5), ("new", 0), ("newer", 0)):
        (folder / name).write_bytes(bytes(100))
        then = time.time() - days * 86400
        os.utime(folder / name, (then, then))
    assert prepare_caches(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["new", "newer"]
    monkeypatch.setattr(worker_environment, "MOST_BYTES", 50)
    assert prepare_caches(tmp_path)  # what may be in use stays
    assert len(list(folder.iterdir())) == 2
