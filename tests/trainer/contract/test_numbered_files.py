"""Numbered files: of many hosts one makes a number, whatever a network file system answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tr11ops.alerts import outbox
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.files import NumberedFiles
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.paths import RunPaths


def lease(root: Path, number: int) -> bool:
    claim = LeaseClaim.of_this_process("7", 1)
    return LeaseFolder(RunPaths(root, "n", "main")).claim(number, replace(claim, epoch=number))


def directory_of(root: Path) -> RunDirectory:
    return RunDirectory(RunPaths(root, "n", "main"), root / "kill-switch")


def periodic(root: Path, number: int) -> bool:
    mine = Claim.of_this_process(time.time(), 60)
    before = replace(mine, epoch=number - 1) if number > 1 else None
    return ClaimFolder(directory_of(root), "pulse").take(mine, before) is not None


def message(root: Path, number: int) -> bool:
    del number  # it takes the next one
    return outbox._claim(outbox._claims(directory_of(root), "a-mail")) is not None


def version(root: Path, number: int) -> bool:
    return VersionedFile(root / "list.json", 4).put(number, f"{number}\n")


USERS = pytest.mark.parametrize("take", [lease, periodic, message, version])


@USERS
def test_an_answer_that_was_lost_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[Path, int], bool]
) -> None:
    """A message whose claim was lost so waited for a quarter of an hour."""
    link = os.link

    def lose_the_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert take(tmp_path, 1)


@pytest.mark.parametrize(
    ("take", "is_taken"), [(lease, True), (periodic, True), (message, True), (version, False)]
)
def test_without_hard_links_a_claim_is_made_a_version_is_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Path, int], bool],
    is_taken: bool,
) -> None:
    """A version that is seen unfinished would count as damaged, and the one before it again."""

    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    if is_taken:
        assert take(tmp_path, 1)
        assert not take(tmp_path, 1)
    else:
        with pytest.raises(OSError, match="Operation not permitted"):
            take(tmp_path, 1)
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


@pytest.mark.parametrize("take", [periodic, version])
def test_who_slept_while_others_went_on_has_nothing(
    tmp_path: Path, take: Callable[[Path, int], bool]
) -> None:
    """Its number was used and removed since: it is free again, and far behind."""
    for number in range(1, 9):
        assert take(tmp_path, number)
    assert not take(tmp_path, 2)


def test_one_of_many_makes_a_number(tmp_path: Path) -> None:
    files = NumberedFiles(tmp_path / "claims", "a.", suffix="")
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda who: files.make(1, str(who).encode()), range(64)))
    assert sum(made) == 1 and files.newest() == (1, str(made.index(True)).encode())
    assert [path.name for path in files.path.iterdir()] == ["a.1"]


def test_numbers_of_others_do_not_count(tmp_path: Path) -> None:
    for name in ("a.1", "a.x", "ab.7", "a.3", ".a.9.draft", "a.10.json"):
        (tmp_path / name).touch()
    files = NumberedFiles(tmp_path, "a.", suffix="")
    assert files.numbers() == [1, 3] and files.is_newest(3) and not files.is_newest(1)
    files.clear(1)
    assert files.numbers() == [3]
    assert NumberedFiles(tmp_path / "none").newest() == (0, b"")


def test_age_is_told_by_the_file_servers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = NumberedFiles(tmp_path)
    assert files.make(1, b"x")
    past = time.time() - 100.0
    os.utime(files.file(1), (past, past))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 99.0 < files.age(1) < 160.0
    with pytest.raises(FileNotFoundError):
        files.age(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json"]
