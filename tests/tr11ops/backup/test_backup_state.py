"""Backup rounds after state was lost, restore drills, stops, and a real bucket."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.copy_cases import contents
from tests.tr11ops.backup.round_cases import Rounds, flip, receipts_below
from tr11ops.backup import archive_round
from tr11ops.backup.archive_round import plan_of, rows_of
from tr11ops.backup.drill import LoadResult, choose_copy, run_drill
from tr11ops.backup.ledger import read_archive_state
from tr11ops.backup.round_values import (
    ArchiveTally,
    RoundRequest,
    card_archives,
)
from tr11ops.backup.service import rebuild
from tr11ops.observe.observations import CopyStatus
from tr11ops.observe.operation_files import read_copy as read_status
from tr11ops.rundir.checkpoint_digests import note_numbers
from tr11ops.rundir.claims import ClaimTaken, CopyLock
from tr11ops.rundir.copies import read_copies, read_drill


# ----------------------------------------------------------------------------- drills
def test_a_copy_with_nan_is_told_until_a_later_sound_one_is_there(rounds: Rounds) -> None:
    rounds.save(100, 300, 400)
    rounds.run()
    copy = choose_copy(rounds.copies())
    assert copy is not None and copy.step == 400 and rounds.status()["not_finite"] == []
    bad = LoadResult(False, "NaN or infinity in a (weights)", ("weights/a",))
    run_drill(rounds.place(), rounds.open("store", rounds.card), copy, look=lambda folder: bad)
    (line,) = {line for line in rounds.status()["not_finite"] if line.startswith("store")}
    assert line == (
        "store: step 400 (full): NaN or infinity in weights/a; the newest sound copy there is of step 300"
    )
    seen = read_status(rounds.directory.paths.state / "backup" / "status.json")
    assert isinstance(seen, CopyStatus) and line in seen.not_finite and seen.damaged == ()
    rounds.save(600)
    rounds.run()
    assert not any(line.startswith("store") for line in rounds.status()["not_finite"])


def test_a_checkpoint_known_to_hold_nan_is_no_copy_to_restore_from(rounds: Rounds) -> None:
    """It was copied as any other, and stood as the newest. A person may copy it all the same."""
    rounds.save(100, 300, 400)
    (row,) = (row for row in rows_of(rounds.directory) if row.step == 400)
    names = ("weights/a",)
    note_numbers(rounds.directory, 400, row.identity, not_finite=names, why="looked at")
    rows = rows_of(rounds.directory)
    made = plan_of(rounds.card, rows, (), RoundRequest(card_archives(rounds.card)))
    assert dict(made.left)[400] == (
        "NaN or infinity in weights/a: not copied; `tr11 backup run 400` copies it all the same"
    )
    rounds.run()
    assert not [copy for copy in rounds.copies() if (copy.step, copy.kind) == (400, "full")]
    rounds.run("store", steps=(400,))
    (copy,) = [copy for copy in rounds.copies() if (copy.step, copy.kind) == (400, "full")]
    assert copy.not_finite == names


def test_a_drill_restores_the_newest_copy_and_leaves_nothing(rounds: Rounds) -> None:
    rounds.save(100, 300, 400)
    rounds.run()
    copy = choose_copy(rounds.copies())
    assert copy is not None and (copy.step, copy.kind, copy.archive) == (400, "full", "store")
    assert choose_copy(rounds.copies(), "url").step == 300  # type: ignore[union-attr]
    seen: list[dict[str, bytes]] = []

    def look(folder: Path) -> LoadResult:
        seen.append(contents(folder))
        return LoadResult(True, "looked at")

    archive = rounds.open("store", rounds.card)
    done = run_drill(rounds.place(), archive, copy, look=look)
    assert (
        done.passed
        and done.message == "restored, looked at"
        and seen == [contents(rounds.checkpoints / "global_step400")]
    )
    assert (
        not (rounds.directory.root / "backup-drill").exists()
        and read_drill(rounds.directory) == done
    )
    assert rounds.journal("backup-drill") == [
        {"archive": "store", "step": 400, "bytes": copy.bytes, "passed": True}
    ]
    odd = run_drill(
        rounds.place(), archive, copy, look=lambda folder: LoadResult(False, "no tensor in it")
    )
    assert (
        not odd.passed
        and odd.message == "restored, but: no tensor in it"
        and read_drill(rounds.directory) == odd
    )
    flip(rounds.far(400, "weights/a"), 2)
    failed = run_drill(rounds.place(), archive, copy, look=look)
    assert not failed.passed and "weights/a is damaged" in failed.message and len(seen) == 1
    with CopyLock(rounds.directory, "drill", rounds.stop), pytest.raises(ClaimTaken):
        run_drill(rounds.place(), archive, copy, look=look)


# ----------------------------------------------------------------------------- state that was lost
def test_the_records_are_made_again_from_the_receipts(rounds: Rounds) -> None:
    rounds.save(100, 200, 300)
    rounds.run()
    before, status = rounds.copies(), rounds.status()
    (
        rounds.directory.paths.state
        / "backup"
        / "copies"
        / "store"
        / "checkpoints-main-global_step100.json"
    ).write_text("{")
    with pytest.raises(ValueError, match="global_step100"):
        read_copies(rounds.directory)
    rounds.directory.drill.write_text("{")
    assert rounds.run().exit_code == 1, "nothing follows from records that cannot be read"
    assert rebuild(rounds.place(), card_archives(rounds.card)).exit_code == 0
    assert rounds.copies() == before and read_drill(rounds.directory) is None
    shutil.rmtree(rounds.directory.paths.state / "backup")
    assert rebuild(rounds.place(), card_archives(rounds.card)).exit_code == 0
    assert rounds.copies() == before and rounds.status() == status
    assert not any(tally.copied for tally in rounds.run().tallies)


def test_a_record_that_finds_no_room_is_made_by_the_next_round(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds.save(100, 200)

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "state/backup")

    with monkeypatch.context() as patched:
        patched.setattr(archive_round, "write_copy", full)
        done = rounds.run("store")
    assert done.exit_code == 1 and done.tallies[0].faults == [
        "state/backup: No space left on device"
    ]
    assert rounds.copies() == () and len(receipts_below(rounds.store)) == 1
    done = rounds.run("store")
    assert done.exit_code == 0 and len(done.tallies[0].copied) == 1, (
        "the other one is there, and now on record"
    )
    assert len(rounds.copied("store")) == 2


@pytest.mark.parametrize(
    "name",
    [
        "archives/store.json",
        "reread/store/checkpoints-main-global_step100.json",
        "logs/store.json",
        "status.json",
    ],
)
def test_garbage_in_what_is_only_remembered_stops_nothing(rounds: Rounds, name: str) -> None:
    rounds.save(100)
    (log := rounds.directory.paths.main_log).parent.mkdir(parents=True)
    log.write_text("iteration 1\n")
    rounds.run("store")
    path = rounds.directory.paths.state / "backup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"read": [1], "files": 3, "schema"')
    assert rounds.run("store", reading="all").exit_code == 0
    assert rounds.copied("store") == [(100, "full")]


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("step", "x"),
        ("archive", 3),
        ("bytes", None),
        ("files", [1]),
        ("schema", {}),
        ("damaged", "a"),
    ],
)
def test_a_record_whose_values_are_of_the_wrong_kind_is_none(
    rounds: Rounds, name: str, lie: object
) -> None:
    rounds.save(100)
    rounds.run("store")
    (path,) = (rounds.directory.paths.state / "backup" / "copies" / "store").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), name: lie}))
    with pytest.raises(ValueError, match="is not a record of a copy"):
        read_copies(rounds.directory)


def test_a_full_run_directory_is_not_taken_for_a_full_archive() -> None:
    tally = ArchiveTally("store")
    tally.note_fault(OSError(errno.ENOSPC, "No space left on device"))
    assert tally.faults == ["the run directory: No space left on device"]


def test_garbage_in_the_last_rounds_state_names_its_file(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("store")
    path = rounds.directory.paths.state / "backup" / "archives" / "store.json"
    for text in ("", "[" * 99_999, json.dumps({**json.loads(path.read_text()), "unread": "x"})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"store\.json"):
            read_archive_state(rounds.directory, "store")


def test_another_archive_behind_the_same_key_has_no_copies_yet(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("store")
    moved = Rounds(rounds.folder, f"backup.store={rounds.folder / 'new'}")
    (rounds.folder / "new").mkdir()
    assert [copy.step for copy in moved.run("store").tallies[0].copied] == [100]


def test_copies_of_another_run_in_the_same_bucket_are_not_ours(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("url")
    for path in rounds.url.rglob("*.copy.json"):
        path.write_text(path.read_text().replace('"run": "small"', '"run": "other"'))
    shutil.rmtree(rounds.directory.paths.state / "backup")
    assert rebuild(rounds.place(), ("url",)).exit_code == 0 and rounds.copies() == ()


# ----------------------------------------------------------------------------- stopping
def test_a_round_that_is_told_to_stop_goes_on_in_the_next(rounds: Rounds) -> None:
    rounds.save(100, 200, 300)

    def on(call: str, path: str, position: int) -> None:
        if call == "write" and "global_step200" in path:
            rounds.stop.set()

    rounds.odd["store"] = {"on": on}
    done = rounds.run()
    assert done.exit_code == 1 and done.tallies[0].is_stopped and len(done.tallies) == 1
    assert rounds.copied("store") == [(100, "full"), (300, "full")], (
        "the newest first, then the oldest"
    )
    assert "goes on from there" in rounds.status()["message"]
    assert set(receipts_below(rounds.store)) == {
        f"checkpoints/main/global_step{step}.copy.json" for step in (100, 300)
    }
    rounds.stop.clear()
    rounds.odd.clear()
    assert rounds.run().exit_code == 0 and len(rounds.copied("store")) == 3


# ----------------------------------------------------------------------------- a real bucket
def test_a_round_to_a_real_object_store(tmp_path: Path, object_store: ObjectStore) -> None:
    """Copies, their receipts, damage, a missing object, the repairing, and records that are made
    again.
    """
    options = ", ".join(
        f"{name} = {json.dumps(value)}" for name, value in object_store.options.items()
    )
    rounds = Rounds(tmp_path, f"backup.url={object_store.url}", f"backup.options={{{options}}}")
    rounds.save(100, 300)
    assert rounds.run("url").exit_code == 0
    assert rounds.copied("url") == [(100, "weights"), (300, "full")]
    prefix = "tr11-test/checkpoints/main/global_step300"
    held = object_store.content(f"{prefix}/optimizer/b")
    object_store.replace(f"{prefix}/optimizer/b", bytes([held[0] ^ 1]) + held[1:])
    object_store.remove(f"{prefix}/cursor.json")
    found = rounds.run("url", copies=False, reading="all")
    assert found.exit_code == 1 and found.tallies[0].damaged[0].damaged == (
        "cursor.json",
        "optimizer/b",
    )
    assert rounds.run("url").exit_code == 0
    assert object_store.content(f"{prefix}/optimizer/b") == held
    before = rounds.copies()
    shutil.rmtree(rounds.directory.paths.state / "backup")
    assert rebuild(rounds.place(), ("url",)).exit_code == 0
    assert [(copy.step, copy.location) for copy in rounds.copies()] == [
        (copy.step, copy.location) for copy in before
    ]
