"""Everything side by side: files, digests, copies, pins; who needs a checkpoint now; and what is odd or cannot be told."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.checkpoints.shelf import DAY, NOW, Shelf
from tr11ops.base.observed import Unknown
from tr11ops.checkpoints.catalogue import LEASE_SECONDS, Uses, read_uses, restart_uses
from tr11ops.checkpoints.quarantine import home_of
from tr11ops.cluster.local_records import mark
from tr11ops.rundir import checkpoint_scan
from tr11ops.rundir.checkpoint_digests import DigestRecord, read_digest, write_digest
from tr11ops.rundir.checkpoint_pins import pin, state_folder
from tr11ops.rundir.checkpoint_scan import FAULTS_KEPT, is_waiting, list_rows
from tr11ops.rundir.claims import Claim, ClaimFolder, Clocks, read_clocks
from tr11ops.rundir.copies import identity_of
from trainer.contract.attempt import PhaseWriter
from trainer.contract.checkpoints import find_resumable
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.recovery import RecoveryEvent, RecoveryRecord, write_recovery
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


HOUR = 3600.0


def uses(shelf: Shelf, clocks: Clocks | None = None, load: str | None = None) -> Uses:
    return read_uses(shelf.directory, clocks or Clocks(time.time(), time.time()), load)


# ----------------------------------------------------------------------------- a restart
@pytest.mark.parametrize("latest", [None, 100, 200, 300, 400, 250, 900])
@pytest.mark.parametrize("broken", [(), (200,), (300,), (100, 400)])
def test_a_restart_takes_what_the_trainer_itself_would_take(
    shelf: Shelf, latest: int | None, broken: tuple[int, ...]
) -> None:
    steps = (100, 200, 300, 400)
    shelf.save(*steps)
    for step in broken:
        (shelf.folder / f"global_step{step}" / "cursor.json").unlink()
    (shelf.folder / "latest").unlink()
    if latest is not None:
        (shelf.folder / "latest").write_text(f"global_step{latest}")
    found = restart_uses([step for step in steps if step not in broken], latest)
    first = find_resumable(shelf.folder, "sizes", True, lambda line: None)
    assert first in found
    (shelf.folder / f"global_step{first}" / "cursor.json").unlink()  # it fails the digests, say
    assert find_resumable(shelf.folder, "sizes", True, lambda line: None) in found
    assert latest is None or latest in found


# ----------------------------------------------------------------------------- a living attempt
def attempt(shelf: Shelf, *phases: tuple[str, int], held: bool = True, age: float = 0.0) -> None:
    """An attempt that holds the lease and went through these phases."""
    folder = LeaseFolder(shelf.directory.paths)
    epoch = folder.newest()[0] + 1
    assert folder.claim(epoch, LeaseClaim("1007", 2, "n01", 1, "ana", 1.0, "token"))
    folder.renew(epoch, 3, held)
    moment = time.time() - age
    os.utime(folder.path / f"{epoch}.json", (moment, moment))
    for launch, (phase, iteration) in enumerate(phases):
        PhaseWriter(shelf.directory.paths.phases("1007"), 1 + launch // 3, print).enter(
            phase, iteration, 1.0
        )


def test_what_an_attempt_resumed_from_is_in_use(shelf: Shelf) -> None:
    attempt(
        shelf,
        ("starting", 0),
        ("loading", 0),
        ("training", 300),
        ("saving", 400),
        ("training", 400),
    )
    found = uses(shelf)
    assert found.by_step == {300: ("attempt 1007 resumed from it",)} and not found.loading
    attempt(shelf, ("loading", 400), ("data-wait", 200), ("training", 200))  # a roll-back
    assert uses(shelf).by_step == {200: ("attempt 1007 resumed from it",)}


def test_an_attempt_that_loads_may_read_any(shelf: Shelf) -> None:
    attempt(shelf)
    assert uses(shelf).loading == "attempt 1007, which does not say what it does"
    attempt(shelf, ("starting", 0))
    assert uses(shelf).loading == "attempt 1007"
    attempt(shelf, ("loading", 0))
    with shelf.directory.paths.phases("1007").open("ab") as stream:
        stream.write(b'{"time": 1.0, "phase": "trai')  # a line that is being written
    assert uses(shelf).loading == "attempt 1007"
    attempt(shelf, ("loading", 0), held=False)
    assert uses(shelf) == Uses()
    attempt(shelf, ("loading", 0), age=LEASE_SECONDS + 60)
    assert not uses(shelf).loading


def test_one_clock_alone_does_not_end_an_attempt(shelf: Shelf) -> None:
    attempt(shelf, ("loading", 0))
    now = time.time()
    for clocks in (
        Clocks(now + 1e6, now),
        Clocks(now, now + 1e6),
        Clocks(now - 1e6, now - 1e6),
        Clocks(now),
    ):
        assert uses(shelf, clocks).loading
    assert not uses(shelf, Clocks(now + 1e6, now + 1e6)).loading


def test_a_lease_that_cannot_be_read_names_no_one_and_counts(shelf: Shelf) -> None:
    attempt(shelf, ("training", 300))
    (LeaseFolder(shelf.directory.paths).path / "7.json").write_text("{")
    assert uses(shelf).loading == "an attempt whose lease cannot be read"


# -------------------------------------------------------------------------- roll-backs and the card
def test_the_step_that_the_last_roll_back_went_to(shelf: Shelf) -> None:
    event = RecoveryEvent("loss", 9.0, 2.0, 410, 390, 300, 391, 420, 1.0)
    record = RecoveryRecord((replace(event, to_step=100), event))
    write_recovery(shelf.directory.paths, record)
    found = uses(shelf)
    assert (
        found.by_step == {300: ("the last roll-back went back to it",)} and found.recovery == record
    )
    (shelf.directory.paths.state / "recovery.json").write_text(
        '{"schema": 1, "variants": {"main": [{}]}}'
    )
    with pytest.raises(ValueError, match="is damaged"):
        uses(shelf)


def test_the_step_that_the_card_loads(shelf: Shelf) -> None:
    shelf.save(100, 200)
    assert uses(shelf, load=f"{shelf.folder}/global_step100").by_step == {
        100: ("checkpoint.load of the card names it",)
    }
    (shelf.directory.root / "link").symlink_to(shelf.folder)
    assert 100 in uses(shelf, load=f"{shelf.directory.root}/link/global_step100/").by_step
    for other in (str(shelf.folder), "/elsewhere/global_step100", "global_step100"):
        assert uses(shelf, load=other) == Uses()


# ----------------------------------------------------------------------------- copies
def claim(shelf: Shelf, mine: Claim, thing: str = "copy-url") -> None:
    folder = ClaimFolder(shelf.directory, thing)
    assert folder.take(mine, folder.newest())


def test_a_step_that_is_being_copied(shelf: Shelf) -> None:
    mine = Claim.of_this_process(time.time(), 60, step=200)
    claim(shelf, mine)
    assert uses(shelf).by_step == {200: (f"it is being copied by {mine}",)}
    now = time.time()
    # it lives, whatever the clocks say
    assert 200 in uses(shelf, Clocks(now + 1e9, now + 1e9)).by_step
    claim(shelf, Claim.of_this_process(now, 60))  # between two steps
    claim(shelf, replace(mine, data={"step": 5}), "pulse")  # no copy
    assert uses(shelf) == Uses()


def test_a_copier_that_died_and_one_of_another_host(shelf: Shelf) -> None:
    mine = Claim.of_this_process(time.time(), HOUR, step=200)
    gone = replace(mine.process, pid=1 << 22)
    claim(shelf, replace(mine, process=gone))
    assert uses(shelf) == Uses()
    claim(shelf, replace(mine, process=gone, child=mark(os.getpid())))
    assert 200 in uses(shelf).by_step
    far = replace(mine, host="elsewhere", time=1.0, expires=1.0 + HOUR)
    claim(shelf, far)
    now = time.time()
    assert 200 in uses(shelf, Clocks(now, now)).by_step
    assert (
        200 in uses(shelf, Clocks(now + 1e6, now)).by_step
        and 200 in uses(shelf, Clocks(now, now + 1e6)).by_step
    )
    assert uses(shelf, Clocks(now + 1e6, now + 1e6)) == Uses()
    claim(shelf, replace(far, held=False))
    assert uses(shelf) == Uses()


def test_a_claim_that_cannot_be_read_is_not_known(shelf: Shelf) -> None:
    folder = ClaimFolder(shelf.directory, "copy-store").path
    folder.mkdir(parents=True)
    (folder / "1.json").write_text("{")
    with pytest.raises(ValueError, match="the claim of copy-store cannot be read"):
        uses(shelf)
    write_json(
        folder / "2.json", {**to_builtins(Claim.of_this_process(time.time(), 60)), "held": False}
    )
    assert uses(shelf) == Uses()


# ----------------------------------------------------------------------------- clocks
def test_both_clocks_are_asked_and_nothing_is_left(shelf: Shelf) -> None:
    folder = shelf.directory.paths.state / "checkpoints"
    clocks = read_clocks(folder)
    assert (
        clocks.server is not None
        and abs(clocks.here - clocks.server) < HOUR
        and not list(folder.iterdir())
    )
