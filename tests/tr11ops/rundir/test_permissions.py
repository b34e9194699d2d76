"""Rights of a tree: every fault found and repaired, no link followed, no name too odd, no one
else's file touched.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tr11ops.rundir.permissions import (
    FILE_BITS,
    FOLDER_BITS,
    PermissionTally,
    PermissionWalk,
    faults_of,
)

HOSTILE = ["a\nb", "-rf", "a b'\"$(x)", "\udcff\udcfe", "ü\x1b[31m", "x" * 255]


def mode(path: Path | bytes) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def tree(root: Path) -> list[Path]:
    """A tree with what is wrong in every way; returns its entries."""
    deep = root / "deep" / "er"
    deep.mkdir(parents=True)
    files = [root / name for name in HOSTILE] + [deep / "file", root / "readonly"]
    for path in files:
        path.write_text("x")
        path.chmod(0o600)
    (root / "readonly").chmod(0o444)
    (root / "run.sh").write_text("x")
    (root / "run.sh").chmod(0o755)
    for folder in (root, root / "deep", deep):
        folder.chmod(0o700)
    return [root, root / "deep", deep, root / "run.sh", *files]


def walk(root: Path, repair: bool, **options: int) -> PermissionTally:
    group = options.pop("group", root.stat().st_gid)
    return PermissionWalk(root, group, repair, threads=4, **options).run(every_seconds=0.01)


def test_everything_is_found_then_repaired_then_well(tmp_path: Path) -> None:
    root = tmp_path / "run"
    entries = tree(root)
    before = {path: mode(path) for path in entries}
    found = walk(root, repair=False)
    assert (found.entries, found.wrong, found.repaired, found.left) == (
        len(entries),
        len(entries),
        0,
        len(entries),
    )
    assert {path: mode(path) for path in entries} == before
    assert {fault.path for fault in found.examples} == {str(path) for path in entries}
    done = walk(root, repair=True)
    assert (done.wrong, done.repaired, done.left, done.examples) == (
        len(entries),
        len(entries),
        0,
        [],
    )
    for path in entries:
        wanted = FOLDER_BITS if path.is_dir() else FILE_BITS
        # nothing is taken away, and no file becomes a program
        assert mode(path) == before[path] | wanted
    assert walk(root, repair=True).wrong == 0


def test_links_are_neither_followed_nor_changed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    for path in (outside / "secret", outside):
        path.chmod(0o600 if path.is_file() else 0o700)
    root = tmp_path / "run"
    root.mkdir()
    (root / "to-folder").symlink_to(outside)
    (root / "to-file").symlink_to(outside / "secret")
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    done = walk(root, repair=True)
    assert (done.entries, done.left) == (1, 0)
    assert mode(outside) == 0o700 and mode(outside / "secret") == 0o600


def test_a_root_that_is_a_link_means_what_it_points_to(tmp_path: Path) -> None:
    tree(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    assert walk(tmp_path / "link", repair=True).left == 0
    assert walk(tmp_path / "run", repair=False).wrong == 0


def test_a_folder_swapped_for_a_link_is_not_entered(tmp_path: Path) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    (root / "folder").mkdir(parents=True)
    outside.mkdir()
    (outside / "inner").mkdir(mode=0o700)
    walk_ = PermissionWalk(root, root.stat().st_gid, repair=True, threads=1)
    (root / "folder").rmdir()
    (root / "folder").symlink_to(outside)
    walk_._look_into(str(root / "folder" / "inner"))  # as if it had been found before the swap
    assert mode(outside / "inner") == 0o700 and walk_.tally.unreadable == 1


def test_what_others_own_is_told_and_left(tmp_path: Path) -> None:
    root = tmp_path / "run"
    entries = tree(root)
    found = walk(root, repair=True, user=os.geteuid() + 1)
    assert (
        found.repaired == 0
        and found.others == {os.geteuid(): len(entries)}
        and found.left == len(entries)
    )
    assert mode(root) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_group_is_set_and_the_setgid_bit_survives_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    entries = tree(root)
    root.chmod(0o2770)
    assert walk(root, repair=True, group=65534).left == 0
    for path in entries:
        status = path.lstat()
        assert (
            status.st_gid == 65534
            and faults_of(status, 65534, FOLDER_BITS if path.is_dir() else FILE_BITS) == ()
        )


@settings(max_examples=60)
@given(st.integers(0, 0o7777), st.booleans(), st.booleans())
def test_what_is_wrong_with_a_mode(bits: int, is_folder: bool, same_group: bool) -> None:
    wanted = FOLDER_BITS if is_folder else FILE_BITS
    status = os.stat_result(
        (bits | (stat.S_IFDIR if is_folder else stat.S_IFREG), 0, 0, 1, 0, 5, 0, 0, 0, 0)
    )
    faults = faults_of(status, 5 if same_group else 6, wanted)
    assert (faults == ()) == (same_group and bits & wanted == wanted)
