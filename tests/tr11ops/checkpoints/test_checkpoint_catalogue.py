"""Everything side by side: files, digests, copies, pins, use; and what is odd in any of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.tr11ops.checkpoints.shelf import DAY, NOW, Shelf
from tr11ops.base.observed import Unknown
from tr11ops.checkpoints.quarantine import home_of
from tr11ops.rundir import checkpoint_scan
from tr11ops.rundir.checkpoint_digests import DigestRecord, read_digest, write_digest
from tr11ops.rundir.checkpoint_pins import pin, state_folder
from tr11ops.rundir.checkpoint_scan import FAULTS_KEPT, is_waiting, list_rows
from tr11ops.rundir.copies import identity_of
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.resumable import ResumeNeed


def test_what_is_known_of_each(shelf: Shelf) -> None:
    shelf.save(9_900, 10_000, 800)
    (shelf.folder / "latest").write_text("global_step10000")
    copy = shelf.copy(10_000)
    shelf.copy(9_900, identity="ff")  # of another checkpoint of that step
    pin(shelf.directory, 800, "ana", "why not", NOW)
    seen = shelf.catalogue()
    assert [entry.step for entry in seen.checkpoints] == [800, 9_900, 10_000]
    first, second, third = seen.checkpoints
    assert first.pin is not None and first.pin.who == "ana" and not first.used_by
    assert second.copies == () and third.copies == (copy,) and len(seen.copies) == 2
    assert second.used_by == ("a restart takes it if the other fails",) and third.used_by == (
        "latest names it",
    )
    assert third.identity == identity_of(shelf.folder / "global_step10000") and (
        third.files,
        third.bytes,
    ) == (4, 256)
    assert (seen.fault, seen.read_errors, seen.at(9_900)) == (None, (), second)
    json.dumps([entry.document() for entry in seen.checkpoints])


def test_a_reading_counts_for_the_same_checkpoint_alone(shelf: Shelf) -> None:
    shelf.save(100, 200)
    identity = identity_of(shelf.folder / "global_step100")
    record = DigestRecord(
        100,
        identity,
        NOW,
        4,
        256,
        ("weights/a.bin: its digest differs from the manifest's",),
        "ana",
    )
    write_digest(shelf.directory, record)
    write_digest(shelf.directory, DigestRecord(200, identity, NOW, 4, 256))
    first, second = shelf.catalogue().checkpoints
    assert (
        first.digests == record
        and not first.is_sound
        and second.digests is None
        and second.is_sound
    )
    shelf.save(100)
    assert shelf.catalogue().checkpoints[0].digests is None
    path = state_folder(shelf.directory) / "digests" / "global_step100.json"
    for text in ("{", "[]", '{"step": 1}', '{"time": "x"}'):
        path.write_text(text)
        entry = shelf.catalogue().checkpoints[0]
        assert isinstance(entry.digests, Unknown) and not entry.is_sound
        with pytest.raises(ValueError):
            read_digest(shelf.directory, 100, identity)
        json.dumps(entry.document())


def test_faults_are_those_that_the_trainer_sees(shelf: Shelf) -> None:
    shelf.save(100, 200)
    place = shelf.folder / "global_step100"
    (place / "weights" / "a.bin").write_bytes(b"short")
    (place / "cursor.json").unlink()
    (place / "optimizer").rename(place / "elsewhere")
    (place / "optimizer").symlink_to("elsewhere")  # behind a link, but there
    manifest = Manifest.read(place)
    assert manifest is not None
    (row, whole) = list_rows(shelf.folder, None)
    assert (
        list(row.faults) == manifest_faults(place, manifest, read_digests=False)
        and len(row.faults) == 2
    )
    assert whole.faults == () and row.complete is False and whole.complete is True


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "null", '{"schema": "x"}', '{"schema": 99}', '{"files": 3}', '{"files": [3]}', "\x00", "[" * 9999,
        '{"schema": 1, "digest_algorithm": "md5"}',
        '{"schema": 1, "digest_algorithm": "sha256", "files": [{"path": 3, "bytes": "x", "digest": ""}], "step": 100,'
        ' "consumed_samples": 1, "consumed_tokens": 1, "topology": {}, "model": {}, "run_card_hash": "", "created": 1.0}',
        '{"schema": 1, "digest_algorithm": "sha256", "files": [], "step": 100, "consumed_samples": 1,'
        ' "consumed_tokens": 1, "topology": 3, "model": {}, "run_card_hash": "", "created": "now"}',
        '{"schema": 1, "digest_algorithm": "sha256", "files": [], "step": 100, "consumed_samples": 1,'
        ' "consumed_tokens": "x", "topology": {}, "model": {}, "run_card_hash": "", "created": 1.0}',
    ],
)  # fmt: skip
def test_a_manifest_may_hold_anything(shelf: Shelf, text: str) -> None:
    shelf.save(100)
    (shelf.folder / "global_step100" / "manifest.json").write_text(text)
    (row,) = list_rows(shelf.folder, 100)
    assert (
        row.manifest == "unreadable"
        and len(row.faults) == 1
        and "\n" not in row.faults[0]
        and row.bytes > 0
    )


def test_odd_names_and_things(shelf: Shelf) -> None:
    shelf.save(100)
    for name in (
        "global_step0100",
        "global_step",
        "global_step-5",
        "global_step٣",
        "global_step7x",
        "notes",
    ):
        (shelf.folder / name).mkdir()
    (shelf.folder / "global_step50").write_text("a file")
    os.mkfifo(shelf.folder / "global_step60")
    (shelf.folder / "global_step70").symlink_to("nowhere")
    place = shelf.folder / "global_step80"
    place.mkdir()
    os.mkfifo(place / "manifest.json")
    seen = shelf.catalogue()
    assert [entry.step for entry in seen.checkpoints] == [80, 100] and not seen.quarantined
    assert seen.checkpoints[0].manifest == "unreadable"


def test_a_checkpoint_of_very_many_faults_is_told_in_short(shelf: Shelf) -> None:
    shelf.save(100)
    place = shelf.folder / "global_step100"
    value = json.loads((place / "manifest.json").read_text())
    value["files"] += [
        {"path": f"weights/{number}", "bytes": 1, "digest": ""} for number in range(1000)
    ]
    (place / "manifest.json").write_text(json.dumps(value))
    (row,) = list_rows(shelf.folder, None)
    assert (
        len(row.faults) == FAULTS_KEPT
        and row.faults[-1] == f"and {1000 - FAULTS_KEPT + 1} more files"
    )


def test_folders_beside_them(shelf: Shelf) -> None:
    shelf.save(100, 200)
    shelf.discard(200)
    (shelf.folder / "latest").write_text("global_step100")
    for name in (".global_step300.partial-ab", ".global_step100.replaced-cd", "global_step200.discarded-2",
                 ".global_step9.pruning-0123456789ab", ".global_step9.discarded.pruned-0123456789ab",
                 ".latest.x", "global_step1.discarded.old"):  # fmt: skip
        (shelf.folder / name).mkdir()
    found = shelf.catalogue().quarantined
    assert [(quarantined.step, quarantined.kind) for quarantined in found] == [
        (9, "being removed"), (9, "hidden by a prune"), (100, "replaced"), (200, "discarded"), (200, "discarded"),
        (300, "half-written"),
    ]  # fmt: skip
    assert found[3].files == 5 and found[3].bytes > 256
    assert home_of(".global_step9.pruning-0123456789ab") == "global_step9"
    with pytest.raises(ValueError, match="not the name"):
        home_of("global_step9")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("backup/copies/store/x.json", "copies on record"),
        ("recovery.json", "who uses what"),
        ("../checkpoints/main/latest", "latest"),
    ],
)
def test_what_cannot_be_read_is_a_doubt(shelf: Shelf, path: str, what: str) -> None:
    shelf.save(100, 200)
    place = shelf.directory.paths.state / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("{")
    seen = shelf.catalogue()
    assert (
        len(seen.read_errors) == 1
        and seen.read_errors[0].startswith(f"{what}: ")
        and len(seen.checkpoints) == 2
    )


def test_the_age_of_an_unfinished_save_is_that_of_its_last_file(shelf: Shelf) -> None:
    place = shelf.half(100, age=5 * DAY)
    (row,) = list_rows(shelf.folder, None)
    assert (
        row.changed == NOW - 5 * DAY
        and row.manifest == "none"
        and row.faults[0].endswith("its save did not end")
    )
    os.utime(place / "weights" / "a.bin", (NOW, NOW))
    assert list_rows(shelf.folder, None)[0].changed == NOW


def test_threads_read_where_reading_waits_and_find_the_same(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(*range(100, 2100, 100), size=1)
    found = []
    for answer in (True, False):
        monkeypatch.setattr(
            checkpoint_scan, "is_waiting", lambda took, worked, answer=answer: answer
        )
        found.append(list_rows(shelf.folder, 300))
    assert found[0] == found[1] and [row.step for row in found[0]] == list(range(100, 2100, 100))
    assert (
        is_waiting(1.0, 0.1)
        and not is_waiting(1.0, 0.9)
        and not is_waiting(0.0, 0.0)
        and not is_waiting(0.1, 0.2)
    )


def test_one_that_goes_while_it_is_looked_at_is_left_out(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(100, 200)
    real = checkpoint_scan.walk

    def walk(place: Path) -> checkpoint_scan.Tree:
        if place.name == "global_step100":
            place.rename(place.with_name("global_step100.discarded"))
        return real(place)

    monkeypatch.setattr(checkpoint_scan, "walk", walk)
    assert [row.step for row in list_rows(shelf.folder, None)] == [200]


def test_weights_alone_are_nothing_that_a_restart_takes(shelf: Shelf) -> None:
    shelf.save(100, 200, 300)
    shelf.without_optimizer(300)
    found = shelf.catalogue()
    assert [entry.is_sound for entry in found.checkpoints] == [True, True, False]
    assert found.checkpoints[2].complete is True and found.checkpoints[2].state == "no resume"
    assert (
        found.fault is not None
        and "from which no restart goes on: it holds weights alone" in found.fault
    )
    assert found.checkpoints[1].used_by == ("a restart takes it",)


def test_damage_found_by_reading_is_a_fault_at_latest(shelf: Shelf) -> None:
    shelf.save(100, 200)
    identity = shelf.catalogue().checkpoints[1].identity
    write_digest(
        shelf.directory,
        DigestRecord(200, identity, NOW, 4, 256, ("weights/a.bin: its digest differs",)),
    )
    found = shelf.catalogue()
    assert found.fault is not None and "it is damaged: weights/a.bin" in found.fault
    assert found.checkpoints[0].used_by == ("a restart takes it",)


def test_another_models_checkpoint_is_not_the_runs(shelf: Shelf) -> None:
    shelf.save(100, 200)
    shelf.write_manifest(200, model={"model.layers": 70})
    found = shelf.catalogue(need=ResumeNeed({"model.layers": 4}))
    assert [entry.is_sound for entry in found.checkpoints] == [True, False]
    assert (
        "model.layers is 70 in the checkpoint and 4 in the run card"
        in found.checkpoints[1].no_resume
    )
