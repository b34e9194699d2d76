"""A holder, or a preparation of a launch, that is killed at any point of its work."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LATER
from tests.tr11ops.trainers.holding import (
    FILES,
    Bench,
    contents,
)
from tr11ops.trainers.checkpoints import survey
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.manifest import manifest_faults

CHANGES = {"os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.truncate"}


def run_killed_at(point: int, work: Callable[[], object]) -> bool:
    """Do something in a child process that is killed before its `point`-th change of a file system;
    returns whether it came to its end before.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        return status == 0
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        if event not in CHANGES and not is_writing:
            return
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(77)


def test_killed_at_any_point_a_holder_leaves_nothing_half_that_is_taken_for_whole(
    tmp_path: Path,
) -> None:
    point, done = 1, False
    while not done:
        root = tmp_path / str(point)
        root.mkdir()
        bench = Bench(root)
        bench.save(8, 16)
        before = contents(bench.folder)
        done = run_killed_at(point, bench.hold)
        for step in bench.steps:
            manifest = bench.manifest(step)
            assert not manifest_faults(bench.paths.checkpoint(step), manifest, read_digests=True)
        assert contents(bench.folder) == before
        bench.hold()
        assert bench.steps == [8, 16] and read_latest(bench.paths.checkpoints) == 16
        assert contents(bench.folder) == before
        hidden = [one.name for one in bench.paths.checkpoints.iterdir() if one.name[0] == "."]
        assert not [name for name in hidden if "holding" in name]
        shutil.rmtree(root)
        point += 1
    assert point > 40


@pytest.mark.parametrize("dialect", sorted(FILES))
def test_killed_at_any_point_what_is_put_back_is_whole_or_is_put_back_again(
    tmp_path: Path, dialect: str
) -> None:
    def ready(root: Path) -> Bench:
        root.mkdir()
        bench = Bench(root, dialect)
        bench.save(8)
        bench.hold()
        bench.save(16)
        bench.hold()
        for path in bench.folder.glob("*16*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif "rank0" not in path.name:
                path.unlink()
        return bench

    point, done = 1, False
    while not done:
        bench = ready(tmp_path / str(point))
        old = contents(bench.folder)
        done = run_killed_at(point, bench.prepare)
        start = bench.prepare()
        assert start is not None and start.step == 16, point
        found = survey(bench.place.rules, bench.folder, 2, LATER)
        assert found.wanted is not None and found.wanted.step == 16
        kept = contents(bench.folder) | contents_aside(bench)
        tracker = bench.place.rules.tracker
        assert {path: text for path, text in old.items() if path != tracker}.items() <= kept.items()
        shutil.rmtree(tmp_path / str(point))
        point += 1
    assert point > 5


def contents_aside(bench: Bench) -> dict[str, bytes]:
    folder = bench.folder.with_name("out.set-aside")
    return contents(folder) if folder.exists() else {}
