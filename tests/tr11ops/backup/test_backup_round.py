"""One round of backup: what is due is copied, each archive by itself, and what is wrong is found,
told and repaired.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.backup.copy_cases import contents
from tests.tr11ops.backup.round_cases import DAY, NOW, Rounds, flip, receipts_below
from tr11ops.backup import reread
from tr11ops.backup.ledger import last_state
from tr11ops.backup.restorable import restorable
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.base.errors import ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from tr11ops.observe.observations import Copied, CopyStatus
from tr11ops.observe.operation_files import read_copy


def fault(what: str, error: Exception) -> dict[str, Any]:
    """An archive that fails at a call, e.g. "write"."""

    def on(call: str, path: str, position: int) -> None:
        if call == what:
            raise error

    return {"on": on}


# ----------------------------------------------------------------------------- copies
def test_a_round_copies_what_is_due_and_the_next_one_nothing(rounds: Rounds) -> None:
    rounds.save(100, 150, 200, 300)
    (log := rounds.directory.paths.main_log).parent.mkdir(parents=True)
    log.write_text("iteration 1\n")
    done = rounds.run()
    assert done.exit_code == 0 and [tally.faults for tally in done.tallies] == [[], []]
    assert rounds.copied("store") == [(100, "full"), (200, "full"), (300, "full")]
    assert rounds.copied("url") == [(100, "weights"), (200, "weights"), (300, "full")]
    for step in (100, 200, 300):
        assert contents(rounds.far(step, ".")) == contents(
            rounds.checkpoints / f"global_step{step}"
        )
    assert (
        rounds.store / "small-logs" / "logs" / "main" / "main_log.txt"
    ).read_text() == "iteration 1\n"
    assert len(rounds.journal("backup-copied")) == len(rounds.journal("backup-began")) == 6
    before = contents(rounds.store)
    again = rounds.run()
    assert again.exit_code == 0 and not any(tally.copied or tally.logs for tally in again.tallies)
    assert contents(rounds.store) == before and len(rounds.journal("backup-copied")) == 6


def test_the_status_file_is_what_the_watchdog_reads(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run()
    seen = read_copy(rounds.directory.paths.state / "backup" / "status.json")
    assert seen == CopyStatus(
        NOW, 100, "", (Copied("store", "full", 100), Copied("url", "weights", 100))
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArchiveUnavailable("no answer", 0.0), 3),
        (ArchivePermanentError("no such bucket"), 1),
        (ArchiveFull("full"), 1),
    ],
)
def test_a_faulty_archive_keeps_no_copies_from_the_other(
    rounds: Rounds, error: Exception, code: int
) -> None:
    rounds.save(100)
    rounds.odd["store"] = fault("write", error)
    done = rounds.run()
    assert done.exit_code == code
    assert rounds.copied("store") == [] and rounds.copied("url") == [(100, "weights")]
    assert str(error) in rounds.status()["message"]
    assert rounds.journal("backup-failed")[0]["step"] == 100
    rounds.odd.clear()
    rounds.now += 60
    assert rounds.run().exit_code == 0 and rounds.copied("store") == [(100, "full")]
    assert rounds.status()["message"] == "" and rounds.status()["time"] == NOW + 60


def test_a_store_that_is_not_there_is_told(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run()
    shutil.move(rounds.store, rounds.folder / "unmounted")
    rounds.now += 60
    done = rounds.run()
    assert done.exit_code != 0 and not rounds.store.exists()
    state = last_state(rounds.directory, "store")
    assert state is not None and state.fault and (state.success, state.time) == (NOW, NOW + 60)
    assert rounds.status()["copied"]["store"] == {"full": [100]}, "what is unreachable is not gone"
    shutil.move(rounds.folder / "unmounted", rounds.store)
    assert rounds.run().exit_code == 0


def test_an_incomplete_checkpoint_does_not_stop_other_copies(rounds: Rounds) -> None:
    rounds.save(100, 200, 300)
    flip(rounds.checkpoints / "global_step200" / "optimizer/b", 7)
    (rounds.checkpoints / "global_step100" / "weights/a").write_bytes(b"cut")
    done = rounds.run("store")
    assert done.exit_code == 1 and rounds.copied("store") == [(300, "full")]
    (text,) = done.tallies[0].faults
    assert text.startswith("step 200 (full)") and "optimizer/b" in text
    assert set(receipts_below(rounds.store)) == {"checkpoints/main/global_step300.copy.json"}


def test_steps_by_hand_go_where_no_one_else_sends_them(rounds: Rounds) -> None:
    rounds.save(150, 200)
    done = rounds.run("store", steps=(150, 9), logs=False, reading="none")
    assert done.exit_code == 1 and "step 9 is not copied" in done.tallies[0].faults[0]
    assert rounds.copied("store") == [(150, "full")]
    other = rounds.folder / "elsewhere"
    other.mkdir()
    done = rounds.run(str(other), steps=(200,), logs=False, reading="none")
    assert done.exit_code == 0 and (other / "checkpoints/main/global_step200/cursor.json").is_file()
    assert rounds.copied("store") == [(150, "full")], "a copy elsewhere is not the store's"


def test_a_step_trained_again_is_copied_beside_the_old_one(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("store")
    old = contents(rounds.far(100, "."))
    rounds.save(100, seed=1)
    rounds.run("store")
    assert contents(rounds.far(100, ".")) == old
    assert len(receipts_below(rounds.store)) == 2
    assert rounds.run("store").tallies[0].copied == []
    assert rounds.status()["copied"]["store"] == {"full": [100]}


def test_a_tar_for_the_store_alone(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, "backup.store_format=tar")
    rounds.save(300)
    assert rounds.run().exit_code == 0
    assert (rounds.store / "checkpoints/main/global_step300.tar").is_file()
    assert (rounds.url / "checkpoints/main/global_step300/cursor.json").is_file()
    tar = rounds.store / "checkpoints/main/global_step300.tar"
    whole = tar.read_bytes()
    places = [100, 140, 1000, 512 + 900 + 30, len(whole) - 1]  # headers, a file, padding, the end
    for place in places:
        flip(tar, place)
        assert rounds.run("store", reading="all", copies=False).exit_code == 1, place
        assert rounds.run("store").exit_code == 0 and rounds.copied("store") == [(300, "full")]
        assert tar.read_bytes() == whole


# ----------------------------------------------------------------------------- damage
def test_damage_is_found_told_and_repaired(rounds: Rounds) -> None:
    rounds.save(100, 200)
    rounds.run("store")
    flip(rounds.far(200, "optimizer/b"), 1234)
    assert rounds.run("store", copies=False).exit_code == 0, "nothing is due to be read yet"
    found = rounds.run("store", reading="all", copies=False)
    assert found.exit_code == 1
    (record,) = found.tallies[0].damaged
    assert (record.step, record.damaged) == (200, ("optimizer/b",))
    assert rounds.status()["copied"]["store"] == {"full": [100]} and rounds.status()["step"] == 100
    assert rounds.status()["damaged"] == [
        "store: step 200 (full): optimizer/b; whole in the run directory"
    ]
    assert rounds.journal("backup-damaged")[0]["files"] == {
        "optimizer/b": "other bytes than were copied"
    }
    mended = rounds.run("store")
    assert mended.exit_code == 0 and [copy.step for copy in mended.tallies[0].copied] == [200]
    assert contents(rounds.far(200, ".")) == contents(rounds.checkpoints / "global_step200")
    assert rounds.status()["damaged"] == [] and rounds.status()["step"] == 200


def test_damage_without_a_source_names_the_other_copy(rounds: Rounds) -> None:
    rounds.save(300, 400)
    rounds.run()
    shutil.rmtree(rounds.checkpoints / "global_step300")
    flip(rounds.far(300, "weights/a"), 1)
    assert rounds.run("store", reading="all", copies=False).exit_code == 1
    assert rounds.status()["damaged"] == ["store: step 300 (full): weights/a; whole in the url"]
    flip(rounds.far(300, "weights/a", "url"), 1)
    rounds.run(reading="all", copies=False)
    assert all(line.endswith("NO OTHER COPY IS KNOWN") for line in rounds.status()["damaged"])
    again = rounds.run()
    assert again.exit_code == 1, "nothing can repair it, and it is told in each round"
    flip(rounds.far(300, "weights/a"), 1)
    assert rounds.run("store").exit_code == 0, (
        "repaired by hand: what is damaged is read in each round"
    )
    assert rounds.status()["damaged"] == ["url: step 300 (full): weights/a; whole in the store"]


def test_a_damaged_copy_is_repaired_from_the_other_archive(rounds: Rounds) -> None:
    """As the page for the alert says: back into the run directory, and from there to the damaged
    place.
    """
    rounds.save(300)
    rounds.run()
    whole = contents(rounds.far(300, "."))
    shutil.rmtree(rounds.checkpoints / "global_step300")
    rounds.far(300, "weights/a").write_bytes(b"rot")
    assert rounds.run("store", copies=False).exit_code == 1
    archive = rounds.open("url", rounds.card)
    receipt = restorable(archive, "main", 300).receipt
    restore_checkpoint(
        archive, receipt, rounds.checkpoints, rounds.place().transfer(rounds.progress)
    )
    done = rounds.run("store", steps=(300,), logs=False, reading="none")
    assert done.exit_code == 0 and contents(rounds.far(300, ".")) == whole
    assert len(receipts_below(rounds.store)) == 1 and rounds.status()["damaged"] == []


@pytest.mark.parametrize(
    "harm", ["missing", "cut", "receipt gone", "receipt garbled", "receipt of another", "all gone"]
)
def test_the_next_round_finds_and_repairs_what_a_list_shows(rounds: Rounds, harm: str) -> None:
    rounds.save(100)
    rounds.run("store")
    receipt = rounds.store / "checkpoints/main/global_step100.copy.json"
    match harm:
        case "missing":
            rounds.far(100, "weights/a").unlink()
        case "cut":
            rounds.far(100, "weights/a").write_bytes(b"x")
        case "receipt gone":
            receipt.unlink()
        case "receipt garbled":
            receipt.write_text(receipt.read_text()[:-20])
        case "receipt of another":
            receipt.write_text(receipt.read_text().replace("/global_step100", "/../global_step100"))
        case "all gone":
            receipt.unlink()
            shutil.rmtree(rounds.far(100, "."))
    seen = rounds.run("store", copies=False, reading="none")
    assert seen.exit_code == 1 and rounds.copied("store") == []
    assert rounds.run("store").exit_code == 0 and rounds.copied("store") == [(100, "full")]
    assert contents(rounds.far(100, ".")) == contents(rounds.checkpoints / "global_step100")
    assert json.loads(receipt.read_text())["step"] == 100


def test_a_destination_that_does_not_answer_is_no_damage(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("store")
    rounds.odd["store"] = fault("read", ArchiveUnavailable("a time-out"))
    done = rounds.run("store", reading="all", copies=False)
    assert done.exit_code == 3 and rounds.copied("store") == [(100, "full")]


def test_what_only_came_back_wrong_once_is_no_damage(rounds: Rounds) -> None:
    rounds.save(100)
    rounds.run("store")
    spoiled: list[str] = []

    def spoil(path: str, content: bytes) -> bytes:
        if path.endswith("optimizer/b") and not spoiled:
            spoiled.append(path)
            return bytes(len(content))
        return content

    rounds.odd["store"] = {"spoil": spoil}
    assert rounds.run("store", reading="all", copies=False).exit_code == 0 and spoiled


def test_one_flipped_bit_is_found_within_the_rotation(memory: Path) -> None:
    """Rounds at odd hours over a fake month, some missed; the bit flips at a random file after a
    random day.
    """
    for seed in range(3):
        chance = random.Random(seed)
        rounds = Rounds(memory / str(seed), "backup.reread_days=12", "backup.logs=false")
        rounds.save(100, 200, 300, 400, sizes={f"weights/{n:02d}": 40 + n for n in range(24)})
        rounds.run("store")
        flipped_after, flipped, found = chance.uniform(0, 9) * DAY, None, None
        while found is None:
            rounds.now += chance.uniform(0.7, 1.9) * DAY
            if flipped is None and rounds.now > NOW + flipped_after:
                flip(
                    rounds.far(100 * chance.randint(1, 4), f"weights/{chance.randrange(24):02d}"),
                    chance.randrange(40),
                )
                flipped = rounds.now
            done = rounds.run("store", copies=False)
            if done.exit_code:
                found = rounds.now
            assert flipped is None or rounds.now - flipped <= 14 * DAY, (
                "12 days, and the round after them"
            )
        assert flipped is not None and rounds.status()["damaged"]


def test_each_byte_is_read_in_time_and_no_round_reads_it_all(memory: Path) -> None:
    rounds = Rounds(memory, "backup.reread_days=10")
    rounds.save(*range(100, 700, 100))
    rounds.run("store")
    read = []
    for _ in range(14):
        rounds.now += DAY
        done = rounds.run("store")
        read.append(done.tallies[0].reread_files)
        state = last_state(rounds.directory, "store")
        assert (
            state is not None and state.unread is not None and rounds.now - state.unread <= 10 * DAY
        )
    assert sum(read) >= 24 and max(read) <= 8


def test_what_was_read_is_kept_on_the_way(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of terabytes must not lose what was found, nor read all of it again."""
    rounds = Rounds(memory, "backup.parallel=1")
    monkeypatch.setattr(reread, "KEEP_SECONDS", 0.0)
    rounds.save(100, 200)
    rounds.run("store")
    flip(rounds.far(100, "cursor.json"), 3)
    rounds.now += DAY
    kept = (
        rounds.directory.paths.state
        / "backup"
        / "reread"
        / "store"
        / "checkpoints-main-global_step200.json"
    )

    def on(call: str, path: str, position: int) -> None:
        if call == "look" and "global_step200/weights/a" in path:
            rounds.stop.set()

    rounds.odd["store"] = {"on": on}
    assert rounds.run("store", reading="all", copies=False).tallies[0].is_stopped
    (record,) = [copy for copy in rounds.copies() if copy.step == 100]
    assert record.damaged == ("cursor.json",) and len(rounds.journal("backup-damaged")) == 1
    rounds.stop.clear()
    rounds.odd.clear()
    assert rounds.run("store", reading="all", steps=(200,), copies=False).exit_code == 1
    assert not json.loads(kept.read_text())["read"], (
        "all of it was read: the record itself says when"
    )
    assert next(copy for copy in rounds.copies() if copy.step == 200).reread == rounds.now
    assert next(copy for copy in rounds.copies() if copy.step == 100).damaged == ("cursor.json",)


def test_a_clock_that_jumps_stops_neither_copies_nor_re_reading(memory: Path) -> None:
    rounds = Rounds(memory, "backup.reread_days=10", "backup.logs=false")
    rounds.now = NOW + 400 * DAY
    rounds.save(100, 200)
    assert rounds.run("store").exit_code == 0
    rounds.now = NOW
    rounds.save(300)
    assert rounds.run("store").exit_code == 0 and len(rounds.copied("store")) == 3
    for _ in range(10):
        rounds.now += DAY
        assert rounds.run("store").exit_code == 0
    state = last_state(rounds.directory, "store")
    assert state is not None and state.unread is not None and rounds.now - state.unread <= 10 * DAY
    rounds.now += 5000 * DAY
    late = rounds.run("store")
    assert late.exit_code == 0 and late.tallies[0].reread_files == 3 * 4
    rounds.now -= 9000 * DAY
    assert rounds.run("store").exit_code == 0
