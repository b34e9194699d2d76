"""The source of a copy while it is read; stops, and two copies at once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.tr11ops.backup.checkpoint_copies import FORMATS, LOCATION, far, nothing_published
from tests.tr11ops.backup.copy_cases import (
    VARIANT,
    OddArchive,
    copy,
    make_archive,
    make_checkpoint,
    quick,
)
from tr11ops.backup.copying import work_bytes
from tr11ops.backup.folder import FolderArchive
from tr11ops.backup.source import read_source
from tr11ops.backup.survey import list_receipts, parse_receipt
from tr11ops.base.errors import CheckpointChanged, CopyError, CopyStopped, SourceDamaged


# ----------------------------------------------------------------------------- the source
@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_source_is_not_published(
    checkpoint: Path, archive: FolderArchive, format: str
) -> None:
    path = checkpoint / "optimizer" / "__0_0.distcp"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SourceDamaged, match=r"__0_0\.distcp: its digest differs"):
        copy(archive, checkpoint, format=format)
    assert nothing_published(archive)
    # restored: what the damaged one left at the destination is found out by reading back
    path.write_bytes(good)
    receipt = copy(archive, checkpoint, format=format)
    assert copy(archive, checkpoint, repair=True).files == receipt.files


@pytest.mark.parametrize("change", ["shrinks", "grows", "vanishes", "rolled back", "moved"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_source_that_changes_meanwhile(
    checkpoint: Path, archive: FolderArchive, change: str, format: str
) -> None:
    path = checkpoint / "optimizer" / "__0_0.distcp"
    done: list[int] = []

    def spoil(what: str, far_path: str, position: int) -> None:
        is_it = "optimizer/__0_0" in far_path if format == "files" else position > 100_000
        if what != "write" or not is_it or position < 32_768 or done:
            return
        done.append(position)
        if change == "shrinks":
            os.truncate(path, 50_000)
        elif change == "grows":
            with path.open("ab") as stream:
                stream.write(b"more")
        elif change == "vanishes":
            for name in (
                "manifest.json",
                "optimizer/__0_0.distcp",
                "optimizer/__1_0.distcp",
                "weights/__0_0.distcp",
            ):
                (checkpoint / name).unlink()
        else:
            checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.replaced-0"))
            if change == "rolled back":
                make_checkpoint(checkpoint.parent, seed=2)

    with pytest.raises(CheckpointChanged):
        copy(OddArchive(archive, spoil), checkpoint, quick(parallel=1), format=format)
    assert done and nothing_published(archive)


def test_a_source_without_manifest_that_is_rewritten_meanwhile(
    tmp_path: Path, archive: FolderArchive
) -> None:
    folder = make_checkpoint(
        tmp_path / VARIANT, sizes={"mp_rank_00_model_states.pt": 100, "layer_01.pt": 40_000}
    )
    (folder / "manifest.json").unlink()

    def rewrite(what: str, path: str, position: int) -> None:
        if what == "finish" and path.endswith("layer_01.pt"):
            (folder / "layer_01.pt").write_bytes(bytes(40_000))

    with pytest.raises(CheckpointChanged):
        copy(OddArchive(archive, rewrite), folder)
    assert nothing_published(archive)


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "/etc/hosts",
        "weights/../../secret",
        "a//b",
        "./a",
        "manifest.json",
        "weights/.x.0a.part",
        "a\nb",
        "",
    ],
)
def test_hostile_paths_in_a_manifest(checkpoint: Path, archive: FolderArchive, path: str) -> None:
    value = json.loads((checkpoint / "manifest.json").read_text())
    value["files"].append({"path": path, "bytes": 6, "digest": "0" * 64})
    (checkpoint / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(SourceDamaged):
        copy(archive, checkpoint)
    assert nothing_published(archive)


def test_links(checkpoint: Path, archive: FolderArchive, tmp_path: Path) -> None:
    inner = checkpoint / "optimizer" / "__1_0.distcp"
    inner.rename(checkpoint / "optimizer" / "elsewhere")
    inner.symlink_to("elsewhere")
    copy(archive, checkpoint)
    copied = far(archive) / LOCATION / "optimizer" / "__1_0.distcp"
    assert copied.read_bytes() == inner.read_bytes() and not copied.is_symlink()
    (checkpoint / "optimizer" / "elsewhere").rename(tmp_path / "outside")
    inner.unlink()
    inner.symlink_to(tmp_path / "outside")
    with pytest.raises(SourceDamaged, match="out of the checkpoint"):
        copy(archive, checkpoint, kind="full", repair=True)


def test_what_is_no_complete_checkpoint(
    checkpoint: Path, archive: FolderArchive, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointChanged, match="is not there"):
        copy(archive, tmp_path / "global_step7")
    renamed = checkpoint.rename(checkpoint.with_name("global_step200"))
    with pytest.raises(SourceDamaged, match="manifest of step 100"):
        copy(archive, renamed)
    (renamed / "manifest.json").unlink()
    with pytest.raises(SourceDamaged, match="its save did not end"):
        copy(archive, renamed)
    only_optimizer = make_checkpoint(
        tmp_path / "x", sizes={"bf16_zero_pp_rank_0": 5, "mp_rank_00_model_states.pt": 1}
    )
    (only_optimizer / "manifest.json").write_text("{")
    with pytest.raises(SourceDamaged):
        copy(archive, only_optimizer)


def test_a_pipe_in_the_manifest_s_place_holds_no_one_up(
    checkpoint: Path, archive: FolderArchive
) -> None:
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    with pytest.raises(SourceDamaged, match="manifest"):
        copy(archive, checkpoint)


@pytest.mark.parametrize(
    ("name", "lie"),
    [("step", "7"), ("kind", "half"), ("format", None), ("identity", [1]), ("copied", 1e999), ("verified", True), ("step", 1 << 70)],
)  # fmt: skip
def test_a_receipt_whose_values_are_of_the_wrong_kind(
    checkpoint: Path, archive: FolderArchive, name: str, lie: object
) -> None:
    copy(archive, checkpoint)
    value = json.loads((far(archive) / f"{LOCATION}.copy.json").read_bytes())
    with pytest.raises(ValueError, match="here is not the receipt of a copy"):
        parse_receipt(json.dumps({**value, name: lie}).encode(), "here")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"[" * 99_999, b'{"files": [{}]}', b'{"files": "x"}', b'{"files": [7]}', b'{"schema": 99}', b"\xff\xfe",
        b'{"files": [{"path": "a", "bytes": 1e999, "digest": ""}]}', bytes(1000),
    ],
)  # fmt: skip
def test_a_receipt_that_is_garbage(
    checkpoint: Path, archive: FolderArchive, content: bytes
) -> None:
    first = copy(archive, checkpoint)
    receipt = far(archive) / f"{LOCATION}.copy.json"
    good = receipt.read_bytes()
    receipt.write_bytes(content)
    with pytest.raises(CopyError, match=r"global_step100\.copy\.json is not the receipt of a copy"):
        copy(archive, checkpoint)
    receipt.rename(receipt.with_name("aside"))
    assert copy(archive, checkpoint).files == first.files
    receipt.write_bytes(good.replace(b"global_step100", b"global_step200"))
    with pytest.raises(CopyError, match="it was renamed"):
        copy(archive, checkpoint)


# ------------------------------------------------------------------------ stopping, and two at once
@pytest.mark.parametrize("format", FORMATS)
def test_a_stop_leaves_what_the_next_copy_goes_on_with(
    checkpoint: Path, archive: FolderArchive, format: str
) -> None:
    stop = threading.Event()

    def stop_late(what: str, path: str, position: int) -> None:
        if what == "write" and position >= 49_152:
            stop.set()

    with pytest.raises(CopyStopped):
        copy(
            OddArchive(archive, stop_late), checkpoint, quick(stop=stop, parallel=1), format=format
        )
    assert nothing_published(archive)
    watched, counted = OddArchive(archive), []
    copy(watched, checkpoint, quick(parallel=1, on_bytes=counted.append), format=format)
    assert sum(counted) == work_bytes(read_source(checkpoint, 100, "full"), format)  # type: ignore[arg-type]
    written = sum(1 for what, _ in watched.calls if what == "write")
    fresh = OddArchive(make_archive(archive._folder.with_name("fresh")))
    copy(fresh, checkpoint, quick(parallel=1), format=format)
    assert written < sum(1 for what, _ in fresh.calls if what == "write")


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_source_is_found_when_its_copy_goes_on(
    checkpoint: Path, archive: FolderArchive, format: str
) -> None:
    """What was sent already is not read again from the source; so it is the reading back that must
    tell.
    """
    path = checkpoint / "optimizer" / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(bytes(100) + content[100:])
    stop = threading.Event()

    def stop_late(what: str, far_path: str, position: int) -> None:
        if what == "write" and position >= 100_000:
            stop.set()

    with pytest.raises(CopyStopped):
        copy(
            OddArchive(archive, stop_late), checkpoint, quick(stop=stop, parallel=1), format=format
        )
    with pytest.raises(SourceDamaged, match=r"__0_0\.distcp: its digest differs"):
        copy(archive, checkpoint, format=format)
    assert nothing_published(archive)
    path.write_bytes(content)
    receipt = copy(archive, checkpoint, format=format)
    assert copy(archive, checkpoint, repair=True).files == receipt.files


@pytest.mark.parametrize("format", FORMATS)
def test_two_copiers_of_the_same_checkpoint(checkpoint: Path, tmp_path: Path, format: str) -> None:
    results: list[object] = []
    start = threading.Barrier(3)

    def run() -> None:
        archive = make_archive(tmp_path / "store")
        start.wait()
        try:
            results.append(
                copy(archive, checkpoint, quick(piece_bytes=1024), format=format).location
            )
        except (CopyError, Exception) as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    archive = make_archive(tmp_path / "store")
    (receipt,) = list_receipts(archive, VARIANT)
    assert receipt.location in results, results
    again = OddArchive(archive)
    copy(again, checkpoint, repair=True)
    assert not any(what == "upload" for what, _ in again.calls), "the copy is whole"
