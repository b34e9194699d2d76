"""Reading every byte: what is fine, bad, gone, changed, or cannot be said."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.tr11ops.checkpoints.shelf import FILES, Shelf
from tr11ops.checkpoints.verify import VerifyResult, verify
from tr11ops.rundir.checkpoint_digests import digest_of
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from trainer.contract.manifest import Manifest


def row(shelf: Shelf, step: int) -> SavedCheckpoint:
    found = shelf.catalogue().at(step)
    assert found is not None
    return found


def read(shelf: Shelf, step: int, parallel: int = 4) -> VerifyResult:
    return verify(row(shelf, step), parallel, lambda count: None, threading.Event(), "ana")


def test_fine_and_as_sha256sum_says(shelf: Shelf) -> None:
    shelf.save(100, size=300_000)
    counts: list[int] = []
    reading = verify(row(shelf, 100), 3, counts.append, threading.Event(), "ana")
    assert reading.result == "fine" and reading.record is not None and sum(counts) == 1_200_000
    assert (reading.record.files, reading.record.bytes, reading.record.who) == (4, 1_200_000, "ana")
    place = shelf.folder / "global_step100"
    told = subprocess.run(
        ["sha256sum", *FILES], cwd=place, capture_output=True, text=True, check=True
    ).stdout
    manifest = Manifest.read(place)
    assert manifest is not None
    # what was found to agree with the manifest is what another program finds
    assert {entry.path: entry.digest for entry in manifest.files} == {
        path: digest for digest, path in (line.split() for line in told.splitlines())
    }


def test_one_flipped_bit_in_each_file_is_found(shelf: Shelf) -> None:
    shelf.save(100, 200, size=5000)
    for name in FILES:
        path = shelf.folder / "global_step100" / name
        content = bytearray(path.read_bytes())
        content[2500] ^= 4
        path.write_bytes(content)
    reading = read(shelf, 100)
    assert reading.result == "bad" and reading.bad == tuple(
        f"{name}: its digest differs from the manifest's" for name in sorted(FILES)
    )
    assert read(shelf, 200).result == "fine"


def test_missing_short_and_odd_files_are_damage(shelf: Shelf) -> None:
    shelf.save(100)
    place = shelf.folder / "global_step100"
    (place / FILES[0]).unlink()
    (place / FILES[1]).write_bytes(b"x")
    (place / FILES[2]).unlink()
    (place / FILES[2]).mkdir()
    (place / FILES[3]).unlink()
    os.mkfifo(place / FILES[3])
    assert read(shelf, 100).bad == (
        "cursor.json: 0 bytes, the manifest says 64",
        "optimizer/a.bin: Is a directory",
        "weights/a.bin: it is missing",
        "weights/b.bin: 1 bytes, the manifest says 64",
    )


def test_where_there_is_nothing_to_compare_with(shelf: Shelf) -> None:
    shelf.half(100)
    shelf.save(200, 300)
    (shelf.folder / "global_step200" / "manifest.json").unlink()
    (shelf.folder / "global_step200" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (shelf.folder / "global_step300" / "manifest.json").write_text("{")
    found = [read(shelf, step) for step in (100, 200, 300)]
    assert [reading.result for reading in found] == ["nothing to compare"] * 3 and not any(
        one.record for one in found
    )
    assert (
        "no manifest" in found[0].why
        and "another trainer" in found[1].why
        and "cannot be read" in found[2].why
    )


@pytest.mark.parametrize("what", ["removed", "renamed", "saved again", "written to"])
def test_what_changes_while_it_is_read_is_not_called_damaged(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shelf.save(100, 200)
    place = shelf.folder / "global_step100"
    entry, real, done = row(shelf, 100), digest_of, []

    def digest(path: Path, *rest: object) -> tuple[int, str, bool]:
        if not done:
            done.append(path)
            if what == "removed":
                shutil.rmtree(place)
            elif what == "renamed":
                place.rename(place.with_name("global_step100.discarded"))
            elif what == "saved again":
                shutil.rmtree(place)
                shelf.save(100)
        found = real(path, *rest)  # type: ignore[arg-type]
        return (found[0], "0", False) if what == "written to" else found

    monkeypatch.setattr("tr11ops.checkpoints.verify.digest_of", digest)
    reading = verify(entry, 1, lambda count: None, threading.Event())
    expected = {
        "removed": "gone",
        "renamed": "gone",
        "saved again": "changed",
        "written to": "unread",
    }[what]
    assert (reading.result, reading.record) == (expected, None) and reading.why


def test_what_may_not_be_read_is_not_called_damaged(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100)

    def refused(path: Path, *rest: object) -> tuple[int, str, bool]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tr11ops.checkpoints.verify.digest_of", refused)
    reading = read(shelf, 100)
    assert (
        reading.result == "unread"
        and reading.record is None
        and reading.why.endswith(": Permission denied")
    )


def test_stopping_is_quick_and_records_nothing(shelf: Shelf) -> None:
    shelf.save(100, size=100_000)
    stop = threading.Event()
    reading = verify(row(shelf, 100), 2, lambda count: stop.set(), stop)
    assert (reading.result, reading.record) == ("stopped", None)
