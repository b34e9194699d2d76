"""Copies come back: from a folder, a tar and a bucket, after any failure, and never in the place of
something else.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec.structs import replace

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.copy_cases import (
    SIZES,
    VARIANT,
    OddArchive,
    contents,
    copy,
    make_archive,
    make_checkpoint,
    quick,
)
from tests.tr11ops.backup.fault_proxy import Fault
from tests.tr11ops.backup.remote_nursery import RemoteNursery
from tr11ops.backup.base import ARCHIVE_RETRIES, Archive
from tr11ops.backup.remote import open_remote
from tr11ops.backup.restorable import cautions, restorable, unreceipted
from tr11ops.backup.restore import restore_checkpoint, restore_file
from tr11ops.base.errors import ArchiveUnavailable, CopyError, CopyStopped
from tr11ops.rundir.copies import CopiedFile
from trainer.contract.manifest import Manifest, manifest_faults


@pytest.fixture(params=["folder", "tar", "bucket", "bucket-tar", "file-url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Archive, str]:
    """An archive, and the format of copies in it."""
    kind = str(request.param)
    if kind in {"folder", "tar"}:
        return make_archive(tmp_path / "store"), "tar" if kind == "tar" else "files"
    if kind == "file-url":
        return open_remote(f"file://{tmp_path}/far", {"auto_mkdir": True}), "files"
    store = request.getfixturevalue("object_store")
    return store.open(), "tar" if kind == "bucket-tar" else "files"


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path, place: tuple[Archive, str]) -> None:
    archive, format = place
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, "optimizer/large": 5 << 20})
    receipt = copy(archive, source, format=format)
    counted: list[int] = []
    home = restore_checkpoint(archive, receipt, tmp_path / "new", quick(on_bytes=counted.append))
    assert home == tmp_path / "new" / source.name
    assert contents(home) == contents(source)
    assert sum(counted) == receipt.bytes
    assert [path.name for path in (tmp_path / "new").iterdir()] == [source.name], (
        "nothing else is left"
    )
    manifest = Manifest.read(home)
    assert manifest is not None and manifest_faults(home, manifest, read_digests=True) == []
    assert restore_checkpoint(archive, receipt, tmp_path / "new", quick()) == home, (
        "it is there already"
    )
    for path in ("optimizer/large", "cursor.json", "rng/rank_0.pt"):
        one = restore_file(archive, receipt, path, tmp_path / "one")
        assert one.read_bytes() == (source / path).read_bytes()
        assert restore_file(archive, receipt, path, tmp_path / "one") == one


def test_one_file_of_a_tar_is_read_without_the_rest(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    source = make_checkpoint(tmp_path / "run", sizes={"weights/a": 1 << 20, "weights/b": 10})
    receipt = copy(object_store.open(), source, format="tar")
    object_store.faults.clear()
    restore_file(object_store.open(), receipt, "weights/b", tmp_path / "one")
    ((_, _, headers),) = object_store.faults.seen
    (file,) = (file for file in receipt.files if file.path == "weights/b")
    assert headers["Range"] == f"bytes={file.offset}-{file.offset + 9}"  # type: ignore[operator]


def test_another_checkpoint_of_the_same_step_is_not_touched(tmp_path: Path) -> None:
    archive, new = make_archive(tmp_path / "store"), tmp_path / "new"
    receipt = copy(archive, make_checkpoint(tmp_path / "run"))
    other = make_checkpoint(new, seed=9)
    before = contents(other)
    with pytest.raises(CopyError, match=r"is there already, and is not this copy"):
        restore_checkpoint(archive, receipt, new, quick())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "cursor.json").write_text("mine")
    with pytest.raises(CopyError, match=r"is there already, and is another file"):
        restore_file(archive, receipt, "cursor.json", tmp_path / "one")
    assert contents(other) == before
    with pytest.raises(CopyError, match=r"holds no file 'large'"):
        restore_file(archive, receipt, "large", tmp_path / "one")


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(stops=st.lists(st.integers(1, 25), max_size=4), format=st.sampled_from(["files", "tar"]))
def test_goes_on_wherever_it_was_stopped(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], format: str
) -> None:
    tmp_path = tmp_path_factory.mktemp("restore")
    archive = make_archive(tmp_path / "store")
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(archive, source, format=format)
    for stop in stops:
        left = iter(range(stop))

        def ends(what: str, path: str, position: int, left: object = left) -> None:
            if what == "piece" and next(left, None) is None:  # type: ignore[call-overload]
                raise CopyStopped("stopped")

        try:
            restore_checkpoint(OddArchive(archive, ends), receipt, tmp_path / "new", quick())
        except CopyStopped:
            assert not (tmp_path / "new" / source.name).exists()
    asked: list[int] = []

    def watch(what: str, path: str, position: int) -> None:
        if what == "read":
            asked.append(position)

    home = restore_checkpoint(OddArchive(archive, watch), receipt, tmp_path / "new", quick())
    assert contents(home) == contents(source)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [source.name]


def test_goes_on_after_kill_9(tmp_path: Path) -> None:
    chance, kills = random.Random(5), 0
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, "optimizer/large": 3 << 20})
    receipt = copy(make_archive(tmp_path / "store"), source)
    what = {"store": str(tmp_path / "store"), "location": receipt.location}
    with RemoteNursery() as processes:
        moments = processes.restore(0, into=str(tmp_path / "first"), **what)
        for number in range(8):
            new = tmp_path / f"new{number}"
            for _ in range(3):
                if processes.restore(chance.randrange(1, moments + 1), into=str(new), **what) < 0:
                    kills += 1
                if (new / source.name).exists():
                    assert contents(new / source.name) == contents(source), (
                        "it is visible, so it is whole"
                    )
            assert processes.restore(0, into=str(new), **what) >= 0
            assert contents(new / source.name) == contents(source)
            assert [path.name for path in new.iterdir()] == [source.name]
    assert kills > 8


def test_a_part_with_changed_bytes_is_read_again(tmp_path: Path) -> None:
    archive, new = make_archive(tmp_path / "store"), tmp_path / "new"
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(archive, source)
    with pytest.raises(CopyStopped):
        restore_checkpoint(OddArchive(archive, stop_after(6)), receipt, new, quick(parallel=1))
    (partial,) = new.iterdir()
    damaged = max(
        (path for path in partial.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damaged.write_bytes(bytes(damaged.stat().st_size))
    said: list[str] = []
    home = restore_checkpoint(archive, receipt, new, quick(say=said.append))
    assert contents(home) == contents(source)
    assert any("it is read again" in line for line in said)


def stop_after(count: int) -> Callable[[str, str, int], None]:
    left = iter(range(count))

    def on(what: str, path: str, position: int) -> None:
        if what == "piece" and next(left, None) is None:
            raise CopyStopped("stopped")

    return on


def test_a_damaged_copy_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(archive, source)
    far = tmp_path / "store" / receipt.location / "optimizer/__0_0.distcp"
    far.write_bytes(far.read_bytes()[:-1] + b"x")
    with pytest.raises(CopyError, match=r"optimizer/__0_0.distcp is damaged"):
        restore_checkpoint(archive, receipt, tmp_path / "new", quick())
    far.write_bytes(far.read_bytes()[:-1])
    with pytest.raises(CopyError, match=r"is damaged: 139999 bytes, 140000 were copied"):
        restore_checkpoint(archive, receipt, tmp_path / "new", quick())
    assert not (tmp_path / "new" / source.name).exists()


def test_a_bad_network_costs_time_alone(tmp_path: Path, object_store: ObjectStore) -> None:
    archive = object_store.open(requests_timeout=1.0)
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, "optimizer/large": 3 << 20})
    receipt = copy(object_store.open(), source)
    object_store.faults.plant(
        Fault("truncate", "GET", "large", at=1 << 20, times=2),
        Fault("corrupt", "GET", "__0_0", at=1000),
        Fault("reset", "GET", "cursor", times=2),
        Fault("answer", "GET", ".metadata", status=429, times=2),
        Fault("answer", "GET", "__1_0", status=503, times=2),
        Fault("hang", "GET", "manifest"),
    )
    object_store.faults.seen.clear()
    home = restore_checkpoint(archive, receipt, tmp_path / "new", quick())
    assert contents(home) == contents(source)
    ranges = [
        headers.get("Range", "")
        for _, target, headers in object_store.faults.seen
        if "large" in target
    ]
    assert len(ranges) >= 3
    assert int(ranges[-1].removeprefix("bytes=").partition("-")[0]) >= 1 << 20, (
        "it went on in mid-file"
    )


def test_a_dead_network_ends_with_what_is_there_kept(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(object_store.open(), source)
    object_store.faults.plant(Fault("answer", "GET", "__0_0", status=503, times=1000))
    with pytest.raises(ArchiveUnavailable, match="HTTP 503"):
        restore_checkpoint(
            object_store.open(),
            receipt,
            tmp_path / "new",
            quick(retries=replace(ARCHIVE_RETRIES, tries=3, first_seconds=0)),
        )
    object_store.faults.clear()
    home = restore_checkpoint(object_store.open(), receipt, tmp_path / "new", quick())
    assert contents(home) == contents(source)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root alone")
def test_a_full_disk_is_said_and_the_rest_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive(tmp_path / "store")
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, "optimizer/large": 2 << 20})
    receipt = copy(archive, source)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(
            CopyError, match=r"has room for [\d,]+ bytes, and [\d,]+ are still to come"
        ):
            restore_checkpoint(archive, receipt, disk, quick())
        plenty = os.statvfs("/")
        monkeypatch.setattr(os, "statvfs", lambda path: plenty)  # others fill the disk meanwhile
        with pytest.raises(
            CopyError, match=r"disk: No space left on device; make room and repeat the command"
        ):
            restore_checkpoint(archive, receipt, disk, quick(piece_bytes=1 << 16))
        assert not (disk / source.name).exists()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        home = restore_checkpoint(archive, receipt, disk, quick())
        assert contents(home) == contents(source)
    finally:
        subprocess.run(["umount", disk], check=True)


# ------------------------------------------------------------------------ what is not to be trusted


HOSTILE = [
    CopiedFile("../out", 1, ""),
    CopiedFile("/etc/out", 1, ""),
    CopiedFile("a/../../out", 1, ""),
    CopiedFile("a//b", 1, ""),
    CopiedFile("./a", 1, ""),
    CopiedFile("", 1, ""),
    CopiedFile("a\nb", 1, ""),
    CopiedFile("a\\b", 1, ""),
    CopiedFile("a", -1, ""),
    CopiedFile("a", 1 << 60, ""),
    CopiedFile("a", 1.5, ""),  # type: ignore[arg-type]
    CopiedFile("a", 1, "no digest"),
    CopiedFile("weights/.metadata", 1, ""),
    CopiedFile("weights", 1, ""),
]


@pytest.mark.parametrize("file", HOSTILE, ids=lambda file: repr(file.path)[:20])
@pytest.mark.parametrize("format", ["files", "tar"])
def test_a_hostile_receipt_is_refused(tmp_path: Path, file: CopiedFile, format: str) -> None:
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, make_checkpoint(tmp_path / "run"), format=format)
    hostile = replace(receipt, files=(*receipt.files, replace(file, offset=0)))
    for deed in (
        lambda: restore_checkpoint(archive, hostile, tmp_path / "new", quick()),
        lambda: restore_file(archive, hostile, file.path, tmp_path / "new"),
    ):
        with pytest.raises(CopyError, match="not to be trusted"):
            deed()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [{"location": "../x"}, {"location": "/etc"}, {"step": -1}, {"step": "5"}, {"files": ()}],
    ids=str,
)
def test_a_receipt_that_leads_elsewhere_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, make_checkpoint(tmp_path / "run"))
    with pytest.raises(CopyError, match="not to be trusted"):
        restore_checkpoint(archive, replace(receipt, **change), tmp_path / "new", quick())  # type: ignore[arg-type]


def test_a_receipt_of_petabytes_is_refused_before_any_write(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, make_checkpoint(tmp_path / "run"))
    huge = replace(receipt, files=(*receipt.files, CopiedFile("huge", 1 << 52, "")))
    with pytest.raises(CopyError, match=r"has room for [\d,]+ bytes, and [\d,]+ are still to come"):
        restore_checkpoint(archive, huge, tmp_path / "new", quick())


def test_a_manifest_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, make_checkpoint(tmp_path / "run", 100))
    with pytest.raises(CopyError, match="the manifest is that of step 100"):
        restore_checkpoint(archive, replace(receipt, step=200), tmp_path / "new", quick())


def test_a_link_that_was_planted_is_not_written_through(tmp_path: Path) -> None:
    archive, new = make_archive(tmp_path / "store"), tmp_path / "new"
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(archive, source)
    with pytest.raises(CopyStopped):
        restore_checkpoint(OddArchive(archive, stop_after(0)), receipt, new, quick())
    (partial,) = new.iterdir()
    (tmp_path / "victim").write_text("mine")
    for path in (".cursor.json.part", "cursor.json"):
        (partial / path).unlink(missing_ok=True)
    (partial / "cursor.json").symlink_to(tmp_path / "victim")
    home = restore_checkpoint(archive, receipt, new, quick())
    assert contents(home) == contents(source)
    assert not (home / "cursor.json").is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


# ------------------------------------------------------------------------- copies without a receipt


def test_the_originals_copies_are_restored_with_a_doubt(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    """As `gsutil rsync -x "bf16.*" -r` left them."""
    files = {
        f"layer_{number:02}-model_00-model_states.pt": bytes([number]) * 1000 for number in range(4)
    }
    files["mp_rank_00_model_states.pt"] = b"args"
    for name, content in files.items():
        object_store.replace(f"tr11-test/checkpoints-weights/global_step3000/{name}", content)
    receipt = restorable(object_store.open(), VARIANT, 3000).receipt
    assert (receipt.kind, receipt.step, receipt.format) == ("weights", 3000, "files")
    home = restore_checkpoint(object_store.open(), receipt, tmp_path / "new", quick())
    assert contents(home) == files
    assert [line.partition(":")[0] for line in cautions(receipt)] == [
        "checkpoints-weights/global_step3000 has no receipt", "5 of 5 files have no digest"
    ]  # fmt: skip


@pytest.mark.parametrize("format", ["files", "tar"])
def test_a_plain_copy_is_proved_by_its_manifest(
    tmp_path: Path, object_store: ObjectStore, format: str
) -> None:
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, "weights/" + "long" * 40: 3})
    if format == "tar":
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            tar.add(source, source.name)
        object_store.replace(
            f"tr11-test/checkpoints/{source.name}.tar", (tmp_path / "x.tar").read_bytes()
        )
    else:
        for path, content in contents(source).items():
            object_store.replace(f"tr11-test/checkpoints/{source.name}/{path}", content)
    receipt = restorable(object_store.open(), VARIANT, 100).receipt
    assert (receipt.format, receipt.kind, len(cautions(receipt))) == (format, "full", 1)
    home = restore_checkpoint(object_store.open(), receipt, tmp_path / "new", quick())
    assert contents(home) == contents(source)
    entry = receipt.files[0]
    wrong = replace(receipt, files=(replace(entry, digest="0" * 64), *receipt.files[1:]))
    with pytest.raises(CopyError, match="is damaged"):
        restore_checkpoint(object_store.open(), wrong, tmp_path / "other", quick())


def test_a_plain_copy_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = make_checkpoint(store / "checkpoints" / VARIANT)
    (source / "cursor.json").unlink()
    with pytest.raises(CopyError, match=r"cursor.json is missing"):
        restorable(make_archive(store), VARIANT, 100)
    (source / "cursor.json").write_text("{}")
    with pytest.raises(CopyError, match=r"cursor.json has 2 bytes instead of 120"):
        restorable(make_archive(store), VARIANT, 100)
    (source / "manifest.json").write_text("{")
    with pytest.raises(CopyError, match=r"manifest.json is damaged"):
        restorable(make_archive(store), VARIANT, 100)
    (source / "manifest.json").unlink()
    with pytest.raises(CopyError, match=r"no receipt and no manifest.json: its copy did not end"):
        restorable(make_archive(store), VARIANT, 100)
    with pytest.raises(CopyError, match=r"holds no copy of step 5"):
        restorable(make_archive(store), VARIANT, 5)


@pytest.mark.parametrize("content", [b"", b"no tar" * 1000, b"\0" * 512])
def test_what_is_no_tar_is_said(tmp_path: Path, content: bytes) -> None:
    archive = make_archive(tmp_path / "store")
    archive.put("checkpoints/main/global_step100.tar", content)
    try:
        found = unreceipted(archive, "checkpoints/main/global_step100.tar", 100, VARIANT)
    except CopyError as error:
        assert "is no tar" in str(error)
    else:
        assert found is None and not content.strip(b"\0")


def test_the_newest_whole_copy_is_chosen(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "store")
    first = make_checkpoint(tmp_path / "run")
    times = iter([1.0, 3.0, 2.0])
    one = copy(archive, first, clock=lambda: next(times))
    weights = copy(archive, first, kind="weights", clock=lambda: next(times))
    assert restorable(archive, VARIANT, 100).receipt == one
    assert restorable(archive, VARIANT, 100, "weights").receipt == weights
    other = copy(archive, make_checkpoint(tmp_path / "anew", seed=5), clock=lambda: next(times))
    assert other.location != one.location
    with pytest.raises(
        CopyError, match=r"there are several checkpoints of step 100: .*name one: --identity"
    ):
        restorable(archive, VARIANT, 100)
    assert restorable(archive, VARIANT, 100, identity=other.identity[:8]).receipt == other
    assert restorable(archive, VARIANT, 100, "weights", identity=one.identity).receipt == weights
    with pytest.raises(CopyError, match=r"names no copy of step 100"):
        restorable(
            archive,
            VARIANT,
            100,
            identity="ffff" if not one.identity.startswith("ffff") else "0000",
        )
    home = restore_checkpoint(archive, weights, tmp_path / "new", quick())
    assert json.loads((home / "manifest.json").read_text())["step"] == 100
    assert not (home / "optimizer").exists()
