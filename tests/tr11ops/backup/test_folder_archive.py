"""The folder archive and its file system: mounted or not, full, read-only, hostile, shared."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tr11ops.backup.bucket_cases import Cut, begin
from tests.tr11ops.backup.copy_cases import (
    RUN,
    VARIANT,
    contents,
    copy,
    make_archive,
    make_checkpoint,
)
from tr11ops.backup import folder
from tr11ops.backup.archives import archive_address, archive_key, open_archive
from tr11ops.backup.base import RemoteFile, as_pieces, hidden_place
from tr11ops.backup.folder import MARKER_FILE, FolderArchive, Owner, part_path
from tr11ops.base.errors import ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.rundir.copies import CopyRecord, write_copy
from tr11ops.rundir.paths import RunDirectory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A small file system in memory."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


class Quota(FolderArchive):
    """Where a quota leaves less than the file system says."""

    def free_bytes(self) -> int | None:
        return 10**15


def put(archive: FolderArchive, path: str, content: bytes, cut: int | None = None) -> None:
    if cut is None:
        archive.upload(path, len(content), "id", as_pieces(content))
    else:
        begin(archive, path, len(content), content[:cut], identity="id")


def begun_at(archive: FolderArchive, path: str, identity: str) -> int:
    """From where on a file of ten bytes is sent, of which none are."""
    offsets: list[int] = []

    def pieces(offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        raise Cut
        yield b""

    with pytest.raises(Cut):
        archive.upload(path, 10, identity, pieces)
    return offsets[0]


# ----------------------------------------------------------------------------- whose archive
def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ArchivePermanentError, match=f"mkdir {tmp_path}/store"):
        FolderArchive(tmp_path / "store", "store", Owner(RUN))
    assert not (tmp_path / "store").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchivePermanentError):
        FolderArchive(tmp_path / "file", "store", Owner(RUN))


def test_an_empty_mount_point_is_not_taken_for_the_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchivePermanentError, match="is its file system mounted"):
        make_archive(tmp_path / "store", has_copies=True)
    archive = make_archive(tmp_path / "store")
    assert list(archive.list("")) == [] and contents(tmp_path / "store") == {}, (
        "looking writes nothing"
    )
    archive.put("a", b"x")
    make_archive(tmp_path / "store", has_copies=True)
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(ArchivePermanentError):  # unmounted while it was open
        archive.put("b", b"x")
    assert not (tmp_path / "store").exists()


def test_another_runs_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    one = FolderArchive(tmp_path / "store", "store", Owner("run-one"))
    two = FolderArchive(tmp_path / "store", "store", Owner("run-two"))
    one.put("a", b"x")
    with pytest.raises(ArchivePermanentError, match="archive of 'run-one', not of 'run-two'"):
        two.put("b", b"x")  # both began at once
    with pytest.raises(ArchivePermanentError, match="archive of 'run-one'"):
        FolderArchive(tmp_path / "store", "store", Owner("run-two"))
    (tmp_path / "store" / MARKER_FILE).write_text("{")
    with pytest.raises(ArchivePermanentError, match="cannot be read"):
        FolderArchive(tmp_path / "store", "store", Owner("run-one"))
    (tmp_path / "store" / MARKER_FILE).write_text(json.dumps({"run": "run-two"}))
    FolderArchive(tmp_path / "store", "store", Owner("run-two")).put("b", b"x")


# ----------------------------------------------------------------------------- files
def test_a_file_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    put(archive, "a/b/c", b"0123456789", cut=4)
    assert archive.look("a/b/c") is None and [file.path for file in archive.list("a")] == []
    assert begun_at(archive, "a/b/c", "other") == 0
    put(archive, "a/b/c", b"0123456789")
    assert archive.look("a/b/c") == RemoteFile("a/b/c", 10)
    assert b"".join(archive.read("a/b/c")) == b"0123456789"
    assert (
        b"".join(archive.read("a/b/c", 3, 4)) == b"3456"
        and b"".join(archive.read("a/b/c", 8)) == b"89"
    )
    assert sorted(file.path for file in archive.list("")) == ["a/b/c", MARKER_FILE]
    assert (
        list(archive.list("none")) == []
        and archive.look("a/b") is None
        and archive.look("a/b/c/d") is None
    )
    with pytest.raises(ArchivePermanentError):
        list(archive.read("none"))


def test_a_part_that_is_too_long_is_begun_again(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    put(archive, "a", b"0123456789", cut=8)
    part = part_path(tmp_path / "store" / "a", "id")
    with part.open("ab") as stream:
        stream.write(b"more than there is to send")
    assert begun_at(archive, "a", "id") == 0
    with pytest.raises(ArchivePermanentError, match="3 bytes instead of 10"):
        archive.upload("a", 10, "id", as_pieces(b"abc"))
    assert archive.look("a") is None


def test_another_users_unshared_part_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive(tmp_path / "store")
    put(archive, "a", b"0123456789", cut=4)
    part, real, refused = part_path(tmp_path / "store" / "a", "id"), os.open, []

    def denied(path: object, *given: int, **options: int) -> int:
        if path == part and not refused:
            refused.append(path)
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(folder.os, "open", denied)
    assert begun_at(archive, "a", "id") == 0
    put(archive, "a", b"0123456789")
    assert refused and (tmp_path / "store" / "a").read_bytes() == b"0123456789"


def test_names_as_long_as_may_be(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    archive.put("n" * 255, b"x")
    assert archive.look("n" * 255) == RemoteFile("n" * 255, 1)
    with pytest.raises(ArchivePermanentError):
        archive.put("n" * 256, b"x")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\0b", "out/x"])
def test_places_outside_are_refused(tmp_path: Path, path: str) -> None:
    archive = make_archive(tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store" / "out").symlink_to(tmp_path / "elsewhere")
    for action in (
        archive.look,
        lambda path: archive.put(path, b"x"),
        lambda path: list(archive.read(path)),
    ):
        with pytest.raises(ArchivePermanentError):
            action(path)
    with pytest.raises(ArchivePermanentError):
        archive.move("tr11-archive.json", path)
    assert contents(tmp_path / "elsewhere") == {}


def test_moving_replaces_nothing(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    hidden = hidden_place("c/step", "0123456789abcdef")
    put(archive, f"{hidden}/x", b"1")
    put(archive, "c/taken/x", b"2")
    assert [file.path for file in archive.list("c")] == ["c/taken/x"]
    assert [file.path for file in archive.list(hidden)] == [f"{hidden}/x"]
    with pytest.raises(ArchivePermanentError, match="not replaced"):
        archive.move(hidden, "c/taken")
    archive.move(hidden, "d/step")
    assert [file.path for file in archive.list("d")] == ["d/step/x"]
    with pytest.raises(ArchivePermanentError, match="is not there"):
        archive.move(hidden, "d/other")


def test_sweep_removes_old_leftovers_alone(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    hidden = hidden_place("c/step", "0123456789abcdef")
    put(archive, f"{hidden}/sub/x", b"123", cut=1)
    put(archive, "c/half", b"123", cut=1)
    put(archive, "c/.metadata", b"123")
    assert archive.sweep(time.time() - 3600) == 0
    old = tmp_path / "store" / "c" / ".global"
    old.mkdir()
    assert archive.sweep(time.time() + 3600) == 2
    assert sorted(contents(tmp_path / "store")) == ["c/.metadata", MARKER_FILE] and old.is_dir()


def test_what_is_made_is_the_groups(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        archive = make_archive(tmp_path / "store")
        archive.put("a/b/c", b"x")
    finally:
        os.umask(before)
    for path in ("a", "a/b"):
        assert (tmp_path / "store" / path).stat().st_mode & 0o2070 == 0o2070
    for path in ("a/b/c", MARKER_FILE):
        assert (tmp_path / "store" / path).stat().st_mode & 0o060 == 0o060


# ------------------------------------------------------------------------ the file system's answers
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, ArchiveFull), (errno.EDQUOT, ArchiveFull), (errno.EROFS, ArchivePermanentError),
        (errno.EACCES, ArchivePermanentError), (errno.EPERM, ArchivePermanentError), (errno.EIO, ArchiveUnavailable),
        (errno.ESTALE, ArchiveUnavailable), (errno.ETIMEDOUT, ArchiveUnavailable), (errno.ENODEV, ArchiveUnavailable),
    ],
)  # fmt: skip
def test_each_error_has_its_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    archive = make_archive(tmp_path / "store")
    archive.put("a", b"x")

    def fail(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(folder.os, "pwrite", fail)
        with pytest.raises(kind, match=os.strerror(number)) as caught:
            archive.put("b", b"x")
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
        with pytest.raises(kind):
            copy(archive, make_checkpoint(tmp_path / VARIANT))
    with monkeypatch.context() as patched:
        patched.setattr(folder.os, "fsync", fail)
        with pytest.raises(kind):
            archive.put("b", b"x")
    assert archive.look("b") is None


@needs_root
@pytest.mark.parametrize("format", ["files", "tar"])
def test_a_disk_that_is_full_and_then_has_room(tmp_path: Path, format: str) -> None:
    checkpoint = make_checkpoint(tmp_path / VARIANT)
    with mounted(tmp_path / "store", "size=192k,mode=0775") as store:
        archive = Quota(store, "store", Owner(RUN))
        with pytest.raises(ArchiveFull, match="make room"):
            copy(archive, checkpoint, format=format)
        assert [file.path for file in archive.list("")] == [MARKER_FILE]
        sent = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        assert sent > 100_000, "what was sent is kept"
        subprocess.run(["mount", "-o", "remount,size=2m", store], check=True)
        receipt = copy(archive, checkpoint, format=format)
        assert receipt.bytes > 250_000
        subprocess.run(["mount", "-o", "remount,ro", store], check=True)
        again = make_archive(store, has_copies=True)
        assert copy(again, checkpoint, format=format) == receipt, "what is there is still seen"
        with pytest.raises(ArchivePermanentError, match="Read-only"):
            copy(again, checkpoint, kind="weights")
        assert again.free_bytes() is not None


@needs_root
@pytest.mark.parametrize("format", ["files", "tar"])
def test_a_copy_for_which_there_is_no_room_is_not_begun(tmp_path: Path, format: str) -> None:
    checkpoint = make_checkpoint(
        tmp_path / VARIANT, sizes=dict.fromkeys((f"weights/{n}" for n in range(40)), 20_000)
    )
    with mounted(tmp_path / "store", "size=512k,mode=0775") as store:
        with pytest.raises(ArchiveFull, match="has no room"):
            copy(make_archive(store), checkpoint, format=format)
        assert sum(map(len, contents(store).values())) < 1000


@needs_root
def test_a_disk_that_is_unmounted_meanwhile(tmp_path: Path) -> None:
    with mounted(tmp_path / "store", "size=1m,mode=0775") as store:
        archive = make_archive(store)
        archive.put("a", b"x")
    with pytest.raises(ArchiveUnavailable, match="is it mounted"):
        archive.put("b", b"x")
    assert contents(tmp_path / "store") == {}


@needs_root
def test_a_disk_without_inodes(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / VARIANT)
    with mounted(tmp_path / "store", "size=4m,nr_inodes=12,mode=0775") as store:
        archive = Quota(store, "store", Owner(RUN))
        with pytest.raises(ArchiveFull):
            copy(archive, checkpoint)
        archive.sweep(time.time() + 3600)
        copy(archive, checkpoint, format="tar")


# ----------------------------------------------------------------------------- opening by the card
def card(tmp_path: Path, **keys: str) -> RunCard:
    overrides = [f'backup.{key}="{value}"' for key, value in keys.items()]
    return load_card(
        shipped_folder() / "demo.toml", overrides, dict(os.environ), directory=tmp_path
    )


def test_archives_of_the_card(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "other").mkdir()
    opened = card(tmp_path, store=str(tmp_path / "store"))
    archive = open_archive("store", opened)
    assert (archive.name, archive.address) == ("store", str(tmp_path / "store"))
    assert open_archive(f"file://{tmp_path}/store/", opened).name == "store"
    other = open_archive(str(tmp_path / "other"), opened)
    assert other.name.startswith("other-") and other.name == archive_key(
        str(tmp_path / "other"), opened
    )
    assert archive_address("gcs://bucket/a/") == archive_address("gs://bucket/a")
    with pytest.raises(ArchivePermanentError, match=r"backup\.url is not set"):
        open_archive("url", opened)


def test_an_archive_with_copies_on_record_must_have_its_marker(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    opened = card(tmp_path, store=str(tmp_path / "store"))
    open_archive("store", opened)
    record = CopyRecord(
        "store",
        str(tmp_path / "store"),
        7,
        "full",
        "ab",
        "checkpoints/main/global_step7",
        "files",
        1,
        1,
        1.0,
        1.0,
    )
    directory = RunDirectory(opened.paths, opened.kill_switch)
    write_copy(directory, record)
    with pytest.raises(ArchivePermanentError, match="is its file system mounted"):
        open_archive("store", opened)
    for path in (directory.paths.state / "backup" / "copies").rglob("*.json"):
        path.write_text("{")
    with pytest.raises(ArchivePermanentError, match="records of copies cannot be read"):
        open_archive("store", opened)
